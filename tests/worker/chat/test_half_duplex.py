"""Half-duplex conversations: what is heard when, what the context holds, and what is forgotten."""

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from models.errors import AudioError, ContextOverflowError, MessageError
from tests.models.stages.conversations import sound
from tests.worker.chat.half_duplex_driver import (
    CHUNK,
    CONFIG,
    PAUSE,
    Conversation,
    assert_context,
    heard_segments,
    load,
    script,
)
from tests.worker.chat.reply_engine import LLM_LEN, SPOKEN, AnsweringEngine, make_parts, rows_of, short_chunks
from tests.worker.loop.engines import assert_told, make_config, voice
from worker.assembly.parts import EngineParts
from worker.chat import config as reply_config
from worker.engine import Engine
from worker.loop.results import Event, Failure, Generating, PartialResult, Prefilled, ReplyResult, VoiceState
from worker.loop.session import OrderError

WRITING = CONFIG.model_copy(update={"reply": SPOKEN.model_copy(update={"speak": False, "max_new_tokens": 4})})
THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    return make_parts()


@pytest.fixture
def engine(parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnsweringEngine]:
    # A slot of the small engine would be too short for a round of 30 s.
    monkeypatch.setattr(reply_config, "SEGMENT_ROWS", 100)
    engine = AnsweringEngine(parts)
    with short_chunks():
        yield engine
    engine.sessions.close_all()
    assert engine.n_free == (3, 3), f"slots: expected all free afterwards, got {engine.n_free}"


@pytest.fixture(scope="module")
def greeting(root: Any) -> np.ndarray:
    return load(root, "greeting")


@pytest.fixture(scope="module")
def question(root: Any) -> np.ndarray:
    return load(root, "question")


def segments(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, PartialResult)]


# --- what is heard -------------------------------------------------------------------------------


def test_speech_is_answered(engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray) -> None:
    talk = Conversation(engine)
    script(engine, "xx", "yyy")
    for number, (wave, answer) in enumerate(((greeting, "xx"), (question, "yyy")), start=1):
        result = talk.say(wave)
        began, ended, generating, prefilled, *pieces = talk.engine.take("talk")
        assert (began, ended) == (VoiceState("talk", True), VoiceState("talk", False))
        assert abs(generating.speech_ms - (len(wave) - 4_000) / 16 - 512) < 250, f"got {generating}"
        assert isinstance(prefilled, Prefilled) and pieces[-1] is result
        assert (result.text, result.index, result.stopped) == (answer, number, "stop")
        assert "".join(piece.text for piece in pieces[:-1]) == answer
        assert {piece.unit for piece in pieces[:-1]} == {number}
        pcm = np.concatenate([piece.pcm for piece in pieces[:-1] if piece.pcm is not None])
        assert np.array_equal(pcm, result.pcm)


def test_an_answer_begins_with_the_last_sound_of_the_segment(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    talk = Conversation(engine)
    talk.hear(greeting, pause=4_000)
    assert segments(talk.events) == [VoiceState("talk", True)]
    talk.talk.push(np.zeros(CHUNK, np.float32))
    assert [type(event) for event in talk.events[1:]] == [VoiceState, Generating]
    assert engine.loop.is_idle is False


def test_nothing_is_heard_while_an_answer_is_made(
    engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray
) -> None:
    talk = Conversation(engine)
    script(engine, "x" * 9, "y")
    talk.hear(greeting)
    engine.step()
    n_before = len(segments(talk.events))
    talk.hear(question)
    assert len(segments(talk.events)) == n_before, "expected no sign of what was said meanwhile"
    engine.settle()
    assert talk.events[-1].text == "x" * 9
    n_before = len(talk.events)
    talk.talk.push(np.zeros(32_000, np.float32))
    assert len(talk.events) == n_before, "expected nothing of it to be left"
    assert talk.say(question).text == "y"


def test_nothing_is_heard_right_after_the_start(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    talk = Conversation(engine)
    talk.clock.now -= 1 - 0.49
    talk.hear(greeting)
    assert talk.events == []
    talk.clock.now += 0.02
    talk.hear(greeting)
    assert talk.events[0] == VoiceState("talk", True)


def test_short_sounds_are_not_answered(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    talk = Conversation(engine, config=CONFIG.model_copy(update={"min_speech_ms": 10_000}))
    talk.hear(greeting)
    assert talk.events == [VoiceState("talk", True), VoiceState("talk", False)]
    assert engine.loop.is_idle


@pytest.mark.parametrize("compat", ["fixed", "reference"])
def test_all_that_was_said_at_once_is_answered_at_once(
    engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray, compat: str
) -> None:
    """The public implementation hears the last sentence of a push only."""
    reply = SPOKEN.model_copy(update={"compat": compat})
    talk = Conversation(engine, config=CONFIG.model_copy(update={"reply": reply}))
    pause = np.zeros(PAUSE, np.float32)
    talk.talk.push(np.concatenate((greeting, pause, question, pause, greeting)))
    *states, generating = talk.events
    assert states == [VoiceState("talk", on) for on in (True, False) * 3], "expected the last one to be taken back"
    both = len(greeting) + len(question) - 8_000
    expected = (both if compat == "fixed" else len(question) - 4_000) / 16
    n = 2 if compat == "fixed" else 1
    assert abs(generating.speech_ms - expected - n * 512) < n * 250, f"expected about {expected} ms, got {generating}"
    engine.settle()
    n_events = len(talk.events)
    talk.talk.push(np.zeros(2 * PAUSE, np.float32))
    assert len(talk.events) == n_events, "expected the sentence that was cut off to be forgotten"


def test_odd_sound_is_refused(engine: AnsweringEngine) -> None:
    talk = Conversation(engine)
    for odd in (np.zeros(0, np.float32), np.full(99, np.nan, np.float32), np.zeros(99, np.int16)):
        with pytest.raises(AudioError):
            talk.talk.push(odd)


# --- what the context holds ----------------------------------------------------------------------


@pytest.mark.parametrize("thinks", [False, True])
def test_rounds_follow_each_other(
    engine: AnsweringEngine,
    greeting: np.ndarray,
    question: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    thinks: bool,
) -> None:
    waves = heard_segments(engine, monkeypatch)
    reply = SPOKEN.model_copy(update={"enable_thinking": thinks})
    talk = Conversation(engine, config=CONFIG.model_copy(update={"reply": reply}))
    script(engine, "abc", "x" * 12 + "yz", end="<|im_end|>")
    n_system = talk.n_rows
    talk.say(greeting)
    n_first = talk.n_rows - n_system
    assert talk.say(question).stopped == "length"
    n_closed = n_first + len(engine.language.tokenizer.encode("<|im_end|>\n"))
    assert talk.session.rounds.rounds[1].n_rows == n_closed, "expected a round to hold its own end"
    opened = f"<|im_end|>\n<|im_start|>assistant\n{'' if thinks else THOUGHT}<|tts_bos|>"
    context = ["<|im_start|>system\nYou are kind.<|im_end|>\n", "<|im_start|>user\n", waves[0], opened, "abc"]
    context += ["<|im_end|>\n<|im_start|>user\n", waves[1], opened, "x" * 12]
    assert_context(talk, context)
    script(engine, "")
    talk.say(greeting)
    context += ["<|tts_eos|><|im_end|>\n<|im_start|>user\n", waves[2], opened]
    assert_context(talk, context)
    assert talk.session.rounds.length == talk.n_rows


def test_a_broken_answer_stays_as_far_as_it_went(
    engine: AnsweringEngine, greeting: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    waves = heard_segments(engine, monkeypatch)
    talk = Conversation(engine)
    script(engine, "x" * 9)
    talk.hear(greeting)
    while sum(bool(event.text) for event in talk.events if isinstance(event, PartialResult)) < 4:
        engine.step()
    talk.talk.break_speech()
    engine.settle()
    talk.check()
    result = talk.events[-1]
    n = len(result.text)
    assert (result.stopped, result.text) == ("interrupted", "x" * n) and 4 <= n < 9
    script(engine, "y")
    talk.say(greeting)
    opened = f"<|im_end|>\n<|im_start|>assistant\n{THOUGHT}<|tts_bos|>"
    context = ["<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\n", waves[0], opened, "x" * n]
    context += ["<|tts_eos|><|im_end|>\n<|im_start|>user\n", waves[1], opened, "y"]
    assert_context(talk, context)


def test_a_system_message_of_text_and_sound(engine: AnsweringEngine) -> None:
    wave = sound(9_000)
    talk = Conversation(engine, system=("Speak like this:", wave, "Be kind."))
    text = "<|im_start|>system\nSpeak like this:\n"
    assert_context(talk, [text, wave, "\nBe kind.<|im_end|>\n"])


@pytest.mark.parametrize("compat", ["fixed", "reference"])
def test_old_rounds_leave(engine: AnsweringEngine, greeting: np.ndarray, compat: str) -> None:
    reply = WRITING.reply.model_copy(update={"compat": compat})
    config = WRITING.model_copy(update={"reply": reply, "high_tokens": 180, "low_tokens": 100})
    talk, cache = Conversation(engine, config=config), engine.duplex.state.llm
    n_system, most, sizes = talk.n_rows, 0, []
    before = rows_of(engine.duplex.runner, talk.slot)
    for number in range(7):
        result = talk.say(greeting)
        assert isinstance(result, ReplyResult), f"round {number}: {result}"
        sizes.append(talk.n_rows)
        assert talk.n_rows == talk.session.rounds.length == int(cache.lengths[talk.slot])
        most = max(most, result.context_len)
    rounds = talk.session.rounds
    assert rounds.n_dropped >= 3 and rounds.prefix == n_system
    assert max(sizes) <= 180 < most, f"expected rounds to leave above 180 rows, got {sizes} and at most {most}"
    # Either what stays is turned to where it stands now, or the system message is brought up to it.
    ahead = rounds.dropped_rows if compat == "fixed" else 0
    assert int(cache.positions[talk.slot]) == talk.n_rows + ahead
    after = rows_of(engine.duplex.runner, talk.slot)
    n_layers = len(before) // 2  # keys of all of them, then values
    for values, now in zip(before[n_layers:], after[n_layers:], strict=True):
        assert torch.equal(values, now[:, :n_system]), "expected the system message to stay"


def test_a_slot_has_room_for_one_round_more(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    """However high the mark."""
    talk = Conversation(engine, config=WRITING)
    assert talk.session.rounds.high == LLM_LEN - 100 - 4
    for number in range(9):
        result = talk.say(greeting)
        assert isinstance(result, ReplyResult), f"round {number}: {result}"
    assert talk.session.rounds.n_dropped > 0


# --- what is forgotten ---------------------------------------------------------------------------


def outcomes(talk: Conversation, waves: Sequence[np.ndarray]) -> list[Event]:
    return [talk.say(wave) for wave in waves]


@pytest.fixture
def undisturbed(engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray) -> list[Event]:
    talk = Conversation(engine, "undisturbed")
    results = outcomes(talk, [greeting, question])
    talk.talk.stop()
    return results


@pytest.mark.parametrize("turns", [0, 1, 6, 11])
def test_a_round_can_be_taken_back(
    engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray, undisturbed: list[Event], turns: int
) -> None:
    talk = Conversation(engine)
    first = talk.say(greeting)
    before = rows_of(engine.duplex.runner, talk.slot)
    script(engine, "x" * 15)
    talk.hear(greeting)
    for _ in range(turns):
        engine.step()
    script(engine)
    n = len(talk.events)
    assert talk.talk.take_back().result() is True
    talk.check()
    engine.settle()
    assert len(talk.events) == n, "expected no outcome"
    for one, other in zip(before, rows_of(engine.duplex.runner, talk.slot), strict=True):
        assert torch.equal(one, other), "expected the context as it was"
    assert talk.talk.take_back().result() is False
    assert_told("conversation", [first, talk.say(question)], undisturbed)


@pytest.mark.parametrize("stage", ["encode_clips", "feed", "step"])
def test_a_round_that_fails_never_was(
    engine: AnsweringEngine,
    greeting: np.ndarray,
    question: np.ndarray,
    undisturbed: list[Event],
    stage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talk = Conversation(engine)
    first = talk.say(greeting)
    before = rows_of(engine.duplex.runner, talk.slot)
    owner = engine.duplex.runner if stage == "encode_clips" else engine.duplex
    real, count = getattr(owner, stage), [0]

    def broken(*given: Any, **knobs: Any) -> Any:
        count[0] += 1
        if count[0] > (5 if stage == "step" else 0):
            raise RuntimeError("broken")
        return real(*given, **knobs)

    script(engine, "x" * 15)
    with monkeypatch.context() as patch:
        patch.setattr(owner, stage, broken)
        failure = talk.say(greeting)
    script(engine)
    assert isinstance(failure, Failure) and str(failure.error) == "broken" and failure.unit == 2
    for one, other in zip(before, rows_of(engine.duplex.runner, talk.slot), strict=True):
        assert torch.equal(one, other), "expected the context as it was"
    assert_told("conversation", [first, talk.say(question)], undisturbed)


def test_stopping_is_at_once(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    talk = Conversation(engine)
    talk.hear(greeting)
    engine.step()
    n = len(talk.events)
    assert talk.talk.stop().result() is None
    assert engine.n_free == (3, 3)
    engine.settle()
    talk.hear(greeting)
    assert len(talk.events) == n, "expected nothing more to be told"
    assert isinstance(talk.talk.stop().exception(), OrderError)
    idle = Conversation(engine, "idle")
    idle.talk.stop()
    idle.hear(greeting)
    assert idle.events == [], "expected nobody to listen any more"


def test_what_cannot_be_answered_is_told(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    talk = Conversation(engine)
    content = engine.content("Hello")
    engine.answers.answer(talk.session, content, SPOKEN, 0.0)
    talk.hear(greeting)
    failure = talk.events[-1]
    assert isinstance(failure, Failure) and isinstance(failure.error, OrderError) and failure.unit == 1
    engine.settle()
    assert isinstance(talk.say(greeting), ReplyResult), "expected somebody to listen again"
    engine.answers.answer(talk.session, content, SPOKEN, 0.0)
    talk.hear(greeting)
    assert talk.events[-1].unit == 3, f"expected the third turn to be refused, got {talk.events[-1]}"


def test_only_conversations_have_rounds(engine: AnsweringEngine) -> None:
    session = engine.open("unit")
    with pytest.raises(OrderError, match="expected a conversation between rounds, got one of another kind"):
        engine.answers.answer(session, engine.content("Hello"), SPOKEN, 0.0)
    with pytest.raises(OrderError, match="expected a half-duplex conversation, got one of another kind"):
        engine.answers.take_back(session)


def test_a_system_message_that_does_not_fit(engine: AnsweringEngine) -> None:
    with pytest.raises(ContextOverflowError, match=f"expected at most {LLM_LEN} rows"):
        Conversation(engine, system=("word " * LLM_LEN,))
    assert engine.n_free == (3, 3)


def test_conversations_side_by_side(
    engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray, undisturbed: list[Event]
) -> None:
    talks = [Conversation(engine, name) for name in ("one", "two")]
    talks[0].hear(greeting)
    engine.step()
    engine.step()
    talks[1].hear(greeting)
    engine.settle()
    talks[1].hear(question)
    engine.step()
    talks[0].hear(question)
    engine.settle()
    for talk in talks:
        results = [event for event in talk.events if isinstance(event, ReplyResult)]
        assert_told(talk.name, results, undisturbed)


# --- on the engine's thread ----------------------------------------------------------------------


def test_an_engine_converses(parts: EngineParts, greeting: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_config, "SEGMENT_ROWS", 100)
    told: queue.Queue[Event] = queue.Queue()
    config = CONFIG.model_copy(update={"deaf_s": 0.0, "reply": SPOKEN.model_copy(update={"max_new_tokens": 4})})
    with short_chunks(), Engine(parts, make_config(3, LLM_LEN)) as engine:
        with pytest.raises(MessageError):
            engine.converse("a", [], config, told.put)
        talk = engine.converse("a", ["You are kind."], config, told.put, voice=voice(0)).result(10)
        for index in (1, 2):
            for piece in (greeting, np.zeros(PAUSE, np.float32)):
                talk.push(piece)
            events = [told.get(timeout=20)]
            while not isinstance(events[-1], ReplyResult | Failure):
                events.append(told.get(timeout=20))
            assert [type(event) for event in segments(events)] == [VoiceState] * 2 + [
                Generating,
                Prefilled,
                ReplyResult,
            ]
            assert events[-1].index == index
        assert engine.n_free() == 2
        talk.stop().result(10)
        assert engine.n_free() == 3
