"""The bounds of one peer connection, without a network."""

import asyncio

import aioice.ice
import aiortc.rtcsctptransport
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from benchmarks.doors.call_load import Microphone
from server.peers.frames import FrameKind, LinkFrame
from server.peers.peer import Peer
from tests.server.live_gateway import wait_until
from worker.config.webrtc import WebRtcConfig


def test_events_wait_for_the_channel_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.peers.peer.MAX_UNSENT", 1000)

    async def scenario() -> None:
        sent: list[FrameKind] = []
        peer = Peer(WebRtcConfig(), lambda kind, data: sent.append(kind))
        event = LinkFrame(FrameKind.EVENT, 1, b"x" * 600)
        peer.handle(event)
        assert not sent and peer._unsent == ["x" * 600]
        peer.handle(event)
        assert sent == [FrameKind.GONE] and not peer._unsent
        await peer.close()

    asyncio.run(scenario())


def test_a_message_of_too_many_fragments_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.peers.peer.MAX_FRAGMENTS", 20)
    monkeypatch.setattr(aioice.ice, "get_host_addresses", lambda use_ipv4, use_ipv6: ["127.0.0.1"])

    async def scenario() -> None:
        sent: list[tuple[FrameKind, bytes]] = []
        peer = Peer(WebRtcConfig(), lambda kind, data: sent.append((kind, data)))
        client = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        client.addTrack(Microphone())
        channel = client.createDataChannel("oai-events")
        await client.setLocalDescription(await client.createOffer())
        answer = await peer.answer(client.localDescription.sdp)
        await client.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        await wait_until(lambda: channel.readyState == "open", "the channel to open")
        channel.send("x" * 10_000)
        await wait_until(lambda: any(kind is FrameKind.EVENT for kind, _ in sent), "the event")
        monkeypatch.setattr(aiortc.rtcsctptransport, "USERDATA_MAX_LENGTH", 100)
        channel.send("x" * 10_000)
        await wait_until(lambda: any(kind is FrameKind.GONE for kind, _ in sent), "the end")
        assert [data for kind, data in sent if kind is FrameKind.GONE] == [b"a message has more than 20 fragments"]
        await peer.close()
        await client.close()

    asyncio.run(scenario())


def test_a_connection_closes_after_its_candidates_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that a TURN server gives after the end would stay allocated."""

    async def scenario() -> None:
        found, events = asyncio.Event(), list[str]()
        close = RTCPeerConnection.close

        async def slow(peer: Peer, offer: str) -> str:
            await found.wait()
            events.append("found")
            return "v=0"

        async def noted(connection: RTCPeerConnection) -> None:
            events.append("closed")
            await close(connection)

        monkeypatch.setattr(Peer, "_negotiated", slow)
        monkeypatch.setattr(RTCPeerConnection, "close", noted)
        peer = Peer(WebRtcConfig(), lambda kind, data: None)
        answering = asyncio.create_task(peer.answer(""))
        await asyncio.sleep(0)
        closing = asyncio.create_task(peer.close())
        for _ in range(10):
            await asyncio.sleep(0)
        found.set()
        await asyncio.gather(answering, closing)
        assert events == ["found", "closed"]

    asyncio.run(scenario())
