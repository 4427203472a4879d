"""Addresses and ports of calls: an event loop that takes UDP ports from a range, and the candidates of an answer."""

import asyncio
import errno
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import aioice.ice
from aiortc import RTCIceServer

from worker.config.webrtc import WebRtcConfig

LOOPBACK = "127.0.0.1"
HOST_CANDIDATE = re.compile(r"a=candidate:(\S+) (\d+) (udp) (\d+) (\S+) (\d+) typ host(.*)", re.IGNORECASE)

OPUS = re.compile(r"^a=rtpmap:(\d+) opus/48000/2(?=\r$)", re.IGNORECASE | re.MULTILINE)


class PortRangeLoop(asyncio.SelectorEventLoop):
    """An event loop whose UDP sockets without a port of their own get one of a range, which aioice cannot do."""

    ports: range | None = None

    async def create_datagram_endpoint(  # type: ignore[override]  # passes on what it does not use
        self, protocol_factory: Callable[[], Any], local_addr: tuple[str, int] | None = None, **options: Any
    ) -> Any:
        """As in asyncio; a local port 0 becomes a free one of the range. Raises: OSError if all are in use."""
        if self.ports is None or local_addr is None or local_addr[1] != 0:
            return await super().create_datagram_endpoint(protocol_factory, local_addr, **options)
        first = random.randrange(len(self.ports))
        for port in itertools.chain(self.ports[first:], self.ports[:first]):
            try:
                return await super().create_datagram_endpoint(protocol_factory, (local_addr[0], port), **options)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(errno.EADDRINUSE, f"all ports from {self.ports[0]} to {self.ports[-1]} are in use")


def use_network(loop: PortRangeLoop, config: WebRtcConfig) -> None:
    """Make the calls of this process use the configured addresses and ports."""
    if config.min_port is not None and config.max_port is not None:
        loop.ports = range(config.min_port, config.max_port + 1)
    addresses_of_machine = aioice.ice.get_host_addresses

    def addresses(use_ipv4: bool, use_ipv6: bool) -> list[str]:
        # A machine without a network can still call itself.
        return list(config.addresses) or addresses_of_machine(use_ipv4, use_ipv6) or [LOOPBACK]

    aioice.ice.get_host_addresses = addresses


def ice_servers(config: WebRtcConfig) -> list[RTCIceServer]:
    """The configured servers; none is a list too, in place of which aiortc would take a public server."""
    servers = [] if config.stun_url is None else [RTCIceServer(config.stun_url)]
    if config.turn_url is not None:
        servers.append(RTCIceServer(config.turn_url, config.turn_username, config.turn_credential))
    return servers


def with_repair(sdp: str) -> str:
    """An answer that asks for packets with a copy of the one before (FEC)."""
    return OPUS.sub(r"\g<0>\r\na=fmtp:\1 minptime=10;useinbandfec=1", sdp)


def with_public_address(sdp: str, address: str | None) -> str:
    """An answer with a second candidate for each IPv4 one, at the address that a NAT forwards."""
    if address is None:
        return sdp
    return "\r\n".join(_with_second(sdp.split("\r\n"), address))


def _with_second(lines: Sequence[str], address: str) -> list[str]:
    found: list[str] = []
    for line in lines:
        found.append(line)
        match = HOST_CANDIDATE.fullmatch(line)
        if match is None or ":" in match[5]:
            continue
        foundation, component, transport, priority, host, port, rest = match.groups()
        lower = max(1, int(priority) - 2**24)
        second = f"a=candidate:{foundation}p {component} {transport} {lower} {address} {port} typ srflx"
        found.append(f"{second} raddr {host} rport {port}{rest}")
    return found
