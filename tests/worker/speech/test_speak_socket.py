"""Texts over `/ws/speak` on the tiny speech model: whole and live, beside others, refused, broken off; other models."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from websockets.sync.client import connect

from assets.build_tiny_speech import SPEAKERS, WIDTH, build
from server.registry.voices import VoiceRegistry
from tests.models.token2wav.s3gen import tiny_s3gen
from tests.worker.speech.served import FRAME, PATIENCE_S, SpeechWorker, Talk, sound_of, speech_worker
from worker import engine_thread
from worker.engine_thread import EngineWork
from worker.protocol.speech_messages import SpeakRequest
from worker.protocol.wire import Sound
from worker.speech.requests import SENTENCE, PlannedSpeech
from worker.voice_registry import prepared_files, voice_folder

TOLERANCE = 1e-5
REFERENCE = np.random.default_rng(3).normal(0, 0.1, 16_000).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def worker(data: Path) -> Iterator[SpeechWorker]:
    with speech_worker(build(data / "custom"), data, **{"model.s3gen_path": tiny_s3gen.write(data)}) as worker:
        yield worker


def test_whole_text_is_spoken_in_growing_chunks(worker: SpeechWorker) -> None:
    sound, messages = worker.speak(max_frames=9, voice="Ryan", instructions="Calmly.", language="English")
    first, *chunks, done = messages
    assert first["type"] == "prefill_done" and first["input_tokens"] > 10
    sizes = [len(sound_of([one])) // FRAME for one in chunks]
    assert sizes == [1, 2, 4, 2], "the first packet is one frame"
    assert done["stopped"] == "length" and done["usage"]["speech_tokens"] == len(sound) // FRAME == 9
    assert np.abs(sound).max() > 0.01
    worker.wait_free()
    metrics = worker.client.get("/metrics").text
    assert 'duologue_worker_spoken_texts_total{end="length"}' in metrics
    assert 'duologue_worker_speech_slots{kind="total"} 2.0' in metrics


def test_neighbours_and_slots_do_not_change_the_sound(worker: SpeechWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts at once sound as each of them alone, and a third is refused until one has left."""
    alone = [worker.speak(max_frames=12, seed=seed)[0] for seed in (1, 2)]
    with ExitStack() as stack:
        held = [stack.enter_context(worker.talk(max_frames=12, seed=seed, is_open=True)) for seed in (1, 2)]
        for talk in held:
            talk.send(type="text", text=" And ")
            assert talk.receive()["type"] == "prefill_done"
        assert worker.free == 0
        monkeypatch.setattr(worker.service, "lease_speech", partial(worker.service.lease_speech, 0.0))
        assert "expected a free slot, got all 2 in use" in worker.refused()
    monkeypatch.undo()
    worker.wait_free()  # what clients leave is free again
    with worker.talk(max_frames=12, seed=1) as one, worker.talk(max_frames=12, seed=2) as other:
        together = [talk.rest()[0] for talk in (one, other)]
    for got, expected in zip(together, alone, strict=True):
        assert got.shape == expected.shape and np.abs(got - expected).max() <= TOLERANCE
    assert not np.array_equal(alone[0], alone[1])


def test_live_text_gives_one_sound_however_it_is_cut(worker: SpeechWorker) -> None:
    def spoken(*pieces: str) -> np.ndarray:
        with worker.talk(text="", is_open=True, max_frames=14) as talk:
            for piece in pieces:
                talk.send(type="text", text=piece)
            talk.send(type="end")
            sound, messages = talk.rest()
        assert messages[-1]["type"] == "done", messages[-1]
        return sound

    text = "One two three four five six."
    whole, cut = spoken(text), spoken(text[:1], text[1:9], text[9:10], text[10:])
    assert whole.shape == cut.shape and np.abs(whole - cut).max() <= TOLERANCE


def test_sound_of_live_text_comes_before_its_end(worker: SpeechWorker) -> None:
    with worker.talk(text="Hello there, how are you ", is_open=True, max_frames=20) as talk:
        assert talk.receive()["type"] == "prefill_done"
        assert talk.receive()["type"] == "chunk"  # the end was not sent
        talk.send(type="end")
        assert talk.rest()[1][-1]["type"] == "done"


def test_voices_wait_on_threads_of_the_speech_model(worker: SpeechWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live sessions are prepared on asyncio's threads, which voices that wait for time of the device must not hold."""
    speech, names = worker.service.speech, list[str]()
    assert speech is not None
    plan = speech.plan

    def planned(request: SpeakRequest) -> PlannedSpeech:
        names.append(threading.current_thread().name)
        return plan(request)

    monkeypatch.setattr(speech, "plan", planned)
    worker.speak(max_frames=1)
    assert [name.partition("_")[0] for name in names] == ["speech"]


def test_sentences_end_after_runs_of_marks() -> None:
    text = 'One 1.5 two... Three?!" Four.) Five\nSix。Seven...... '
    found = ["One 1.5 two... ", 'Three?!" ', "Four.) ", "Five\n", "Six。", "Seven...... "]
    assert SENTENCE.findall(text) == found


def test_long_text_is_spoken_in_parts(worker: SpeechWorker) -> None:
    """A slot of 256 rows holds one part of this text with all frames that it may have."""
    text = "The first sentence has a few words. The second one has some too! And here is the third, which is long. "
    speech = worker.service.speech
    assert speech is not None
    planned = speech.plan(SpeakRequest(text=text * 2 + "x" * 200, seed=0))
    parts = speech.parts_of(planned)
    assert len(parts) > 2
    for number, ids in enumerate(parts):
        request = speech.request(planned, ids, number, is_open=False)
        assert request.limits.frame_cap(request.n_text) <= speech.parts.runner.frames_that_fit(request.prompt)
    _, messages = worker.speak(text=text, max_frames=40)
    done = messages[-1]
    ids = speech.parts.tokenizer.encode_spoken(text.strip())
    assert done["type"] == "done" and done["usage"]["text_tokens"] <= len(ids) + 4, "parts lose nothing but spaces"
    assert sum(one["type"] == "prefill_done" for one in messages) == 1


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"voice": "missing"}, f"voice: expected one of {sorted(SPEAKERS)}, or a name of the API, got missing"),
        ({"task": "Base"}, "task_type: expected CustomVoice, the model's, got Base"),
        ({"language": "klingon"}, "language: expected one of"),
        ({"speaker_embedding": [0.0] * WIDTH}, "speaker_embedding: expected none"),
        ({"speaker_embedding": [1e39]}, "speak.speaker_embedding"),
        ({"text": ""}, "text: expected text to speak"),
        ({"first_chunk_frames": 99}, "speak.first_chunk_frames: expected"),
    ],
)
def test_refusals_name_what_was_expected(worker: SpeechWorker, request_: dict[str, object], error: str) -> None:
    got = worker.refused(**request_)
    assert got.startswith(error), got
    worker.wait_free()


def test_converts_sounds_without_the_omni_model(worker: SpeechWorker) -> None:
    assert worker.health()["models"]["conversion"]["slots"] == {"total": 16, "free": 16}
    url = f"ws://127.0.0.1:{worker.port}/ws/conversion?session_id=test"
    with connect(url, max_size=None, proxy=None) as connection:
        talk = Talk(connection)
        talk.send(speech_tokens=list(range(30)))
        sound, messages = talk.rest()
    assert messages[-1]["type"] == "done", messages[-1]
    metrics = worker.client.get("/metrics").text
    assert 'duologue_worker_conversions_total{end="stop"} 1.0' in metrics
    assert f"duologue_worker_converted_seconds_total {len(sound) / 24_000}" in metrics and len(sound) > 20_000
    assert 'duologue_worker_conversion_slots{kind="total"} 16.0' in metrics
    assert 'duologue_worker_conversion_steps{what="pieces"} 1.0' in metrics


def test_models_are_unloaded_and_replaced(worker: SpeechWorker, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Base model takes the place of the CustomVoice one: it clones sounds and registered voices, and designs none."""
    client, service = worker.client, worker.service
    with worker.talk(is_open=True) as talk:
        talk.send(type="text", text="word by word ")
        assert talk.receive()["type"] == "prefill_done"
        refused = client.post("/model/unload", json={"model": "speech"})
        assert refused.status_code == 409 and "without sessions" in refused.json()["detail"]
    worker.wait_free()
    wrong = client.post("/model/load", json={"speech_path": str(data)})
    assert wrong.status_code == 422 and "config.json" in wrong.json()["detail"], wrong.text
    assert worker.speak(max_frames=2)[1][-1]["type"] == "done", "a wrong folder changes nothing"
    assert client.post("/model/load", json={"speech_path": str(build(data / "base", "base"))}).status_code == 202
    worker.wait_ready()
    speech = worker.health()["models"]["speech"]
    assert speech["kind"] == "Base" and speech["path"] == str(data / "base") and speech["speakers"] == []

    transcript = "What is said."
    registry = VoiceRegistry(voice_folder(data))
    registered = registry.add("Ada", REFERENCE, transcript)
    sound = Sound(REFERENCE).base64()
    known, in_context, vector = (
        worker.speak(max_frames=4, **given)
        for given in (
            {"voice": registered.name},
            {"ref_audio_data": sound, "ref_text": transcript},
            {"ref_audio_data": sound, "x_vector_only": True},
        )
    )
    n_rows = [messages[0]["input_tokens"] for _, messages in (known, in_context, vector)]
    assert n_rows[0] == n_rows[1] > n_rows[2], "codes and transcript of the voice are in the prompt"
    assert np.abs(known[0] - in_context[0]).max() < 0.2 and known[0].shape == (4 * FRAME,)
    speech_model, [kept] = service.speech, prepared_files(voice_folder(data), registered.id)
    assert speech_model is not None
    voices, n_encoded = speech_model._voices, list[int]()
    encode = voices._codec.encode
    with monkeypatch.context() as patch:
        patch.setattr(voices._codec, "encode", lambda wave: n_encoded.append(1) or encode(wave))
        for content, expected in ((kept.read_bytes(), 0), (b"damaged", 1)):
            kept.write_bytes(content)
            voices._kept.clear()  # as after a start
            assert np.array_equal(worker.speak(max_frames=4, voice=registered.name)[0], known[0])
            assert len(n_encoded) == expected, "vector and codes of a registered voice are read, or made again"
    registry.delete(registered.id)
    assert not kept.exists(), "expected nothing of a deleted voice"
    assert "ref_text: expected a transcript" in worker.refused(ref_audio_data=sound, x_vector_only=False)
    assert "speaker_embedding: expected 32 numbers, got 2" in worker.refused(speaker_embedding=[0.0, 1.0])
    assert worker.speak(speaker_embedding=[0.1] * WIDTH, max_frames=2)[1][-1]["type"] == "done"
    loud = Sound(np.full(8000, 1e30, np.float32)).base64()
    assert worker.speak(ref_audio_data=loud, max_frames=1)[1][-1]["type"] == "done", "numbers of a file may be any"
    assert "voice: expected one of" in worker.refused(voice="missing")

    monkeypatch.setattr(engine_thread, "CLOSE_TIMEOUT_S", 0.05)
    thread = service._thread
    assert thread is not None
    is_refused, is_over, remove = threading.Event(), threading.Event(), thread.remove

    def remove_later(work: EngineWork) -> None:
        is_refused.wait(PATIENCE_S)
        remove(work)

    monkeypatch.setattr(thread, "remove", remove_later)
    thread.submit(is_over.wait, PATIENCE_S)
    same = {"speech_path": str(data / "base")}
    assert client.post("/model/load", json=same).status_code == 202
    assert client.post("/model/load", json=same).status_code == 409, "one change at a time"
    is_refused.set()
    worker.wait_until(lambda: service.status.state == "FAILED", "an end of the load whose thread does not answer")
    assert "the end of the step in flight" in worker.health()["error"]
    assert client.get("/livez").status_code == 503, "the worker is restarted"
    is_over.set()
    worker.wait_until(lambda: not service._changing.locked(), "the end of the load")

    memory = client.post("/model/unload", json={"model": "speech"})
    assert memory.status_code == 200 and worker.health()["models"]["speech"] is None
    assert service.status.state == "UNLOADED" == client.get("/readyz").json()["state"]
