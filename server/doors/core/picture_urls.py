"""Pictures behind https addresses of hosts that the operator allows, fetched by the gateway.

An address of a client must not reach what only this machine may reach. So a host name is resolved once, all its
addresses must be public, and the connection goes to one of them; redirects pass the same checks.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import httpx

MAX_PICTURE_BYTES = 20 * 2**20
FETCH_S = 10.0  # for one picture, the wait for its turn and redirects included
MAX_REDIRECTS = 3
MAX_FETCHES = 8  # of all clients at the same time
HTTPS_PORT = 443
NAT64, UNICAST = IPv6Network("64:ff9b::/96"), IPv6Network("2000::/3")
Resolve = Callable[[str], Awaitable[list[str]]]


class PictureUrlError(Exception):
    """A picture that is not fetched. expected, got: texts for the client."""

    def __init__(self, expected: str, got: str):
        super().__init__(f"expected {expected}, got {got}")
        self.expected, self.got = expected, got


async def resolved(host: str) -> list[str]:
    """All addresses of a host name. Raises: OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, HTTPS_PORT, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public_address(address: str) -> bool:
    """Whether an IP address can be reached from everywhere; also for the IPv4 address inside an IPv6 one."""
    found = ip_address(address.partition("%")[0])
    inner = _inner(found) if isinstance(found, IPv6Address) else None
    if isinstance(found, IPv6Address) and inner is None and found not in UNICAST:
        return False  # all others are local or reserved, which `is_global` does not know of each
    return all(one.is_global and not one.is_multicast for one in (found, inner or found))


def _inner(address: IPv6Address) -> IPv4Address | None:
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour


class PictureUrls:
    """Fetches pictures.

    Args:
        hosts: allowed host names; `*` stands for any text. Without any, every address is refused.
        resolve: gives the addresses of a host name.
        transport: sends the requests; None: over TLS, with the certificates of httpx.
    """

    def __init__(
        self,
        hosts: tuple[str, ...] = (),
        *,
        resolve: Resolve = resolved,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        self._hosts, self._resolve, self._transport = tuple(host.lower() for host in hosts), resolve, transport
        self._certificates: ssl.SSLContext | None = None
        self._free = asyncio.Semaphore(MAX_FETCHES)

    def allows(self, url: str) -> bool:
        """Whether `fetch` tries this address."""
        return bool(self._hosts) and url[:6].lower() == "https:"

    async def fetch(self, url: str) -> bytes:
        """The bytes behind an address, which need not be a picture. Raises: PictureUrlError."""
        try:
            async with asyncio.timeout(FETCH_S), self._free:
                return await self._fetch(httpx.URL(url))
        except TimeoutError:
            raise PictureUrlError(f"a picture within {FETCH_S:g} s", "none") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError, ValueError) as error:
            raise PictureUrlError("a picture behind the address", type(error).__name__) from None

    async def _fetch(self, url: httpx.URL) -> bytes:
        async with await self._client() as client:
            for _ in range(MAX_REDIRECTS + 1):
                address, name = await self._checked(url), url.raw_host.decode("ascii").lower()
                # The name stays in the request and in the check of the certificate.
                request = client.build_request(
                    "GET",
                    url.copy_with(host=address),
                    headers={"host": name, "accept": "image/*", "accept-encoding": "identity"},
                    extensions={"sni_hostname": name},
                )
                response = await client.send(request, stream=True)
                try:
                    if not response.has_redirect_location:
                        return await _content(response)
                    url = url.join(response.headers["location"])
                finally:
                    await response.aclose()
        raise PictureUrlError(f"at most {MAX_REDIRECTS} redirects", "more")

    async def _client(self) -> httpx.AsyncClient:
        # A kept connection would be used for another name at the same address, without a check of its certificate.
        limits = httpx.Limits(max_keepalive_connections=0)
        if self._transport is not None:
            return httpx.AsyncClient(transport=self._transport, trust_env=False, limits=limits)
        if self._certificates is None:
            self._certificates = await asyncio.to_thread(httpx.create_ssl_context)
        return httpx.AsyncClient(verify=self._certificates, trust_env=False, limits=limits, timeout=FETCH_S)

    async def _checked(self, url: httpx.URL) -> str:
        """A public address of the URL's host. Raises: PictureUrlError; OSError."""
        if url.scheme != "https" or url.userinfo or url.port not in (None, HTTPS_PORT):
            raise PictureUrlError("an https address without a user and a port", f"one with {url.scheme}:")
        host = url.raw_host.decode("ascii").lower()
        if not any(fnmatchcase(host, pattern) for pattern in self._hosts):
            raise PictureUrlError("a host that the operator allows", host[:60])
        addresses = await self._resolve(host)
        if not addresses or not all(map(is_public_address, addresses)):
            raise PictureUrlError("a host with public addresses only", host[:60])
        return addresses[0]


async def _content(response: httpx.Response) -> bytes:
    """The body. Raises: PictureUrlError; httpx.HTTPError."""
    if response.status_code != httpx.codes.OK:
        raise PictureUrlError("the status 200", str(response.status_code))
    if response.headers.get("content-encoding", "identity") != "identity":
        raise PictureUrlError("a picture without compression", "a compressed one")
    data = bytearray()
    async for part in response.aiter_raw():
        data += part
        if len(data) > MAX_PICTURE_BYTES:
            raise PictureUrlError(f"at most {MAX_PICTURE_BYTES} bytes", "more")
    return bytes(data)
