"""Items 22 to 27 of the conformance list: what a half-duplex client of the public implementation relies on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.conformance.servers import Servers, WireClient
from tests.worker.http.client_scripts import base64_of
from tests.worker.http.half_duplex_client import DEAF_S, PIECE, sentence

# As the page of the public implementation sends it.
CONFIG = {
    "vad": {"threshold": 0.8, "min_speech_duration_ms": 128, "min_silence_duration_ms": 500, "speech_pad_ms": 30},
    "generation": {"max_new_tokens": 8, "length_penalty": 1.1, "temperature": 0.7},
    "tts": {"enabled": False},
    "session": {"timeout_s": 300},
}
CONTENT = [
    {"type": "text", "text": "You are kind.", "name": "greeting"},
    {"type": "audio", "data": None, "name": "voice.wav", "duration": 3.5},
]


def changed(**groups: dict[str, Any]) -> dict[str, Any]:
    """The settings with some of their values replaced."""
    return {**CONFIG, **{name: {**CONFIG[name], **values} for name, values in groups.items()}}


@contextmanager
def conversation(servers: Servers, name: str, config: dict[str, Any] = CONFIG) -> Iterator[WireClient]:
    """A prepared conversation whose sound counts."""
    with servers.open(f"/ws/half_duplex/{name}") as client:
        client.send(type="prepare", system_content=CONTENT, config=config)
        client.until("prepared")
        time.sleep(DEAF_S + 0.05)
        yield client
        client.send(type="stop")


def push(client: WireClient, wave: np.ndarray) -> None:
    for start in range(0, len(wave), PIECE):
        client.send(type="audio_chunk", audio_base64=base64_of(wave[start : start + PIECE]))


def say(client: WireClient, name: str = "greeting") -> list[dict[str, Any]]:
    """Say a sentence. Returns: the messages up to the end of the answer."""
    push(client, sentence(name))
    return client.until("turn_done")


def test_item_22_prepare_on_open(servers: Servers) -> None:
    with servers.open("/ws/half_duplex/hdx_a") as client:
        client.send(type="prepare", system_content=CONTENT, config=CONFIG, other=1)
        queue_done, prepared = client.receive(), client.receive()
        assert queue_done == {"type": "queue_done"}
        assert (prepared["session_id"], prepared["timeout_s"]) == ("hdx_a", 300), f"got {prepared}"


def test_item_23_speech_and_silence_give_a_turn(servers: Servers) -> None:
    with conversation(servers, "hdx_b", changed(tts={"enabled": True})) as client:
        began, ended, generating, *chunks, last, done = say(client)
        assert (began["type"], began["speaking"]) == ("vad_state", True)
        assert (ended["type"], ended["speaking"]) == ("vad_state", False)
        assert generating["type"] == "generating" and type(generating["speech_duration_ms"]) is int
        assert chunks and {chunk["type"] for chunk in chunks} == {"chunk"}
        assert [chunk["chunk_index"] for chunk in chunks] == list(range(len(chunks)))
        assert {chunk["audio_sample_rate"] for chunk in chunks} == {24_000}
        assert (last["is_final"], last["text_delta"], last["audio_data"]) == (True, None, None)
        assert (done["turn_index"], done["text"]) == (1, "".join(one["text_delta"] or "" for one in chunks))
        sounds = [one for one in chunks if one["audio_data"] is not None]
        assert sounds, "expected sound, got none"
        for one in sounds:
            n_bytes = len(one["audio_data"]) * 3 // 4 - one["audio_data"][-2:].count("=")
            assert n_bytes % 4 == 0 and abs(one["duration_ms"] - n_bytes / 96) < 0.01, f"{n_bytes} bytes"


def test_item_24_noise_and_the_first_half_second_give_no_turn(servers: Servers) -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 1_600).astype(np.float32)
    with conversation(servers, "hdx_c", changed(vad={"min_speech_duration_ms": 5000})) as client:
        push(client, np.concatenate((noise, np.zeros(16_000, np.float32), sentence())))
        assert [client.receive()["speaking"] for _ in range(2)] == [True, False]
        client.silence(0.3)
    with servers.open("/ws/half_duplex/hdx_d") as client:
        client.send(type="prepare", system_content=[], config=CONFIG)
        client.until("prepared")
        push(client, sentence())
        client.silence(0.4)
        time.sleep(DEAF_S)
        assert say(client)[0] == {"type": "vad_state", "speaking": True}


def test_item_25_turns_share_the_context(servers: Servers) -> None:
    def rows() -> int:
        [session] = [one for one in servers.worker.health()["sessions"] if one["session_id"] == "hdx_e"]
        return session["kv_rows"]

    with conversation(servers, "hdx_e") as client:
        lengths = [rows()]
        for number, name in enumerate(("greeting", "question"), start=1):
            assert say(client, name)[-1]["turn_index"] == number
            lengths.append(rows())
        system, first, both = lengths
        assert system < first < both, f"expected context that grows by each turn, got {lengths}"


def test_item_26_timeout(servers: Servers) -> None:
    with servers.open("/ws/half_duplex/hdx_f") as client:
        begun = time.monotonic()
        client.send(type="prepare", system_content=CONTENT, config=changed(session={"timeout_s": 1.5}))
        client.until("prepared")
        push(client, np.zeros(PIECE, np.float32))
        timeout = client.receive()
        assert timeout["type"] == "timeout" and 1.5 <= timeout["elapsed_s"] < time.monotonic() - begun + 0.1
        assert client.close_code() == 1000


def test_item_27_no_sound_without_tts(servers: Servers) -> None:
    with conversation(servers, "hdx_g") as client:
        chunks = [one for one in say(client) if one["type"] == "chunk"]
        assert len(chunks) > 1 and all(one["audio_data"] is None for one in chunks), f"got {chunks}"
