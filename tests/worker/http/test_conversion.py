"""Voice conversion through the gateway and on a worker's socket: sounds, tokens, voices, refusals, the slot."""

import base64
import io
import json
import wave
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conformance.servers import ANSWER_S, Servers
from tests.models.token2wav.prompt.prompt_sounds import prompt
from tests.worker.http.small_worker import N_SLOTS, cancels_one
from tests.worker.http.test_chat_socket import opened
from worker.protocol.wire import Sound

TOKENS = [i * 131 % 6561 for i in range(30)]


def wav(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(Sound(prompt(seconds, 16_000)[0]).packed("pcm16"))
    return file.getvalue()


@pytest.fixture(scope="module")
def http(servers: Servers) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{servers.gateway}", timeout=ANSWER_S)


def convert(
    http: httpx.Client, status: int = 200, files: dict[str, bytes] | None = None, **fields: str
) -> httpx.Response:
    parts = {name: (None, text) for name, text in {"model": "tts-1", "response_format": "pcm", **fields}.items()}
    given = {name: (f"{name}.wav", data) for name, data in (files or {}).items()}
    response = http.post("/v1/audio/conversions", files={**parts, **given})
    assert response.status_code == status, response.text[:300]
    return response


def test_sound_and_tokens_are_spoken_in_a_voice(servers: Servers, http: httpx.Client, root: Path) -> None:
    source = {"file": wav(1.3)}
    whole = convert(http, files=source, voice="alloy").content
    # 25 tokens a second, 960 samples each; this voice's mel has an odd number of frames, so one of 480 is its own.
    assert len(whole) == 2 * (33 * 960 - 480)
    assert np.frombuffer(whole, "<i2").any()
    given = {"voice_file": (root / "assets/ref_audio/default.wav").read_bytes()}
    text = json.dumps(TOKENS)
    spoken = convert(http, files=given, speech_tokens=text, seed="3").content
    assert len(spoken) == 2 * 30 * 960
    assert convert(http, files=given, speech_tokens=text, seed="3").content == spoken, "equal seeds, equal sound"
    assert convert(http, files=given, speech_tokens=text, seed="4").content != spoken
    events = convert(http, speech_tokens=text, stream_format="sse").text.split("\n\n")
    *deltas, done = [json.loads(line.removeprefix("data: ")) for line in events if line]
    assert sum(len(base64.b64decode(one["audio"])) for one in deltas) == 2 * (30 * 960 - 480)
    usage = {"input_tokens": 0, "output_tokens": 30, "total_tokens": 30}
    assert done == {"type": "speech.audio.done", "usage": usage, "finish_reason": "stop"}
    servers.worker.wait_free(N_SLOTS)


def test_refused_conversions_name_the_field(servers: Servers, http: httpx.Client) -> None:
    tokens = {"speech_tokens": json.dumps(TOKENS)}
    for status, param, text, files, fields in (
        (400, "file", "expected", {}, {}),
        (400, "file", "expected a sound or video file", {"file": b"none"}, {}),
        (400, "file", "expected at least 0.5 s", {"file": wav(0.2)}, {}),
        (413, "voice_file", "up to 30 s", {"voice_file": wav(31)}, tokens),
        (400, "speech_tokens", "either", {"file": wav(0.6)}, tokens),
        (400, "speech_tokens", "whole numbers", {}, {"speech_tokens": "[1.5]"}),
        (400, "speech_tokens", "expected JSON", {}, {"speech_tokens": "1,2"}),
        (400, None, "expected tokens in 0..6560, got [6561]", {}, {"speech_tokens": "[6561]"}),
        (400, "voice", "expected", {}, {**tokens, "voice": "missing"}),
        (400, "response_format", "expected one of", {}, {**tokens, "response_format": "midi"}),
        (400, "seed", "expected a whole number", {}, {**tokens, "seed": "-1"}),
        (404, "model", "", {}, {**tokens, "model": "other"}),
    ):
        error = convert(http, status, files=files, **fields).json()["error"]
        assert error["param"] == param and text in error["message"], f"expected {param}: {text}, got {error}"
    response = http.post("/v1/audio/conversions", json={"model": "tts-1"})
    assert response.status_code == 400 and "multipart/form-data" in response.json()["error"]["message"]
    servers.worker.wait_free(N_SLOTS)


def test_worker_refuses_two_sources_and_frees_the_slot_of_a_client_that_leaves(servers: Servers) -> None:
    worker, sound = servers.worker, Sound(prompt(0.6, 16_000)[0]).base64()
    for fields, code in (
        ({}, "bad_message"),
        ({"speech_tokens": TOKENS, "source_data": sound}, "bad_message"),
        ({"speech_tokens": TOKENS, "ref_audio_path": "no such voice"}, "bad_config"),
        ({"speech_tokens": []}, "bad_message"),
    ):
        with opened(worker, "/ws/conversion") as client:
            client.send(**fields)
            assert client.receive()["code"] == code
            assert client.close_code() == 1000
    with cancels_one(worker), opened(worker, "/ws/conversion") as client:
        client.send(speech_tokens=TOKENS * 200)
        client.until("chunk")
        state = worker.health()["models"]["conversion"]
        assert (state["running"], state["jobs"]) == (True, 1) and state["pieces"] > 0, state
    metrics = worker.ask("/metrics")[1]
    assert 'worker_conversions_total{end="cancelled"} 1.0' in metrics
