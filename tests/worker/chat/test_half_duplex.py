"""Half-duplex conversations: when sound is processed, and what the context holds."""

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from models.errors import AudioError, ContextOverflowError, ImageError, MessageError
from models.inputs.image import EncodedImage
from tests.models.stages.conversations import picture, sound
from tests.worker.chat.half_duplex_driver import (
    CHUNK,
    CONFIG,
    PAUSE,
    Conversation,
    assert_context,
    half_duplex_engine,
    record_segments,
    script,
)
from tests.worker.chat.reply_engine import LLM_LEN, SPOKEN, AnsweringEngine, rows_of, short_chunks
from tests.worker.http.client_scripts import jpeg
from tests.worker.loop.engines import make_config, voice
from worker.assembly.parts import EngineParts
from worker.chat import config as reply_config
from worker.engine import Engine
from worker.loop.results import (
    Event,
    Failure,
    Generating,
    Interruption,
    PartialResult,
    Prefilled,
    ReplyResult,
    VoiceState,
)
from worker.loop.rounds import Rounds
from worker.loop.session import OrderError
from worker.loop.window import Drop

WRITING = CONFIG.model_copy(update={"reply": SPOKEN.model_copy(update={"speak": False, "max_new_tokens": 4})})
THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture
def engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    with half_duplex_engine(parts) as engine:
        yield engine


def without_partials(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, PartialResult)]


# --- sound ---------------------------------------------------------------------------------------


def test_answers_speech(engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray) -> None:
    conversation = Conversation(engine)
    script(engine, "xx", "yyy")
    for number, (wave, answer) in enumerate(((greeting, "xx"), (question, "yyy")), start=1):
        result = conversation.say(wave)
        began, ended, generating, prefilled, *pieces = conversation.engine.take("talk")
        assert (began, ended) == (VoiceState("talk", True), VoiceState("talk", False))
        assert abs(generating.speech_ms - (len(wave) - 4_000) / 16 - 512) < 250, f"got {generating}"
        assert isinstance(prefilled, Prefilled) and pieces[-1] is result
        assert (result.text, result.index, result.stopped) == (answer, number, "stop")
        assert "".join(piece.text for piece in pieces[:-1]) == answer
        assert {piece.unit for piece in pieces[:-1]} == {number}
        pcm = np.concatenate([piece.pcm for piece in pieces[:-1] if piece.pcm is not None])
        assert np.array_equal(pcm, result.pcm)


def test_answer_starts_when_the_segment_ends(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    conversation = Conversation(engine)
    conversation.push(greeting, pause=4_000)
    assert without_partials(conversation.events) == [VoiceState("talk", True)]
    conversation.half_duplex.push(np.zeros(CHUNK, np.float32))
    assert [type(event) for event in conversation.events[1:]] == [VoiceState, Generating]
    assert engine.loop.is_idle is False


def test_drops_sound_while_an_answer_is_made(
    engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray
) -> None:
    conversation = Conversation(engine)
    script(engine, "x" * 9, "y")
    conversation.push(greeting)
    engine.step()
    n_before = len(without_partials(conversation.events))
    conversation.push(question)
    assert len(without_partials(conversation.events)) == n_before, "expected no events for sound that was dropped"
    engine.settle()
    assert conversation.events[-1].text == "x" * 9
    n_before = len(conversation.events)
    conversation.half_duplex.push(np.zeros(32_000, np.float32))
    assert len(conversation.events) == n_before, "expected no segment from sound that was dropped"
    assert conversation.say(question).text == "y"


def test_drops_sound_right_after_the_start(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    conversation = Conversation(engine)
    conversation.clock.now -= 1 - 0.49
    conversation.push(greeting)
    assert conversation.events == []
    conversation.clock.now += 0.02
    conversation.push(greeting)
    assert conversation.events[0] == VoiceState("talk", True)


def test_does_not_answer_short_segments(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    conversation = Conversation(engine, config=CONFIG.model_copy(update={"min_speech_ms": 10_000}))
    conversation.push(greeting)
    assert conversation.events == [VoiceState("talk", True), VoiceState("talk", False)]
    assert engine.loop.is_idle


@pytest.mark.parametrize("compat", ["fixed", "reference"])
def test_segments_of_one_push_get_one_answer(
    engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray, compat: str
) -> None:
    """The public implementation answers only the last sentence of a push."""
    reply = SPOKEN.model_copy(update={"compat": compat})
    conversation = Conversation(engine, config=CONFIG.model_copy(update={"reply": reply}))
    pause = np.zeros(PAUSE, np.float32)
    conversation.half_duplex.push(np.concatenate((greeting, pause, question, pause, greeting)))
    *states, generating = conversation.events
    assert states == [VoiceState("talk", on) for on in (True, False) * 3], "expected the open segment to end"
    both = len(greeting) + len(question) - 8_000
    expected = (both if compat == "fixed" else len(question) - 4_000) / 16
    n = 2 if compat == "fixed" else 1
    assert abs(generating.speech_ms - expected - n * 512) < n * 250, f"expected about {expected} ms, got {generating}"
    engine.settle()
    n_events = len(conversation.events)
    conversation.half_duplex.push(np.zeros(2 * PAUSE, np.float32))
    assert len(conversation.events) == n_events, "expected the open segment to be dropped"


def test_refuses_invalid_sound(engine: AnsweringEngine) -> None:
    conversation = Conversation(engine)
    for invalid in (np.zeros(0, np.float32), np.full(99, np.nan, np.float32), np.zeros(99, np.int16)):
        with pytest.raises(AudioError):
            conversation.half_duplex.push(invalid)


# --- pictures -------------------------------------------------------------------------------------


def test_a_turn_with_pictures_is_in_the_context_as_far_as_there_is_room(
    engine: AnsweringEngine, greeting: np.ndarray
) -> None:
    pictures = [EncodedImage.of(jpeg(picture(60, 40, seed))) for seed in range(8)]

    def turn(*given: EncodedImage, **config: Any) -> tuple[int, int]:
        """Rows of a conversation after a turn, and the number of its pictures."""
        talk = Conversation(engine, config=WRITING.model_copy(update=config))
        script(engine, "x")
        half, wave = iter(given), np.concatenate((greeting, np.zeros(PAUSE, np.float32)))
        for start in range(0, len(wave), CHUNK):
            talk.half_duplex.push(wave[start : start + CHUNK], [one for one in (next(half, None),) if one is not None])
        engine.settle()
        [generating] = [event for event in talk.events if isinstance(event, Generating)]
        assert isinstance(talk.events[-1], ReplyResult), talk.events[-1]
        n_rows = talk.n_rows
        engine.sessions.close(talk.session)
        engine.take("talk")
        return n_rows, generating.n_pictures

    n_rows, n_pictures = turn()
    assert n_pictures == 0
    n_with_one, n_pictures = turn(pictures[0])
    assert n_pictures == 1 and n_with_one > n_rows
    row_of_picture = n_with_one - n_rows
    n_full, n_pictures = turn(*pictures, frame_interval_s=0.1)
    assert 1 <= n_pictures < len(pictures), "expected as many pictures as half of the context takes"
    assert n_full == n_rows + n_pictures * row_of_picture <= LLM_LEN


def test_a_damaged_picture_ends_its_turn_alone(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    conversation = Conversation(engine, config=WRITING)
    script(engine, "x")
    damaged = EncodedImage.of(jpeg(picture(60, 40))[:-200])
    wave = np.concatenate((greeting, np.zeros(PAUSE, np.float32)))
    with pytest.raises(ImageError):
        conversation.half_duplex.push(wave, [damaged])
    assert conversation.say(greeting).text == "x"


# --- context -----------------------------------------------------------------------------------


@pytest.mark.parametrize("thinks", [False, True])
def test_context_after_several_rounds(
    engine: AnsweringEngine,
    greeting: np.ndarray,
    question: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    thinks: bool,
) -> None:
    waves = record_segments(engine, monkeypatch)
    reply = SPOKEN.model_copy(update={"enable_thinking": thinks})
    conversation = Conversation(engine, config=CONFIG.model_copy(update={"reply": reply}))
    script(engine, "abc", "x" * 12 + "yz", end="<|im_end|>")
    n_system = conversation.n_rows
    conversation.say(greeting)
    n_first = conversation.n_rows - n_system
    assert conversation.say(question).stopped == "length"
    n_closed = n_first + len(engine.language.tokenizer.encode("<|im_end|>\n"))
    assert conversation.session.rounds.rounds[1].n_rows == n_closed, "expected a round to include its end marks"
    opened = f"<|im_end|>\n<|im_start|>assistant\n{'' if thinks else THOUGHT}<|tts_bos|>"
    context = ["<|im_start|>system\nYou are kind.<|im_end|>\n", "<|im_start|>user\n", waves[0], opened, "abc"]
    context += ["<|im_end|>\n<|im_start|>user\n", waves[1], opened, "x" * 12]
    assert_context(conversation, context)
    script(engine, "")
    conversation.say(greeting)
    context += ["<|tts_eos|><|im_end|>\n<|im_start|>user\n", waves[2], opened]
    assert_context(conversation, context)
    assert conversation.session.rounds.length == conversation.n_rows


def test_interrupted_answer_stays_in_the_context(
    engine: AnsweringEngine, greeting: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    waves = record_segments(engine, monkeypatch)
    conversation = Conversation(engine)
    script(engine, "x" * 9)
    conversation.push(greeting)
    while sum(bool(event.text) for event in conversation.events if isinstance(event, PartialResult)) < 4:
        engine.step()
    half_duplex = conversation.half_duplex
    assert half_duplex.interrupt() and not half_duplex.interrupt(), "expected one interrupt to have an effect"
    engine.settle()
    conversation.check()
    [stopped] = [event for event in conversation.events if isinstance(event, Interruption)]
    result = conversation.events[-1]
    n = len(result.text)
    assert stopped.index == 1 and result.text.startswith(stopped.text) and len(stopped.text) >= 4, f"got {stopped}"
    assert (result.stopped, result.text) == ("interrupted", "x" * n) and 4 <= n < 9
    script(engine, "y")
    conversation.say(greeting)
    opened = f"<|im_end|>\n<|im_start|>assistant\n{THOUGHT}<|tts_bos|>"
    context = ["<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\n", waves[0], opened, "x" * n]
    context += ["<|tts_eos|><|im_end|>\n<|im_start|>user\n", waves[1], opened, "y"]
    assert_context(conversation, context)


def test_system_message_of_text_and_sound(engine: AnsweringEngine) -> None:
    wave = sound(9_000)
    conversation = Conversation(engine, system=("Speak like this:", wave, "Be kind."))
    text = "<|im_start|>system\nSpeak like this:\n"
    assert_context(conversation, [text, wave, "\nBe kind.<|im_end|>\n"])


@pytest.mark.parametrize("compat", ["fixed", "reference"])
def test_drops_old_rounds_above_the_high_watermark(
    engine: AnsweringEngine, greeting: np.ndarray, compat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = WRITING.reply.model_copy(update={"compat": compat})
    config = WRITING.model_copy(update={"reply": reply, "high_tokens": 180, "low_tokens": 100})
    conversation, cache = Conversation(engine, config=config), engine.unit_steps.state.llm
    n_system, most, sizes = conversation.n_rows, 0, []
    drops: list[Drop] = []
    close = conversation.session.rounds.close

    def recorded(*arguments: Any, **options: Any) -> list[Drop]:
        drops.extend(found := close(*arguments, **options))
        return found

    monkeypatch.setattr(conversation.session.rounds, "close", recorded)
    before = rows_of(engine.unit_steps, conversation.slot)
    for number in range(7):
        result = conversation.say(greeting)
        assert isinstance(result, ReplyResult), f"round {number}: {result}"
        sizes.append(conversation.n_rows)
        assert conversation.n_rows == conversation.session.rounds.length == int(cache.lengths[conversation.slot])
        most = max(most, result.context_len)
    rounds = conversation.session.rounds
    assert n_dropped_rounds(rounds, 7) >= 3 and rounds.prefix == n_system
    assert max(sizes) <= 180 < most, f"expected rounds to be dropped above 180 rows, got {sizes} and at most {most}"
    # Reference: the kept keys are rotated to their new positions. Fixed: the system message's keys are.
    ahead = sum(drop.n for drop in drops) if compat == "fixed" else 0
    assert int(cache.positions[conversation.slot]) == conversation.n_rows + ahead
    after = rows_of(engine.unit_steps, conversation.slot)
    n_layers = len(before) // 2  # keys of all of them, then values
    for values, now in zip(before[n_layers:], after[n_layers:], strict=True):
        assert torch.equal(values, now[:, :n_system]), "expected the system message's values unchanged"


def n_dropped_rounds(rounds: Rounds, n: int) -> int:
    """How many of n rounds are evicted."""
    return n - sum(not one.is_system for one in rounds.rounds)


def test_high_watermark_leaves_room_for_one_round(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    conversation = Conversation(engine, config=WRITING)
    assert conversation.session.rounds.high == LLM_LEN - 100 - 4
    for number in range(9):
        result = conversation.say(greeting)
        assert isinstance(result, ReplyResult), f"round {number}: {result}"
    assert n_dropped_rounds(conversation.session.rounds, 9) > 0


# --- refusals ----------------------------------------------------------------------------------------


def test_refused_answer_is_reported_as_failure(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    conversation = Conversation(engine)
    content = engine.content("Hello")
    engine.answers.answer(conversation.session, content, SPOKEN, 0.0)
    conversation.push(greeting)
    failure = conversation.events[-1]
    assert isinstance(failure, Failure) and isinstance(failure.error, OrderError) and failure.unit == 1
    engine.settle()
    assert isinstance(conversation.say(greeting), ReplyResult), "expected sound to be processed again"
    engine.answers.answer(conversation.session, content, SPOKEN, 0.0)
    conversation.push(greeting)
    assert conversation.events[-1].unit == 3, f"expected the third turn to be refused, got {conversation.events[-1]}"


def test_refuses_answer_and_take_back_in_other_sessions(engine: AnsweringEngine) -> None:
    session = engine.open("unit")
    with pytest.raises(OrderError, match="expected a conversation between rounds, got one of another kind"):
        engine.answers.answer(session, engine.content("Hello"), SPOKEN, 0.0)
    with pytest.raises(OrderError, match="expected a half-duplex conversation, got one of another kind"):
        engine.answers.take_back(session)


def test_refuses_system_message_that_does_not_fit(engine: AnsweringEngine) -> None:
    with pytest.raises(ContextOverflowError, match=f"expected at most {LLM_LEN} rows"):
        Conversation(engine, system=("word " * LLM_LEN,))
    assert engine.n_free == (3, 3)


# --- on the engine's thread ----------------------------------------------------------------------


def test_conversation_on_a_running_engine(
    parts: EngineParts, greeting: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_config, "SEGMENT_ROWS", 100)
    received: queue.Queue[Event] = queue.Queue()
    config = CONFIG.model_copy(update={"deaf_s": 0.0, "reply": SPOKEN.model_copy(update={"max_new_tokens": 4})})
    with short_chunks(), Engine(parts, make_config(3, LLM_LEN)) as engine:
        with pytest.raises(MessageError):
            engine.converse("a", [], config, received.put)
        conversation = engine.converse("a", ["You are kind."], config, received.put, voice=voice(0)).result(10)
        for index in (1, 2):
            for piece in (greeting, np.zeros(PAUSE, np.float32)):
                conversation.push(piece)
            events = [received.get(timeout=20)]
            while not isinstance(events[-1], ReplyResult | Failure):
                events.append(received.get(timeout=20))
            assert [type(event) for event in without_partials(events)] == [VoiceState] * 2 + [
                Generating,
                Prefilled,
                ReplyResult,
            ]
            assert events[-1].index == index
        assert engine.n_free() == 2
        conversation.close().result(10)
        assert engine.n_free() == 3
