"""Items 19 to 21 and 42 of the conformance list: clients that connect to a worker without a gateway."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from websockets.sync.client import connect

from tests.conformance.servers import Servers, WireClient
from tests.worker.http.client_scripts import ALOUD, QUIET, base64_of, chunk, sound_of
from tests.worker.http.small_worker import N_SLOTS
from worker.config.service import ROOT
from worker.start.voices import ReferenceSound

MIB = 2**20
N_CHUNKS = 30
FAST = {"generate_audio": False, "max_new_speak_tokens_per_chunk": 4}
ACCEPT_S, STOP_S = 10.0, 2.0


@contextmanager
def opened(servers: Servers, query: str = "") -> Iterator[WireClient]:
    """A client of the worker with the limits of the public implementation's benchmark."""
    address = f"ws://127.0.0.1:{servers.worker.port}/ws/duplex{query}"
    limits = {"max_size": 50 * MIB, "open_timeout": ACCEPT_S}
    with connect(address, proxy=None, **limits) as connection:
        yield WireClient(connection)


@pytest.fixture(scope="module")
def voice() -> str:
    return base64_of(ReferenceSound.read(ROOT / "assets" / "ref_audio" / "high.wav").audio_16k())


def stop(client: WireClient) -> None:
    """End the session: `stopped` arrives in time, then the server closes."""
    begun = time.monotonic()
    client.send(type="stop")
    assert client.receive(STOP_S)["type"] == "stopped" and time.monotonic() - begun < STOP_S
    assert client.close_code() == 1000


def test_item_19_prepare_is_the_first_frame(servers: Servers, voice: str) -> None:
    with opened(servers) as client:
        client.send(type="prepare", ref_audio_base64=voice)
        prepared = client.receive()
        assert prepared["type"] == "prepared" and type(prepared["prompt_length"]) is int, f"got {prepared}"
        assert prepared["prompt_length"] > 0 and "recording_session_id" not in prepared, f"got {prepared}"


def test_item_20_thirty_chunks_without_pacing(servers: Servers, voice: str) -> None:
    """The last chunk is shorter than a second."""
    with opened(servers) as client:
        client.send(type="prepare", ref_audio_base64=voice, config=FAST)
        for number in range(N_CHUNKS - 1):
            client.send(**chunk(number))
        client.send(**chunk(sound=sound_of(0)[:6000]))
        client.until("prepared")
        results = [client.receive() for _ in range(N_CHUNKS)]
        client.silence(0.1)
        stop(client)
    assert {one["type"] for one in results} == {"result"}
    counts = [one["current_time"] for one in results]
    assert counts == [*range(1, N_CHUNKS), N_CHUNKS - 1], f"expected the part of a second not counted, got {counts}"
    assert [one["is_listen"] for one in (*results[:3], results[-1])] == [True] * 4, "expected listening at both ends"
    assert not all(one["is_listen"] for one in results), "expected some speech, got none"
    lags, backlogs = ([one[name] for one in results] for name in ("lag_ms", "backlog_units"))
    assert max(lags) > lags[0], f"expected a lag that grows, got {lags}"
    assert max(backlogs) > 4 and backlogs[-1] == 0, f"expected the number of waiting chunks, got {backlogs}"


def test_item_21_stop_and_connect_again(servers: Servers) -> None:
    for _ in range(N_SLOTS + 2):
        begun = time.monotonic()
        with opened(servers) as client:
            assert time.monotonic() - begun < ACCEPT_S
            client.send(type="prepare", config=QUIET)
            client.until("prepared")
            client.send(**chunk())
            assert client.receive()["type"] == "result"
            stop(client)


def test_item_42_voice_of_the_speech_only_and_forced_listening(servers: Servers, voice: str) -> None:
    """The worker was started with `--port`, `--gpu-id` and `--worker-index`."""
    health = servers.worker.health()
    assert (health["status"], health["model_loaded"]) == ("healthy", True), f"got {health}"
    assert health["gpu_id"] == 0

    with opened(servers, "?session_id=e2e") as client:
        client.send(type="prepare", system_prompt="Be kind.", config=ALOUD, tts_ref_audio_base64=voice)
        client.until("prepared")
        results = []
        for number in range(5):
            client.send(**chunk(number, force_listen=number < 3))
            results.append(client.receive())
        stop(client)
    assert [one["is_listen"] for one in results] == [True, True, True, False, False], f"got {results}"
    assert all(one["audio_data"] for one in results[3:]), "expected sound, got none"
