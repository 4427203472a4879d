"""Pictures behind addresses: which are fetched, from where, and what ends a fetch."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from server.doors.core import picture_urls
from server.doors.core.picture_urls import MAX_PICTURE_BYTES, PictureUrlError, PictureUrls, is_public_address
from tests.server.certificates import make_certificate

PUBLIC = {"pictures.example.org": ["93.184.216.34", "2606:2800:220:1::1"], "cdn.example.net": ["1.1.1.1"]}
PRIVATE = {"inside.example.org": ["10.0.0.5"], "both.example.org": ["93.184.216.34", "127.0.0.1"]}
Answer = Callable[[httpx.Request], httpx.Response]


def fetcher(answer: Answer, *hosts: str) -> PictureUrls:
    async def resolve(host: str) -> list[str]:
        return {**PUBLIC, **PRIVATE}.get(host, [host])

    return PictureUrls(hosts or ("*.example.org",), resolve=resolve, transport=httpx.MockTransport(answer))


def fetch(pictures: PictureUrls, url: str) -> bytes:
    return asyncio.run(pictures.fetch(url))


def body(data: bytes, status: int = 200, **headers: str) -> httpx.Response:
    """A response whose body is sent in two parts."""

    async def parts() -> AsyncIterator[bytes]:
        yield data[:4]
        yield data[4:]

    return httpx.Response(status, headers=headers, content=parts())


def nothing(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"expected no request, got {request.url}")


def test_the_request_goes_to_the_address_that_was_checked() -> None:
    """Whatever the name means a moment later."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return body(b"picture")

    assert fetch(fetcher(answer), "https://Pictures.example.org/a/b.jpg?c=d") == b"picture"
    [request] = seen
    assert str(request.url) == "https://93.184.216.34/a/b.jpg?c=d"
    assert request.headers["host"] == request.extensions["sni_hostname"] == "pictures.example.org"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://cdn.example.net/a.jpg", "the operator allows"),
        ("https://example.org/a.jpg", "the operator allows"),
        ("https://inside.example.org/", "public addresses"),
        ("https://both.example.org/", "public addresses"),
        ("http://pictures.example.org/", "https address"),
        ("https://user:word@pictures.example.org/", "https address"),
        ("https://pictures.example.org:8006/", "https address"),
        ("https://pictures.example.org:bad/", "a picture"),
        ("https:///", "the operator allows"),
    ],
)
def test_other_addresses_are_refused_before_a_request(url: str, expected: str) -> None:
    with pytest.raises(PictureUrlError, match=expected):
        fetch(fetcher(nothing), url)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        *((one, False) for one in ("127.0.0.1", "10.1.2.3", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1")),
        *((one, False) for one in ("::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1")),
        *((one, False) for one in ("2002:7f00:1::", "2001:0:1::", "ff02::1", "::")),
        *((one, False) for one in ("::7f00:1", "64:ff9b:1::7f00:1", "fec0::1", "5f00::1")),
        ("64:ff9b::808:808", True),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public_address(address) == public


def test_a_name_beyond_ascii_is_sent_as_it_is_resolved() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.extensions["sni_hostname"] == "xn--bcher-kva.example.org"
        return body(request.headers["host"].encode())

    async def resolve(host: str) -> list[str]:
        return ["93.184.216.34"]

    pictures = PictureUrls(("*.example.org",), resolve=resolve, transport=httpx.MockTransport(answer))
    assert fetch(pictures, "https://b\u00fccher.example.org/") == b"xn--bcher-kva.example.org"


def redirect(target: str) -> Answer:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/start":
            return httpx.Response(302, headers={"location": target})
        return body(request.headers["host"].encode())

    return answer


def test_redirects_pass_the_same_checks() -> None:
    start = "https://pictures.example.org/start"
    hosts = ("pictures.example.org", "cdn.example.net", "inside.example.org")
    assert fetch(fetcher(redirect("https://cdn.example.net/x"), *hosts), start) == b"cdn.example.net"
    assert fetch(fetcher(redirect("/end"), *hosts), start) == b"pictures.example.org"
    for target in ("https://inside.example.org/", "https://evil.example.com/", "http://pictures.example.org/end"):
        with pytest.raises(PictureUrlError):
            fetch(fetcher(redirect(target), *hosts), start)
    with pytest.raises(PictureUrlError, match="redirects"):
        fetch(fetcher(redirect("/start"), *hosts), start)


def test_long_answers_and_other_statuses_are_refused() -> None:
    answers = {
        "bytes": body(bytes(MAX_PICTURE_BYTES + 1)),
        "200": body(b"", 404),
        "compression": body(b"", **{"content-encoding": "gzip"}),
    }
    for expected, answer in answers.items():

        def answered(_: httpx.Request, response: httpx.Response = answer) -> httpx.Response:
            return response

        with pytest.raises(PictureUrlError, match=expected):
            fetch(fetcher(answered), "https://pictures.example.org/")


def test_a_slow_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_urls, "FETCH_S", 0.05)

    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(5)
        raise AssertionError("expected a timeout")

    async def resolve(host: str) -> list[str]:
        return PUBLIC[host]

    pictures = PictureUrls(("*",), resolve=resolve, transport=httpx.MockTransport(slow))
    with pytest.raises(PictureUrlError, match=r"within 0\.05 s"):
        fetch(pictures, "https://cdn.example.net/")


def test_the_certificate_must_be_that_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over real TLS, at an address that two names share."""
    cert, key = make_certificate(tmp_path, "mine", subject="DNS:pictures.example.org")
    serving, trusting = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context(cafile=cert)
    serving.load_cert_chain(cert, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\npicture")
        await writer.drain()
        writer.close()

    async def resolve(_: str) -> list[str]:
        return ["127.0.0.1"]

    async def scenario() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=serving) as server:
            port = server.sockets[0].getsockname()[1]
            monkeypatch.setattr(picture_urls, "HTTPS_PORT", port)
            monkeypatch.setattr(picture_urls, "is_public_address", lambda address: True)
            for name, expected in (("pictures", b"picture"), ("other", b"ConnectError")):
                pictures = PictureUrls(("*",), resolve=resolve, transport=httpx.AsyncHTTPTransport(verify=trusting))
                try:
                    got = await pictures.fetch(f"https://{name}.example.org:{port}/")
                except PictureUrlError as error:
                    got = error.got.encode()
                assert got == expected, name

    asyncio.run(scenario())


def test_without_hosts_nothing_is_allowed() -> None:
    assert not PictureUrls().allows("https://pictures.example.org/a.jpg")
    assert PictureUrls(("*",)).allows("HTTPS://pictures.example.org/") and not PictureUrls(("*",)).allows("http://a/")
    with pytest.raises(PictureUrlError, match="the operator allows"):
        fetch(PictureUrls(), "https://pictures.example.org/a.jpg")
