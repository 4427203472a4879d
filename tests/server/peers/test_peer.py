"""The bounds of one peer connection, without a network."""

import asyncio

import pytest

from server.peers.frames import FrameKind, LinkFrame
from server.peers.peer import Peer
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
