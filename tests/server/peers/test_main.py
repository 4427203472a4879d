"""A process of calls, driven over its link."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiortc import RTCConfiguration, RTCPeerConnection

from server.peers.frames import FrameKind, LinkFrame, read_frame, write_frame
from tests.server.peers.turn_server import RELAYED, turn_server
from worker.config.service import ROOT
from worker.config.webrtc import WebRtcConfig

ANSWER_S = 30.0


@asynccontextmanager
async def peer_process(
    config: WebRtcConfig, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The link to a process of calls, which must end with it. options: of `subprocess.Popen`."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "server.peers.main", str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=(theirs.fileno(),), **options)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        write_frame(writer, FrameKind.SETTINGS, 0, config.model_dump_json().encode())
        yield reader, writer
        writer.close()
        assert await asyncio.to_thread(process.wait, ANSWER_S) == 0
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def offer_of_sound() -> str:
    client = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    client.addTransceiver("audio")
    await client.setLocalDescription(await client.createOffer())
    await client.close()
    return client.localDescription.sdp


def test_bad_frames_end_their_call_alone_and_the_link_ends_the_process() -> None:
    async def scenario() -> None:
        async with peer_process(WebRtcConfig(), stderr=subprocess.DEVNULL) as (reader, writer):

            async def answer(kind: FrameKind, call: int, data: bytes) -> LinkFrame:
                write_frame(writer, kind, call, data)
                async with asyncio.timeout(ANSWER_S):
                    return await read_frame(reader)

            refused = await answer(FrameKind.OFFER, 1, b"no SDP")
            assert refused.kind is FrameKind.REFUSED and refused.call == 1 and b"one audio section" in refused.data
            accepted = await answer(FrameKind.OFFER, 2, (await offer_of_sound()).encode())
            assert accepted.kind is FrameKind.ANSWER, f"expected an answer, got {accepted}"
            gone = await answer(FrameKind.PLAY, 2, b"")  # without the number of a response
            assert (gone.kind, gone.call) == (FrameKind.GONE, 2)
            assert (await answer(FrameKind.OFFER, 3, b"")).call == 3, "expected a process that goes on"

    asyncio.run(scenario())


@pytest.mark.parametrize("is_accepted", [True, False])
def test_the_password_of_a_turn_server_is_in_no_log_and_no_answer(is_accepted: bool, tmp_path: Path) -> None:
    user, password = "turn-user-of-calls", "s3cret-of-turn"

    async def scenario() -> list[LinkFrame]:
        async with turn_server(user, password if is_accepted else None) as server:
            url = f"turn:127.0.0.1:{server.port}"
            config = WebRtcConfig(addresses=("127.0.0.1",), turn_url=url, turn_username=user, turn_credential=password)
            with (tmp_path / "log").open("wb") as log:
                environment = {**os.environ, "DUOLOGUE_LOG_LEVEL": "DEBUG"}
                async with peer_process(config, stderr=log, env=environment) as (reader, writer):
                    got = []
                    for call, offer in enumerate((await offer_of_sound(), "no SDP"), 1):
                        write_frame(writer, FrameKind.OFFER, call, offer.encode())
                        async with asyncio.timeout(ANSWER_S):
                            got.append(await read_frame(reader))
                    write_frame(writer, FrameKind.PLAY, 1, b"")  # without the number of a response
                    async with asyncio.timeout(ANSWER_S):
                        got.append(await read_frame(reader))
            assert server.n_requests >= 2 and server.allocations == int(is_accepted)
            return got

    answer, *others = asyncio.run(scenario())
    assert [one.kind for one in (answer, *others)] == [FrameKind.ANSWER, FrameKind.REFUSED, FrameKind.GONE]
    assert (f"{RELAYED[0]} {RELAYED[1]} typ relay".encode() in answer.data) == is_accepted
    log = (tmp_path / "log").read_bytes()
    assert b"a call fails" in log, "expected a log"
    for text in (log, *(one.data for one in (answer, *others))):
        assert password.encode() not in text and user.encode() not in text
