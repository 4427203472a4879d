import asyncio
import socket

import pytest

from server.peers.network import PortRangeLoop, ice_servers, with_public_address, with_repair
from worker.config.webrtc import WebRtcConfig

CANDIDATE = "a=candidate:ab 1 udp 2130706431 192.0.2.7 40009 typ host"
V6 = "a=candidate:cd 1 udp 2130706431 fd00::2 40010 typ host"


def taken_before_free() -> socket.socket:
    """A bound socket; the port after its own is free."""
    while True:
        taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        taken.bind(("127.0.0.1", 0))
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as following:
                following.bind(("127.0.0.1", taken.getsockname()[1] + 1))
        except (OSError, OverflowError):
            taken.close()
        else:
            return taken


def test_sockets_without_a_port_get_one_of_the_range() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with taken_before_free() as taken:
            first = taken.getsockname()[1]
            loop.ports = range(first, first + 2)
            transport, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0))
            assert transport.get_extra_info("sockname")[1] == first + 1
            with pytest.raises(OSError, match="all ports from"):
                await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0))
            transport.close()

    with asyncio.Runner(loop_factory=PortRangeLoop) as runner:
        runner.run(scenario())


def test_a_public_address_is_a_second_candidate() -> None:
    sdp = "\r\n".join(["v=0", CANDIDATE, V6, "a=end-of-candidates", ""])
    lines = with_public_address(sdp, "203.0.113.9").split("\r\n")
    second = "a=candidate:abp 1 udp 2113929215 203.0.113.9 40009 typ srflx raddr 192.0.2.7 rport 40009"
    assert lines == ["v=0", CANDIDATE, second, V6, "a=end-of-candidates", ""]
    assert with_public_address(sdp, None) == sdp


def test_an_answer_asks_for_repair() -> None:
    sdp = "m=audio 9 UDP/TLS/RTP/SAVPF 111\r\na=rtpmap:111 opus/48000/2\r\na=mid:0\r\n"
    asked = "a=rtpmap:111 opus/48000/2\r\na=fmtp:111 minptime=10;useinbandfec=1\r\n"
    assert asked in with_repair(sdp) and with_repair(sdp).count("\n") == 4


def test_servers_are_those_of_the_settings_alone() -> None:
    assert ice_servers(WebRtcConfig()) == [], "expected no public server"
    config = WebRtcConfig(
        stun_url="stun:stun.example.org", turn_url="turn:turn.example.org", turn_username="u", turn_credential="p"
    )
    stun, turn = ice_servers(config)
    assert stun.urls == "stun:stun.example.org" and (turn.username, turn.credential) == ("u", "p")
    assert "p'" not in repr(config) and "credential" not in repr(config)
