"""A process of calls, driven over its link."""

import asyncio
import socket
import subprocess
import sys

from aiortc import RTCConfiguration, RTCPeerConnection

from server.peers.frames import FrameKind, LinkFrame, read_frame, write_frame
from worker.config.service import ROOT
from worker.config.webrtc import WebRtcConfig

ANSWER_S = 30.0


def test_bad_frames_end_their_call_alone_and_the_link_ends_the_process() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "server.peers.main", str(theirs.fileno())]
            process = subprocess.Popen(command, cwd=ROOT, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        write_frame(writer, FrameKind.SETTINGS, 0, WebRtcConfig().model_dump_json().encode())

        async def answer(kind: FrameKind, call: int, data: bytes) -> LinkFrame:
            write_frame(writer, kind, call, data)
            async with asyncio.timeout(ANSWER_S):
                return await read_frame(reader)

        refused = await answer(FrameKind.OFFER, 1, b"no SDP")
        assert refused.kind is FrameKind.REFUSED and refused.call == 1 and b"one audio section" in refused.data
        client = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        client.addTransceiver("audio")
        await client.setLocalDescription(await client.createOffer())
        accepted = await answer(FrameKind.OFFER, 2, client.localDescription.sdp.encode())
        assert accepted.kind is FrameKind.ANSWER, f"expected an answer, got {accepted}"
        gone = await answer(FrameKind.PLAY, 2, b"")  # without the number of a response
        assert (gone.kind, gone.call) == (FrameKind.GONE, 2)
        await client.close()
        assert (await answer(FrameKind.OFFER, 3, b"")).call == 3, "expected a process that goes on"
        writer.close()
        assert await asyncio.to_thread(process.wait, ANSWER_S) == 0

    asyncio.run(scenario())
