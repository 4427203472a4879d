"""GPT-Live sessions without a socket: what the worker refuses, and the bounds of what waits."""

import base64
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from benchmarks.serve.fake_replies import tone
from server.doors.errors import ApiError
from server.doors.gpt_live.client_events import MAX_CONTENT
from server.doors.gpt_live.session import GptLiveRefusedError
from server.doors.live.door_context import LARGE_EVENT
from server.doors.live.event_error import EventError
from server.doors.live.sound.detector import SpeechContinues, SpeechHeard, SpeechOver
from server.doors.live.unit_lane import MAX_TEXTS
from server.doors.voices import VoiceNames
from server.registry.voices import VoiceRegistry
from tests.server.doors.gpt_live.staged_session import HISTORY, PREPARED, Stage, spoken, staged
from worker.protocol.messages import AudioChunk, Error, Interrupt, Partial
from worker.protocol.text_messages import InsertText, TextInserted


def test_a_refused_context_ends_the_session(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        prepare = await stage.start()
        with pytest.raises(GptLiveRefusedError) as refused:
            stage.session.lane.on_answer(prepare, Error(error="no such voice", code="bad_voice"))
        assert (refused.value.error.code, refused.value.event_id) == ("bad_voice", "start")

    assert staged(tmp_path, scenario).events == []


def test_a_refused_text_of_the_history_is_reported(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        prepare = await stage.start(input=HISTORY)
        texts = [message for message in stage.worker.sent if isinstance(message, InsertText)]
        assert [text.text for text in texts] == ["Hi", "You have said: Hello"]
        stage.session.lane.on_answer(prepare, PREPARED)
        stage.session.lane.on_answer(texts[0], Error(error="too long", code="context_full"))

    started, error = staged(tmp_path, scenario).events
    assert started["type"] == "session.started"
    expected = {"code": "context_full", "message": "too long", "param": "session.input", "client_event_id": "start"}
    assert error["error"] == {"type": "invalid_request_error", **expected}


def test_texts_that_wait_are_bounded(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.session.lane.on_answer(await stage.start(), PREPARED)
        text = {"content": "Be brief.", "delegation_id": None}
        for _ in range(MAX_TEXTS):
            await stage.handle("session.instructions.append", **text)
        with pytest.raises(EventError) as refused:
            await stage.handle("session.instructions.append", **text)
        assert refused.value.code == "too_many_texts", refused.value
        sent = [message for message in stage.worker.sent if isinstance(message, InsertText)]
        assert len(sent) == MAX_TEXTS
        stage.session.lane.on_answer(sent[0], Error(error="full", code="context_full"))
        await stage.handle("session.instructions.append", **text)

    staged(tmp_path, scenario)


def test_what_was_said_is_kept_up_to_a_bound(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.session.lane.on_answer(await stage.start(), PREPARED)
        for _ in range(MAX_CONTENT):
            stage.session.on_speech("ab", np.zeros(0, np.float32))
        stage.session.on_speech("end", np.zeros(0, np.float32))

    [said] = staged(tmp_path, scenario).session.history()
    assert said.text.endswith("ababend") and len(said.text) == len("You have said: ") + MAX_CONTENT


def test_a_long_sound_is_decoded_whole(tmp_path: Path) -> None:
    """It is decoded on a thread, with the state of the sound before it."""
    steps = np.random.default_rng(0).integers(-8000, 8000, 16_000 * 15, np.int16)
    data = steps.tobytes()
    assert len(base64.b64encode(data)) > LARGE_EVENT

    async def scenario(stage: Stage) -> None:
        form = {"format": {"type": "audio/pcm", "rate": 16_000}}
        stage.session.lane.on_answer(await stage.start(audio=form), PREPARED)
        for part in (data[:3], data[3:-1], data[-1:]):
            await stage.handle("session.input_audio.append", audio=base64.b64encode(part).decode())
        for _ in range(15):
            chunk = stage.worker.sent[-1]
            assert isinstance(chunk, AudioChunk), f"expected a unit, got {chunk}"
            stage.session.lane.on_answer(chunk, Error(error="none", code="engine"))

    stage = staged(tmp_path, scenario)
    chunks = [message for message in stage.worker.sent if isinstance(message, AudioChunk)]
    sound = np.concatenate([chunk.samples() for chunk in chunks])
    assert len(sound) == len(steps), f"expected {len(steps)} samples, got {len(sound)}"
    assert np.array_equal(sound, (steps / 32768).astype(np.float32))
    assert stage.session.usage() == {"seconds": 15.0}


def test_the_clients_voice_silences_the_reply(tmp_path: Path) -> None:
    """Speech before the reply does not count; afterwards the unit in flight is dropped and the next one listens."""

    async def scenario(stage: Stage) -> None:
        session = stage.session
        session.lane.on_answer(await stage.start(), PREPARED)
        for _ in range(2):
            await stage.handle("session.input_audio.append", audio=base64.b64encode(bytes(48_000)).decode())
        session.on_heard(SpeechHeard(0, 300, 900))
        chunk = stage.worker.sent[-1]
        session.lane.on_partial(Partial(current_time=1, part=1, text="So", audio_data=tone("pcm16", 24_000)))
        assert session.timeline.waiting_ms == 1000
        session.on_heard(SpeechContinues(700, 1900))
        session.on_heard(SpeechContinues(900, 2300))
        assert session.timeline.waiting_ms == 1000, "expected the reply to go on: 200 ms are too little"
        session.on_heard(SpeechContinues(1200, 2600))
        assert session.timeline.waiting_ms == 0 and isinstance(stage.worker.sent[-1], Interrupt)
        session.lane.on_answer(chunk, spoken(end_of_turn=False))
        assert session.lane.context_ratio == 0.01
        assert session.timeline.waiting_ms == 0, "expected the rest of the unit to be dropped"
        assert isinstance(stage.worker.sent[-1], AudioChunk) and stage.worker.sent[-1].force_listen

    staged(tmp_path, scenario)


def test_a_replaced_context_begins_with_the_newest_texts(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        session, long = stage.session, [{"role": "user", "content": [{"text": "a" * 9000}]}]
        session.lane.on_answer(await stage.start(input=[*long, *long]), PREPARED)
        texts = [message for message in stage.worker.sent if isinstance(message, InsertText)]
        assert len(texts) == 2, "expected all that was given"
        await stage.handle("session.commentary.append", content="Say hello.", delegation_id=None)
        said = stage.worker.sent[-1]
        session.lane.on_answer(said, TextInserted(n_rows=3))
        await stage.handle("session.input_audio.append", audio=base64.b64encode(bytes(48_000)).decode())
        assert stage.worker.sent[-1].force_speak
        session.on_speech("Hello.", np.zeros(0, np.float32))
        session.lane.detach()
        session.on_worker_lost()
        stage.worker.sent.clear()
        stage.attach()
        prepare, *begin = stage.worker.sent
        assert [text.text for text in begin] == ["a" * 9000, "Say hello.", "You have said: Hello."]
        session.lane.on_answer(prepare, PREPARED)
        session.lane.on_answer(begin[0], Error(error="full", code="context_full"))
        assert session.lane.is_answering, "expected the lost unit's answer to be owed still"

    events = staged(tmp_path, scenario).events
    assert [event["type"] for event in events].count("session.started") == 1
    assert not [event for event in events if event["type"] == "error"], events


def said_by_user(stage: Stage) -> list[tuple[str, int, int]]:
    """The texts of the user's turns with their place on the timeline."""
    deltas = [one for one in stage.events if one["type"] == "session.input_transcript.delta"]
    return [(one["delta"], one["start_ms"], one["end_ms"]) for one in deltas]


def test_transcripts_come_in_the_order_of_the_turns(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        session, transcriber = stage.session, stage.transcriber
        session.lane.on_answer(await stage.start(audio={"format": {"type": "audio/pcm", "rate": 16_000}}), PREPARED)
        second = base64.b64encode(np.arange(16_000, dtype="<i2").tobytes()).decode()
        for turn in range(4):
            await stage.handle("session.input_audio.append", audio=second)
            session.send_sound(24_000)
            session.on_heard(SpeechHeard(1000 * turn + 300, 100.0, 1000 * turn + 500.0))
            session.on_heard(SpeechOver(1000 * turn + 800))
        sounds = [one.spoken.sound for one in transcriber.begun]
        assert [len(sound) for sound in sounds] == [8000] * 4
        assert np.array_equal(np.round(sounds[2] * 32768), np.arange(4800, 12_800)), "expected the sound of the turn"
        transcriber.begun[1].complete("How are you?")
        assert not said_by_user(stage), "expected nothing before the first turn's text"
        transcriber.begun[2].end(ApiError(503, "slot: expected a free one", code="no_free_slot"))
        transcriber.begun[0].complete("Hello.")

    stage = staged(tmp_path, scenario)
    assert said_by_user(stage) == [("Hello.", 300, 800), (" How are you?", 1300, 1800)]
    assert [one.is_cancelled for one in stage.transcriber.begun] == [False, False, False, True]


def test_a_server_without_transcriptions_makes_none(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.transcriber.is_enabled = False
        stage.session.lane.on_answer(await stage.start(), PREPARED)
        stage.session.on_heard(SpeechHeard(300, 100.0, 500.0))
        stage.session.on_heard(SpeechOver(800))

    assert not staged(tmp_path, scenario).transcriber.begun


def test_a_replaced_context_begins_with_the_conversation_in_order(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        session = stage.session
        session.lane.on_answer(await stage.start(), PREPARED)
        for turn, (asked, answered) in enumerate((("Hi.", "Hello."), ("How are you?", "Fine."))):
            session.on_heard(SpeechHeard(1000 * turn, 100.0, 1000 * turn + 200.0))
            session.on_heard(SpeechOver(1000 * turn + 500))
            session.on_speech(answered, np.zeros(0, np.float32))
            stage.transcriber.begun[turn].complete(asked)
        session.on_worker_lost()

    texts = staged(tmp_path, scenario).session.history()
    said = [(text.role, text.text) for text in texts]
    first, second = ("system", "You have said: Hello."), ("system", "You have said: Fine.")
    assert said == [("user", "Hi."), first, ("user", "How are you?"), second]


def test_settings_without_effect_are_kept_and_shown(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        delegation = {"type": "responses", "acknowledgement_delay_ms": 250, "responses": {"model": "a", "tools": []}}
        stage.session.lane.on_answer(await stage.start(delegation=delegation, safety_identifier="user-7"), PREPARED)
        update = {"type": "responses", "responses": {"model": "b"}}
        await stage.handle("session.update", session={"delegation": update})
        await stage.handle("session.update", session={"delegation": {**update, "acknowledgement_delay_ms": 0}})
        with pytest.raises(EventError) as refused:
            await stage.handle("session.update", session={"delegation": {"type": "client"}})
        assert refused.value.param == "session.delegation.type"

    sessions = [event["session"] for event in staged(tmp_path, scenario).events]
    assert [session["safety_identifier"] for session in sessions] == ["user-7"] * 3
    shown = [session["delegation"] for session in sessions]
    assert [one["acknowledgement_delay_ms"] for one in shown] == [250, 250, 0], "expected what an update leaves out"
    assert [one["responses"] for one in shown] == [{"model": model, "tools": []} for model in "abb"]


def test_a_field_of_another_kind_of_delegation_is_refused(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        with pytest.raises(EventError) as refused:
            await stage.start(delegation={"type": "client", "responses": {"model": "a"}})
        assert (refused.value.code, refused.value.param) == ("unknown_parameter", "session.delegation.responses")

    staged(tmp_path, scenario)


def test_a_muted_client_is_silent_to_the_detector(tmp_path: Path) -> None:
    """What it was saying ends, and its transcript comes, although it is muted in the middle of a word."""

    async def scenario(stage: Stage) -> None:
        stage.session.lane.on_answer(await stage.start(), PREPARED)
        session = stage.session
        session.hear(np.ones(16_000, np.float32))
        session.on_heard(SpeechHeard(0, 100.0, 1000.0))
        await stage.handle("session.input_audio.mute")
        session.hear(np.ones(16_000, np.float32))
        assert session.detector.pushed_ms == 2000 and session.usage() == {"seconds": 1.0}
        session.on_heard(SpeechOver(1500))
        [spoken] = stage.transcriber.begun
        sound = spoken.spoken.sound
        assert (sound[:16_000] == 1).all() and len(sound) == 24_000 and (sound[16_000:] == 0).all()

    staged(tmp_path, scenario)


def test_the_voices_of_stock_clients_speak(tmp_path: Path) -> None:
    from openai.types.live import BuiltInVoice  # takes a second, which a collection by all processes would treble

    voices = VoiceNames(VoiceRegistry(tmp_path), {})
    assert {voices.resolve(name) for name in get_args(BuiltInVoice)} == {None}, "expected the default voice for each"
