"""Speech of the tiny speech model through the gateway: files, events, live text, voices, limits, other models."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import websockets

from assets.build_tiny_speech import SPEAKERS, build
from benchmarks.tts import arrivals
from server.doors.core.chat_turn import DoorTurn
from server.doors.core.sound_formats import FORMAT_NAMES, MEDIA_TYPES
from server.doors.speech.live_text import LiveTextSocket
from server.live import slot_wait
from tests.models.token2wav.s3gen import tiny_s3gen
from tests.server.doors.core.test_sound_formats import decoded
from tests.server.garbage import without_garbage
from tests.server.live_gateway import RunningGateway, running_gateway, wait_until
from tests.worker.speech.served import FRAME, N_SLOTS, SpeechWorker, speech_worker
from worker.config.access import ClientLimits
from worker.protocol.speech_messages import SPEECH_VOICES

PATH, STREAM = "/v1/audio/speech", "/v1/audio/speech/stream"
TEXT = "Good morning."
ASKED = {"model": "tts-1", "input": TEXT, "voice": "alloy", "seed": 7, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeechWorker]:
    data = tmp_path_factory.mktemp("data")
    with speech_worker(build(data / "tiny-voices"), data) as worker:
        yield worker


@asynccontextmanager
async def gateway_of(worker: SpeechWorker, *, omni: bool = False, **service: Any) -> AsyncIterator[RunningGateway]:
    model = {"omni": omni, "speech_path": worker.service.settings.engine.speech_path}
    async with running_gateway(worker.port, model=model, **service) as gateway:
        workers = gateway.gateway.dispatcher.workers
        await wait_until(lambda: workers.n_free_of("speech") == N_SLOTS, "free slots of the speech model")
        yield gateway


def run(worker: SpeechWorker, scenario: Callable[[RunningGateway], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        async with gateway_of(worker, **options) as gateway:
            await scenario(gateway)
            leases = gateway.gateway.dispatcher.workers
            await wait_until(lambda: not leases.leases, "no lease that is left")

    asyncio.run(whole())


def test_serves_every_format_events_and_voices(worker: SpeechWorker) -> None:
    async def scenario(gateway: RunningGateway) -> None:
        http = gateway.http
        listed = [(model["id"], model["loaded"]) for model in (await http.get("/v1/models")).json()["data"]]
        assert listed == [("tiny-voices", True)] and (await http.get("/v1/models/tts-1")).status_code == 200
        for name in FORMAT_NAMES:
            response = await http.post(PATH, json={**ASKED, "response_format": name, "max_new_tokens": 3})
            assert response.status_code == 200 and response.headers["content-type"] == MEDIA_TYPES[name]
            samples, rate = decoded(response.content, name)
            assert abs(len(samples) / rate - 3 * 0.08) < 0.1 and np.abs(samples).max() > 0.01
        pcm = [
            (await http.post(PATH, json={**ASKED, "response_format": "pcm", "seed": seed})).content
            for seed in (7, 7, 8)
        ]
        assert pcm[0] == pcm[1] != pcm[2], "the seed decides the sound"
        voices = (await http.get("/v1/audio/voices")).json()["voices"]
        assert {*SPEECH_VOICES, *SPEAKERS, "default"} <= {*voices} and len(voices) == len({*voices})
        short, sounds = {**ASKED, "response_format": "pcm", "max_new_tokens": 1}, set()
        for voice in (*sorted(SPEECH_VOICES), "Ryan", {"id": "vivian"}):
            response = await http.post(PATH, json={**short, "voice": voice})
            assert response.status_code == 200 and len(response.content) == 2 * FRAME
            sounds.add(response.content)
        assert len(sounds) == 3, "the names of the API are spread over all speakers"
        response = await http.post(PATH, json={**ASKED, "response_format": "pcm", "stream_format": "sse"})
        *deltas, done = [json.loads(one.removeprefix("data: ")) for one in response.text.split("\n\n") if one]
        assert b"".join(base64.b64decode(one["audio"]) for one in deltas) == pcm[0] and len(deltas) == 3
        assert done["finish_reason"] in ("stop", "length")
        assert done["usage"]["output_tokens"] == len(pcm[0]) // (2 * FRAME)

    run(worker, scenario)


def test_refusals_name_the_field(worker: SpeechWorker) -> None:
    async def scenario(gateway: RunningGateway) -> None:
        for fields, status, param in (
            ({"model": "tiny"}, 404, "model"),
            ({"voice": "missing"}, 400, "voice"),
            ({"language": "klingon"}, 400, "language"),
            ({"task_type": "VoiceDesign"}, 400, "task_type"),
            ({"task_type": "Opera"}, 400, "task_type"),
            ({"initial_codec_chunk_frames": 9}, 400, "initial_codec_chunk_frames"),
            ({"speaker_embedding": ["a"]}, 400, "speaker_embedding"),
        ):
            response = await gateway.http.post(PATH, json={**ASKED, **fields})
            assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
        assert (await gateway.http.post("/v1/chat/completions", json={"model": "tiny"})).status_code in (400, 404)

    run(worker, scenario)


def test_requests_wait_for_the_slots_of_their_model(worker: SpeechWorker) -> None:
    """More requests than slots are all answered; clients that leave give theirs back."""

    async def scenario(gateway: RunningGateway) -> None:
        url = f"ws://127.0.0.1:{gateway.port}{STREAM}"
        held = [await websockets.connect(url, proxy=None) for _ in range(N_SLOTS)]
        for one in held:
            await one.send(json.dumps({"type": "session.config"}))
            await one.send(json.dumps({"type": "input.text", "text": "Word by word "}))
            assert json.loads(await one.recv())["type"] == "audio.start"
        queue = gateway.gateway.dispatcher.queue
        asked = {**ASKED, "response_format": "pcm"}
        asking = [asyncio.create_task(gateway.http.post(PATH, json=asked)) for _ in range(3)]
        await wait_until(lambda: len(queue) == 3, "three tickets")
        async with websockets.connect(url, proxy=None) as wordy:  # its text is kept while it waits for a slot
            await wordy.send(json.dumps({"type": "session.config"}))
            for _ in range(5):
                await wordy.send(json.dumps({"type": "input.text", "text": "x" * 16_384}))
            told = []
            with suppress(websockets.ConnectionClosed):
                while True:
                    told.append(json.loads(await wordy.recv()))
        assert told[-1]["error"]["param"] == "input" and "at most 65536" in told[-1]["message"], told
        waiting = (await gateway.http.get("/api/queue")).json()["items"]
        assert [(one["request_type"], one["position"]) for one in waiting] == [
            ("speech", 1),
            ("speech", 2),
            ("speech", 3),
        ]
        for one in held:
            one.transport.abort()
        answers = await asyncio.gather(*asking)
        assert [one.status_code for one in answers] == [200] * 3
        first, *others = [np.frombuffer(one.content, "<i2").astype(int) for one in answers]
        for other in others:  # steps of 1/32768: the size of a batch changes the last bits of its numbers
            assert other.shape == first.shape and np.abs(other - first).max() <= 2, "equal seeds, equal sound"

    run(worker, scenario)


async def until_done(socket: websockets.ClientConnection) -> tuple[bytes, list[dict[str, Any]]]:
    """The sound of one utterance, and its messages up to `session.done`."""
    sound, told = b"", list[dict[str, Any]]()
    while not told or told[-1]["type"] != "session.done":
        message = await socket.recv()
        if isinstance(message, bytes):
            sound += message
        else:
            told.append(json.loads(message))
            assert told[-1]["type"] != "error", told
    return sound, told


def test_live_texts_are_spoken_while_they_arrive(worker: SpeechWorker) -> None:
    """Utterances follow each other on one connection, each with the latest settings."""

    async def scenario(gateway: RunningGateway) -> None:
        async with (
            without_garbage(LiveTextSocket, DoorTurn),
            websockets.connect(f"ws://127.0.0.1:{gateway.port}{STREAM}", proxy=None) as socket,
        ):

            async def send(kind: str, **fields: Any) -> None:
                await socket.send(json.dumps({"type": kind, **fields}))

            await send("session.config", speaker="serena", response_format="pcm", max_new_tokens=12)
            await send("input.text", text="")
            await send("input.text", text="One two three ")
            start = {
                "type": "audio.start",
                "utterance_index": 0,
                "sentence_index": 0,
                "sentence_text": "One two three ",
            }
            assert json.loads(await socket.recv()) == {**start, "format": "pcm", "sample_rate": 24_000, "channels": 1}
            first = await socket.recv()
            assert isinstance(first, bytes) and len(first) == 2 * FRAME, "sound comes before the end of the text"
            await send("input.text", text="four five.")
            await send("input.done")
            await send("session.config", stream_audio=False, max_new_tokens=2, split_granularity="sentence")
            await send("input.text", text="Six.")  # while the first utterance is spoken
            await send("input.done")
            rest, (done, ended) = await until_done(socket)
            place = {"utterance_index": 0, "sentence_index": 0}
            n_bytes = len(first + rest)
            assert done == {"type": "audio.done", **place, "total_bytes": n_bytes, "error": False}
            assert ended["usage"]["output_tokens"] == n_bytes // (2 * FRAME) and ended["total_sentences"] == 1
            assert json.loads(await socket.recv())["format"] == "wav"
            whole = await socket.recv()
            assert isinstance(whole, bytes) and len(whole) == 44 + 2 * 2 * FRAME, "one frame has the whole file"
            _, (done, ended) = await until_done(socket)
            assert (ended["utterance_index"], done["total_bytes"]) == (1, len(whole))
            await send("input.text", text=" ")
            await send("input.done")
            assert (await until_done(socket))[1][0]["total_sentences"] == 0, "an utterance without text"
            await send("session.close")
            await socket.wait_closed()
            assert socket.close_code == 1000

    run(worker, scenario)


WRONG: list[tuple[list[dict[str, Any]], str]] = [
    ([{"type": "input.text", "text": "Hi"}], "type"),
    ([{"type": "session.config", "model": "tiny"}], "model"),
    ([{"type": "session.config", "voice": "missing"}, {"type": "input.text", "text": "Hi there "}], "voice"),
    ([{"type": "session.config", "word_timestamps": True}], "word_timestamps"),
    ([{"type": "session.config"}, {"type": "input.audio"}], "type"),
    ([{"type": "session.config"}, {"type": "input.text", "text": "Hi "}, {"type": "session.config"}], "type"),
    ([{"type": "session.config"}, {"type": "input.text", "text": 5}], "input"),
]


async def last_error(gateway: RunningGateway, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The error that ends a connection with these messages."""
    found = []
    async with (
        without_garbage(LiveTextSocket, DoorTurn),
        websockets.connect(f"ws://127.0.0.1:{gateway.port}{STREAM}", proxy=None) as socket,
    ):
        with suppress(websockets.ConnectionClosed):
            for message in messages:
                await socket.send(json.dumps(message))
        with suppress(websockets.ConnectionClosed):
            while True:
                if isinstance(received := await socket.recv(), str):
                    found.append(json.loads(received))
    assert found[-1]["type"] == "error" and socket.close_code == 1008, (messages, found)
    error: dict[str, Any] = found[-1]["error"]
    return error


def test_errors_of_live_text_end_the_connection(worker: SpeechWorker) -> None:
    async def scenario(gateway: RunningGateway) -> None:
        for messages, param in WRONG:
            error = await last_error(gateway, messages)
            assert error["param"] == param, (messages, error)

    run(worker, scenario, omni=True)


@pytest.mark.parametrize("limit", ["live_text_s", "live_text_idle_s"])
def test_silent_clients_lose_their_slot(worker: SpeechWorker, limit: str) -> None:
    async def scenario(gateway: RunningGateway) -> None:
        begun = [{"type": "session.config"}, {"type": "input.text", "text": "Hi "}]
        error = await last_error(gateway, begun)
        assert error["code"] == "limit_reached" and limit in str(error["message"])
        assert f'limits_total{{limit="{limit}"}} 1.0' in (await gateway.http.get("/metrics")).text

    run(worker, scenario, limits=ClientLimits(**{limit: 0.1}))


def test_benchmark_hears_every_text(worker: SpeechWorker) -> None:
    async def scenario(gateway: RunningGateway) -> None:
        address = ("--base-url", f"http://127.0.0.1:{gateway.port}/v1")
        [row] = await arrivals.run(arrivals.parse([*address, "--rps", "50", "--requests", "2"]))
        assert (row["failed"], row["silent"]) == (0, 0) and row["first_audio_p95_ms"] >= row["first_audio_p50_ms"] > 0

    run(worker, scenario)


def test_administrators_load_and_unload_voice_conversion(worker: SpeechWorker, tmp_path: Path) -> None:
    """Beside the speech model, which goes on; a file that is no checkpoint takes nothing but the conversion."""
    path, service = tiny_s3gen.write(tmp_path), worker.service
    (wrong := tmp_path / "wrong.safetensors").write_bytes(b"no weights")
    before = service.settings

    async def scenario(gateway: RunningGateway) -> None:
        http, [held] = gateway.http, gateway.gateway.dispatcher.workers.all

        async def change(what: str, status: int, **body: str) -> dict[str, Any]:
            response = await http.post(f"/api/admin/models/{what}", json={"worker_id": "worker_0", **body})
            assert response.status_code == status, response.text
            await wait_until(lambda: held.state == "IDLE" and not held.is_suspended, "a worker that is ready")
            [shown] = (await http.get("/api/admin/models")).json()["workers"]
            assert shown["speech"] is not None
            return shown

        async def convert() -> httpx.Response:
            return await http.post("/v1/audio/conversions", files=parts)

        parts = {name: (None, text) for name, text in (("model", "tts-1"), ("speech_tokens", str([5] * 30)))}
        assert (await convert()).status_code == 503
        await change("load", 400, s3gen_path=str(tmp_path / "none"))
        shown = await change("load", 202, s3gen_path=str(wrong))
        assert shown["conversion"] is None and "wrong.safetensors" in shown["conversion_error"], shown
        assert "wrong.safetensors" in (await convert()).json()["error"]["message"]
        shown = await change("load", 202, s3gen_path=str(path))
        assert shown["conversion"]["running"] and (shown["conversion_path"], shown["conversion_error"]) == (
            str(path),
            None,
        )
        assert (response := await convert()).status_code == 200 and len(response.content) > 1000, response.text
        shown = await change("unload", 200, model="conversion")
        assert shown["conversion"] is None and shown["conversion_path"] == str(path)
        assert (await convert()).status_code == 503

    run(worker, scenario)
    service.settings = before


def test_administrators_swap_the_model(worker: SpeechWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for a model that is unloaded, or that could not be loaded, end with the reason."""
    monkeypatch.setattr(slot_wait, "MISSING_MODEL_S", 0.0)

    async def scenario(gateway: RunningGateway) -> None:
        http = gateway.http

        async def post(what: str, status: int, **body: str) -> dict[str, Any]:
            response = await http.post(f"/api/admin/models/{what}", json={"worker_id": "worker_0", **body})
            assert response.status_code == status, response.text
            answer: dict[str, Any] = response.json()
            return answer

        [shown] = (await http.get("/api/admin/models")).json()["workers"]
        assert shown["speech"]["kind"] == "CustomVoice" and shown["omni"] is False
        assert shown["speech"]["path"] == shown["speech_path"] and shown["speech"]["bytes"] > 1000
        assert "config.json" in (await post("load", 400, speech_path=str(tmp_path)))["detail"]
        folder = await asyncio.to_thread(build, tmp_path / "designs", "voice_design")
        await post("load", 202, speech_path=str(folder))
        workers = gateway.gateway.dispatcher.workers
        await wait_until(lambda: workers.all[0].about("speech").get("kind") == "VoiceDesign", "the other model")
        response = await http.post(PATH, json={**ASKED, "instructions": "A calm voice.", "task_type": "VoiceDesign"})
        assert response.status_code == 200, response.text
        memory = (await post("unload", 200, model="speech"))["memory"]
        assert memory["before"] > 0 < memory["after"]
        await wait_until(lambda: workers.n_slots_of("speech") == 0, "no speech model")
        assert (await http.get("/v1/models/tts-1")).json()["loaded"] is False
        refused = await http.post(PATH, json=ASKED)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert "speech model: expected one that is loaded, got none" in refused.json()["error"]["message"]
        (folder / "model.safetensors").write_bytes(b"no weights")
        await post("load", 202, speech_path=str(folder))
        await wait_until(lambda: workers.all[0].state == "FAILED", "a start that fails")
        refused = await http.post(PATH, json=ASKED)
        assert refused.status_code == 503 and "model.safetensors" in refused.json()["error"]["message"], refused.text
        assert (await post("load", 404, worker_id="worker_9"))["detail"]

    run(worker, scenario)
