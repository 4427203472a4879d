"""Speech of replies: the talker speaks them in units, as it has learned to, and silence at their end is left out."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from models.checkpoint.embedded import DEFAULT
from models.inputs.tokens import Tokenizer
from tests.worker.chat.reply_engine import AnsweringEngine
from tests.worker.loop.engines import voice
from training.timelines.pacing import pace
from worker.assembly import parts as building
from worker.assembly.talker_session import SPEECH_TEMPERATURE
from worker.chat.config import ReplyConfig
from worker.chat.reply_job import ReplyJob
from worker.chat.sound_end import KEPT_S, LIMITS, SoundEnd
from worker.chat.spoken_units import MAX_TOKENS, SpokenUnits
from worker.config.service import ROOT
from worker.config.session import EngineConfig
from worker.loop.job import Job, SpeechCall
from worker.loop.language import Language
from worker.loop.results import SOUND_RATE, ReplyResult

TALKER = ROOT / DEFAULT
KEPT = round(KEPT_S * SOUND_RATE)
SECOND = SOUND_RATE
SPOKEN_S = {"I see a red cup.": 1.1, "See you tomorrow.": 0.9, "I will tell you when I see a yellow car.": 2.2}


@pytest.fixture(scope="module")
def engine() -> Iterator[AnsweringEngine]:
    config = EngineConfig(model_path=TALKER, device="cpu", max_sessions=1)
    engine = AnsweringEngine(building.build(config))
    yield engine
    engine.sessions.close_all()


def speak(engine: AnsweringEngine, text: str, seed: int) -> ReplyResult:
    config = ReplyConfig(text=text, speak=True, tts_temperature=SPEECH_TEMPERATURE, seed=seed)
    answer = tuple(engine.language.tokenizer.encode_plain(text))
    content = replace(engine.content(text, config=config), answer=answer)
    engine.answers.chat("a", content, config, engine.events["a"].append, voice=voice(0), arrived=0.0)
    got = engine.outcome("a")
    assert isinstance(got, ReplyResult) and got.voice_error is None
    return got


@pytest.mark.parametrize(("text", "seconds"), SPOKEN_S.items())
def test_a_given_text_takes_as_long_as_a_person_needs_for_it(
    engine: AnsweringEngine, text: str, seconds: float
) -> None:
    got = speak(engine, text, seed=1)
    assert got.text == text
    assert got.n_speech_tokens / 25 == pytest.approx(seconds, rel=0.3)


def test_a_talker_that_draws_no_end_is_ended(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = engine.unit_steps.speaker
    assert speaker is not None
    begin = speaker.start_turn
    monkeypatch.setattr(speaker, "start_turn", lambda slot, settings, *, seed: begin(slot, settings, seed=seed, eos=0))
    assert speak(engine, "See you tomorrow.", seed=1).n_speech_tokens <= 25 * (2 + 4)


@pytest.fixture(scope="module")
def language() -> Language:
    return Language(Tokenizer.load(TALKER), image_rows=64)


def units_of(language: Language, text: str, size: int = 100) -> list[list[int]]:
    """Units of a text that arrives in parts of `size` tokens. A turn's last ends with its token."""
    ids, pieces = language.tokenizer.encode_plain(text), SpokenUnits(language)
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    units = [unit for n, part in enumerate(parts) for unit in pieces.push(part, last=n == len(parts) - 1)]
    assert all(unit.ends_turn == (unit.ids[-1] == language.special.turn_eos) for unit in units)
    return [unit.ids for unit in units]


def test_words_belong_to_the_second_in_which_they_begin(language: Language) -> None:
    text = "I can hear you and I can tell you what has changed."
    units = units_of(language, text)
    assert units_of(language, text, size=1) == units, "expected the same units whichever way the text arrives"
    assert units[-1].pop() == language.special.turn_eos
    assert units == pace([text], language.tokenizer.encode_plain), "expected units as in training"


def test_a_long_text_is_several_turns(language: Language) -> None:
    long = "I will tell you when I see a yellow car."
    one, several = units_of(language, long), units_of(language, f"{long} {long}  \n")
    assert several == one + one, "expected each sentence as if it were alone"
    short = units_of(language, "Hello! I am listening.")
    assert sum(unit[-1] == language.special.turn_eos for unit in short) == 1


def test_a_unit_has_no_more_text_than_in_training(language: Language) -> None:
    units = units_of(language, "x" * 60)
    assert len(units) > 1 and all(len(unit) <= MAX_TOKENS + 1 for unit in units)


# --- the end of the sound --------------------------------------------------------------------------


def sound(n: int, level: float = 0.5) -> np.ndarray:
    return np.full(n, level, np.float32)


def silence(n: int) -> np.ndarray:
    return sound(n, 0.0)


def test_a_pause_is_passed_on_with_the_sound_after_it() -> None:
    end = SoundEnd()
    given = [sound(100), silence(SECOND), silence(SECOND), sound(100), silence(50)]
    got = [end.push(one, text_is_read=True) for one in given]
    assert [len(one) for one in got] == [100, KEPT, 0, 2 * SECOND - KEPT + 100, 50]
    assert np.array_equal(np.concatenate(got), np.concatenate(given)) and not end.is_over


def test_little_silence_stays_at_the_end_and_much_of_it_ends_a_reply() -> None:
    end = SoundEnd()
    quiet = sound(SECOND, 0.004)  # 42 dB below the loudest sample
    got = [end.push(one, text_is_read=True) for one in (np.append(sound(100), silence(10)), quiet, quiet, quiet)]
    assert sum(map(len, got)) == 100 + KEPT and not end.is_over
    assert len(end.push(quiet, text_is_read=True)) == 0 and end.is_over


def test_silence_is_not_held_before_the_text_is_read() -> None:
    end = SoundEnd()
    assert len(end.push(silence(5 * SECOND), text_is_read=False)) == 5 * SECOND and not end.is_over
    assert len(end.push(silence(10), text_is_read=True)) == 0


def test_silence_of_an_earlier_text_ends_nothing(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocoder may have several windows to speak when the tokens of the last text are drawn."""
    emitted: list[int] = []
    monkeypatch.setattr(Job, "emit_sound", lambda job, pcm, launched, now: emitted.append(len(pcm)))
    monkeypatch.setattr(ReplyJob, "_cut", lambda *_: [])
    config = ReplyConfig(speak=True)
    job = ReplyJob(Mock(reference=False), 0.0, engine.content("Hi", config=config), config, engine.language, Mock())
    for n_tokens in (100, 10):  # 4 s and 0.4 s
        call = SpeechCall([1], max_tokens=n_tokens, stream=Mock(), n_taken=n_tokens)
        job.on_speech_tokens(call, [0] * n_tokens, over=True, ended=True)
    job.is_text_done = True
    for pcm in (silence(2 * SECOND), silence(2 * SECOND), sound(100), silence(SECOND)):
        job.emit_sound(pcm, 0.0, 0.0)
    assert emitted == [2 * SECOND, 2 * SECOND, 100, KEPT], "silence is held only after the last text has begun"


def test_the_bound_grows_with_the_text() -> None:
    assert [LIMITS.frame_cap(n) for n in (1, 10)] == [90, 225]
