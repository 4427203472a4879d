"""`HalfDuplexClient` and `python -m clients.talk --mode half_duplex`, against a worker and scripted servers."""

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile

from clients import talk
from clients.errors import ConnectionLost, Refused, ServerError
from clients.half_duplex import connect_half_duplex, half_duplex_settings
from tests.clients.test_duplex_client import run, scripted
from tests.conformance.servers import Servers
from tests.worker.http.half_duplex_client import DEAF_S, PIECE, SHORT, sentence
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.small_worker import N_SLOTS
from worker.config.service import ROOT
from worker.protocol.codec import Message
from worker.protocol.gateway_messages import Queued, QueueDone
from worker.protocol.half_duplex_messages import (
    AnswerInterrupted,
    TurnChunk,
    TurnDone,
    TurnHeard,
    TurnPrepared,
    TurnTimeout,
    VadState,
)
from worker.protocol.messages import Error
from worker.protocol.wire import Sound, WireError

GREETING = ROOT / "tests" / "data" / "greeting.wav"
LONG = half_duplex_settings({"generation": {"max_new_tokens": 2000, "temperature": 0}, "vad": {"barge_in": True}})


@pytest.fixture(scope="module")
def worker(servers: Servers) -> WorkerProcess:
    return servers.worker


@contextmanager
def on_thread(*messages: Message) -> Iterator[str]:
    """A server that answers the first message with all of these. Yields: its address."""
    url: queue.Queue[str] = queue.Queue()
    over = threading.Event()

    async def live() -> None:
        async with scripted(*messages, n_received=1) as one:
            url.put(one)
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    try:
        yield url.get(timeout=10)
    finally:
        over.set()
        thread.join(10)


def address(worker: WorkerProcess) -> str:
    return f"ws://127.0.0.1:{worker.port}/ws/half_duplex"


def test_conversation(worker: WorkerProcess) -> None:
    async def story() -> None:
        async with connect_half_duplex(address(worker), "hdx_me") as client:
            with pytest.raises(ServerError, match="bad_audio"):
                await client.prepare(["Hello.", np.full(16_000, np.nan, np.float32)])
            prepared = await client.prepare(["Hello.", sentence()[:16_000]], LONG)
            assert (prepared.session_id, prepared.timeout_s) == ("hdx_me", 300)
            await asyncio.sleep(DEAF_S)
            await client.send_sound(sentence())
            kinds = []
            async for message in client:
                kinds.append(type(message))
                if isinstance(message, TurnChunk) and message.audio_data:
                    break
            assert kinds[:3] == [VadState, VadState, TurnHeard]
            interrupted = await client.interrupt()
            assert interrupted.turn_index == 1 and interrupted.audio_ms > 0
            rest = [type(await anext(client))]
            while rest[-1] is not TurnDone:
                rest.append(type(await anext(client)))
            assert AnswerInterrupted in rest, f"expected the interrupt in the order of messages, got {rest}"
            assert (await client.stop()).session_id == "hdx_me"
            assert [message async for message in client] == []

    run(story)
    worker.wait_free(N_SLOTS)


def test_waits_in_the_queue_of_a_gateway() -> None:
    async def story() -> None:
        places = []
        waiting = Queued(position=2, estimated_wait_s=3.0, queue_length=2, ticket_id="q_0123456789ab")
        async with (
            scripted(waiting, QueueDone(), TurnTimeout(elapsed_s=1.0)) as url,
            connect_half_duplex(url, on_queue=lambda place: places.append(place.position)) as client,
        ):
            assert client.session_id.startswith("hdx_")
            assert [type(message) async for message in client] == [TurnTimeout]
        assert places == [2]

    run(story)


def test_lost_connection_names_the_last_error() -> None:
    async def story() -> None:
        messages = QueueDone(), Error(error="no engine", code="engine")
        async with scripted(*messages, code=1011) as url, connect_half_duplex(url) as client:
            with pytest.raises(ConnectionLost, match=r"close code 1011.*engine: no engine"):
                async for message in client:
                    assert isinstance(message, Error)
            with pytest.raises(ConnectionLost):
                await client.send_sound(np.zeros(PIECE, np.float32))

    run(story)


def test_refused_handshake(worker: WorkerProcess) -> None:
    async def story() -> None:
        with pytest.raises(Refused, match="HTTP 403"):
            async with connect_half_duplex(f"ws://127.0.0.1:{worker.port}/ws/nothing"):
                pass

    run(story)


def test_settings_are_checked() -> None:
    assert half_duplex_settings({"vad": {"threshold": 0.5, "other": 1}, "more": 2}).vad.threshold == 0.5
    with pytest.raises(WireError, match=r"config\.vad\.threshold: expected a number from 0\.05 to 1, got 3"):
        half_duplex_settings({"vad": {"threshold": 3}})


# --- the command ---------------------------------------------------------------------------------


def test_talk_in_turns(worker: WorkerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talk.json"
    settings = {**SHORT["generation"], "length_penalty": 0.9, "top_k": 1}
    pairs = [*(f"generation.{key}={value}" for key, value in settings.items()), "tts.enabled=false"]
    arguments = ["--url", address(worker), "--mode", "half_duplex", "--input", str(GREETING), "--prompt", "Hi."]
    status = talk.main([*arguments, "--transcript", str(path), *(part for one in pairs for part in ("--set", one))])
    printed, err = capsys.readouterr()
    assert status == 0, err
    transcript = json.loads(path.read_text())
    [turn] = transcript["turns"]
    assert (transcript["mode"], transcript["config"]["generation"]["length_penalty"]) == ("half_duplex", 0.9)
    assert turn["text"] and turn["stopped"] == "length" and turn["heard_ms"] > 500 and turn["first_sound_ms"] is None
    assert repr(turn["text"]) in printed and "heard" in printed
    worker.wait_free(N_SLOTS)


def test_talk_writes_the_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "reply.wav"
    tone = np.full(12_000, 0.5, np.float32)
    answer = [
        TurnHeard(speech_duration_ms=1000),
        *(TurnChunk(chunk_index=n, text_delta="a", audio_data=Sound(tone), duration_ms=500.0) for n in range(2)),
        TurnChunk(chunk_index=2, is_final=True),
        TurnDone(turn_index=1, text="aa"),
    ]

    messages = [TurnPrepared(session_id="a", timeout_s=300), *answer, TurnTimeout(elapsed_s=300.0, reason="over")]
    with on_thread(QueueDone(), *messages) as url:
        command = ["--url", url, "--mode", "half_duplex", "--input", str(GREETING), "--out", str(out)]
        assert talk.main(command) == 0
    [turn] = json.loads(out.with_suffix(".json").read_text())["turns"]
    wave, rate = soundfile.read(out, dtype="float32")
    assert (rate, turn["sound_ms"], int((wave > 0.4).sum())) == (24_000, 1000, 24_000)
    assert "the server ends the conversation: over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("--fast",), "--fast: expected --mode duplex, got --mode half_duplex"),
        (("--set", "temperature=1"), "--set: expected one of vad.threshold"),
        (("--set", "vad.loudness=1"), "got vad.loudness"),
        (("--set", "vad.threshold=3"), "expected a number from 0.05 to 1, got 3"),
    ],
)
def test_talk_refuses_arguments(given: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk.main(["--mode", "half_duplex", "--input", str(GREETING), *given]) == 2
    assert text in capsys.readouterr().err
