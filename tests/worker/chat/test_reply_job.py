"""Turn-based replies: text and speech, partial results, ends, and independence of other sessions."""

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from models.errors import ContextOverflowError, MessageError
from models.sampling.settings import TextSampling
from models.stages.chat import Chat
from models.stages.speech_steps import Speaker
from tests.models.stages.conversations import picture, sound
from tests.models.stages.speech_helpers import KINDS, first_new_token
from tests.worker.chat.reply_engine import (
    ASKED,
    LLM_LEN,
    MANY,
    SPOKEN,
    WRITTEN,
    AnsweringEngine,
    alone,
    answering,
    partials,
    plain_answer,
    replies_alone,
    script,
    short_chunks,
    words,
)
from tests.worker.engine.mixed_jobs import ANSWERS, Mixed, all_at_once, one_by_one
from tests.worker.loop.engines import assert_same_events, make_config, short_speech, voice
from worker.assembly.parts import EngineParts
from worker.chat.config import ReplyConfig
from worker.engine import Engine
from worker.loop.results import Event, Failure, Prefilled, ReplyResult
from worker.loop.session import OrderError

GREEDY = {"decode_mode": "greedy", "tts_temperature": 1e-5}
SILENCE = 3  # silence tokens at the start of every turn


@pytest.fixture
def engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    with answering(parts) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(parts: EngineParts) -> dict[str, list[Event]]:
    return replies_alone(parts)


# --- text and speech -------------------------------------------------------------------------------


@pytest.mark.parametrize("compat", ["fixed", "reference"])
@pytest.mark.parametrize(
    ("speak", "n", "factor", "speech_tokens"),
    [(False, 23, 1.3, 0), (True, 9, 1.02, 5), (True, 10, 1.3, 5), (True, 23, 1.3, MANY)],
)
def test_reply_equals_the_plain_loop(
    engine: AnsweringEngine, compat: str, speak: bool, n: int, factor: float, speech_tokens: int
) -> None:
    config = ReplyConfig(
        max_new_tokens=n, speak=speak, compat=compat, repetition_penalty=factor, repetition_window=7, seed=4, **GREEDY
    )
    content = engine.content(ASKED, config=config)
    expected = plain_answer(engine.parts.model, engine.language, content, config, chunk=speech_tokens)
    with short_chunks(speech_tokens):
        assert_equals_plain(engine, config, expected)


def assert_equals_plain(engine: AnsweringEngine, config: ReplyConfig, expected: Any) -> None:
    windows: list[tuple[tuple[int, ...], bool]] = []
    engine.observer.window_voiced = lambda session, speech_tokens, last: windows.append((speech_tokens, last))
    engine.ask("a", ASKED, config=config)
    got = engine.outcome("a")
    assert got.voice_error is None, f"expected no error, got {got.voice_error}"
    assert list(got.tokens) == expected.ids, f"ids: expected {expected.ids}, got {got.tokens}"
    assert got.n_speech_tokens == len(expected.speech_tokens), (
        f"speech tokens: expected {len(expected.speech_tokens)}, got {got.n_speech_tokens}"
    )
    assert windows == expected.windows, f"windows: expected {expected.windows}, got {windows}"
    assert got.context_len == got.n_prompt + len(expected.ids)
    skip = config.compat == "fixed"
    assert got.text == engine.language.tokenizer.decode(expected.ids, skip_special=skip)


@pytest.mark.parametrize(("kind", "compat"), [*((kind, "fixed") for kind in KINDS), ("full_attention", "reference")])
def test_speech_that_ends_early_equals_the_plain_loop(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch, kind: str, compat: str
) -> None:
    """Every attention type between text chunks, with chunks whose speech ends before its limit."""
    config = ReplyConfig(max_new_tokens=30, speak=True, compat=compat, seed=4, repetition_penalty=1.3, **GREEDY)
    content, given = engine.content(ASKED, config=config), (engine.parts.model, engine.language)
    how = {"chunk": 12, "kind": kind, "window": 12}
    free = plain_answer(*given, content, config, **how)
    eos = first_new_token(free.speech_tokens, 14)
    begin = Speaker.start_turn
    monkeypatch.setattr(Speaker, "start_turn", lambda self, *slot, seed: begin(self, *slot, seed=seed, eos=eos))
    expected = plain_answer(*given, content, config, eos=eos, **how)
    assert 14 <= len(expected.speech_tokens) < len(free.speech_tokens), "expected speech that ends early somewhere"
    with short_chunks(12, attention_type=kind, window=12):
        assert_equals_plain(engine, config, expected)


@pytest.mark.parametrize("compat", ["fixed", "reference"])
@pytest.mark.parametrize("speak", [False, True])
def test_partial_results_add_up_to_the_reply(engine: AnsweringEngine, speak: bool, compat: str) -> None:
    config = WRITTEN.model_copy(update={"speak": speak, "compat": compat})
    engine.ask("a", ASKED, config=config)
    result = engine.outcome("a")
    first, *events = engine.take("a")
    assert first == Prefilled("a", result.n_prompt)
    pieces = partials(events)
    assert [*pieces, result] == events, f"expected pieces and one result, got {list(map(type, events))}"
    assert "".join(piece.text for piece in pieces) == result.text != ""
    assert {piece.unit for piece in pieces} == {1} == {result.index}
    assert all(piece.text or piece.pcm is not None for piece in pieces), "expected no empty piece"
    sounds = [piece.pcm for piece in pieces if piece.pcm is not None]
    assert bool(sounds) == speak
    if speak:
        assert np.array_equal(np.concatenate(sounds), result.pcm)
        assert len(result.pcm) == 960 * (SILENCE + result.n_speech_tokens), (
            f"expected all speech tokens once, got {len(result.pcm)}"
        )
        assert 0 < result.times.first_vocoder < result.times.first_sound < result.times.total
    assert result.voice_error is None
    assert len(engine.sessions) == 0, "expected the session to end after its reply"


def test_emits_early_sound_and_text_per_token(engine: AnsweringEngine) -> None:
    sizes: list[int] = []
    script(engine, a=words(engine, 24))
    engine.observer.window_voiced = lambda session, speech_tokens, last: sizes.append(len(speech_tokens) - 3)
    engine.ask("a", ASKED, config=WRITTEN.model_copy(update={"speak": True}))
    with short_chunks(MANY):
        result = engine.outcome("a")
    assert sizes[0] == 8, f"first window: expected 8 speech tokens beside the lookahead, got {sizes[0]}"
    assert all(size >= 10 for size in sizes[1:-1]), f"later windows: expected growing windows, got {sizes}"
    pieces = partials(engine.take("a"))
    spoken = [number for number, piece in enumerate(pieces) if piece.pcm is not None]
    texts = [number for number, piece in enumerate(pieces) if piece.text]
    assert len(texts) == len(result.tokens), "expected a piece for every token"
    assert spoken[0] < texts[-1], "expected sound before the text is complete"


def test_reference_emits_text_with_its_sound(engine: AnsweringEngine) -> None:
    config = WRITTEN.model_copy(update={"speak": True, "compat": "reference"})
    engine.ask("a", ASKED, config=config)
    with short_chunks(MANY):
        result = engine.outcome("a")
    pieces = partials(engine.take("a"))
    assert all(piece.pcm is not None for piece in pieces), "expected no text without sound"
    # 30 speech tokens per text chunk: each of the first windows of 25 begins a chunk.
    decode = engine.language.tokenizer.decode
    chunks = [decode(result.tokens[at : at + 10], skip_special=False) for at in range(0, len(result.tokens), 10)]
    assert [piece.text for piece in pieces] == [*chunks, ""], f"expected {chunks}, got {pieces}"


@pytest.mark.parametrize("parts_asked", [(ASKED,), (picture(60, 60), "What is this?"), (sound(20_000), "and this?")])
def test_written_replies_equal_chat(
    engine: AnsweringEngine, parts_asked: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ReplyConfig(max_new_tokens=20, repetition_penalty=1.0, length_penalty=1.0, decode_mode="greedy")
    engine.ask("a", *parts_asked, config=config)
    got = engine.outcome("a")
    chat = Chat(engine.unit_steps.runner, engine.language.tokenizer, engine.parts.pictures)
    messages = [{"role": "user", "content": list(parts_asked)}]
    expected = chat.reply(messages, sampling=TextSampling(greedy=True), max_new_tokens=20)
    ids = [token for token in expected.ids if token not in chat.stop_ids]
    assert list(got.tokens) == ids, f"expected {ids}, got {got.tokens}"
    assert (got.text, got.stopped) == (expected.text, expected.stopped)
    assert got.n_prompt == len(chat.read(messages, config.prompt_options()).ids)


def test_seed_determines_the_reply(engine: AnsweringEngine) -> None:
    said = []
    for seed in (1, 1, 2):
        (*_, result) = alone(engine, SPOKEN.model_copy(update={"seed": seed}))
        said.append((result.tokens, result.pcm.tobytes()))
    assert said[0] == said[1] and said[0] != said[2]


# --- ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("compat", ["fixed", "reference"])
@pytest.mark.parametrize("speak", [False, True])
def test_terminator_as_first_token_is_an_empty_reply(engine: AnsweringEngine, compat: str, speak: bool) -> None:
    script(engine, a=[engine.language.special.im_end])
    engine.ask("a", ASKED, config=WRITTEN.model_copy(update={"speak": speak, "compat": compat}))
    result = engine.outcome("a")
    assert (result.text, result.tokens, result.stopped, result.pcm, result.n_speech_tokens) == ("", (), "stop", None, 0)
    assert engine.take("a") == [Prefilled("a", result.n_prompt), result]


@pytest.mark.parametrize(
    ("end", "compat", "ends"),
    [
        ("im_end", "fixed", True),
        ("tts_eos", "fixed", True),
        ("endoftext", "fixed", True),
        ("endoftext", "reference", False),
    ],
)
def test_ids_that_end_a_reply(engine: AnsweringEngine, end: str, compat: str, ends: bool) -> None:
    said = [*words(engine, 12), getattr(engine.language.special, end)]
    script(engine, a=said)
    engine.ask("a", ASKED, config=WRITTEN.model_copy(update={"compat": compat}))
    result = engine.outcome("a")
    assert (result.stopped == "stop", result.tokens[:13] == tuple(said)) == (ends, not ends)


@pytest.mark.parametrize("n", [1, 9, 10, 11, 20])
def test_every_token_is_voiced(engine: AnsweringEngine, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text chunks of 10 tokens; the last one carries the end of text."""
    condition, chunks = engine.unit_steps.speaker.condition, []

    def watched(slots: Sequence[int], ids: Sequence[list[int]], ends: Sequence[bool]) -> Any:
        chunks.extend(zip(ids, ends, strict=True))
        return condition(slots, ids, ends)

    monkeypatch.setattr(engine.unit_steps.speaker, "condition", watched)
    script(engine, a=[*words(engine, n), engine.language.special.im_end])
    engine.ask("a", ASKED, config=SPOKEN.model_copy(update={"max_new_tokens": 30}))
    result = engine.outcome("a")
    assert [token for ids, _ in chunks for token in ids] == words(engine, n)
    assert [len(ids) for ids, _ in chunks] == [10] * ((n - 1) // 10) + [(n - 1) % 10 + 1]
    assert [ends for _, ends in chunks] == [False] * ((n - 1) // 10) + [True]
    assert (result.stopped, result.text) == ("stop", "x" * n)


def test_interrupt_ends_the_text_at_the_next_token(engine: AnsweringEngine) -> None:
    config = SPOKEN.model_copy(update={"max_new_tokens": 60})
    script(engine, a=words(engine, 60))
    session = engine.ask("a", ASKED, config=config)
    engine.run_until(lambda: any(piece.pcm is not None for piece in partials(engine.events["a"])))
    n_before = len(engine.events["a"])
    n_tokens = sum(bool(piece.text) for piece in partials(engine.events["a"]))
    engine.sessions.break_speech(session)
    result = engine.outcome("a")
    later = engine.take("a")[n_before:]
    assert later == [result], f"expected the result and nothing more, got {later}"
    assert result.stopped == "interrupted"
    assert result.tokens == tuple(words(engine, n_tokens)) and result.text == "x" * n_tokens
    assert result.context_len == result.n_prompt + n_tokens, "expected all that was said in the context, and no more"
    assert not session.interrupt_requested


def test_interrupt_ends_the_speech_after_the_text(engine: AnsweringEngine) -> None:
    config = SPOKEN.model_copy(update={"max_new_tokens": 11})
    said = words(engine, 11)
    script(engine, alone=said, a=said)
    with short_chunks(MANY):
        whole = alone(engine, config)[-1]
        session = engine.ask("a", ASKED, config=config)
        engine.run_until(lambda: engine.loop.jobs[0].is_text_done)
        engine.run_until(lambda: any(piece.pcm is not None for piece in partials(engine.events["a"])))
        assert not engine.loop.is_idle, "expected speech after the text"
        engine.sessions.break_speech(session)
        assert not engine.step(), "expected the answer to be over at once"
    result = engine.take("a")[-1]
    assert (result.stopped, result.tokens, result.text) == ("interrupted", whole.tokens, whole.text)
    assert len(result.pcm) < len(whole.pcm)
    script(engine, alone=said)
    with short_chunks(MANY):
        assert_same_events("the next answer", alone(engine, config)[-1:], [whole])


def test_interrupt_before_the_first_token(engine: AnsweringEngine) -> None:
    session = engine.ask("a", ASKED, config=SPOKEN)
    engine.sessions.break_speech(session)
    result = engine.outcome("a")
    assert (result.stopped, result.tokens, result.pcm) == ("interrupted", (), None)
    assert result.context_len == result.n_prompt


def test_ended_session_refuses_commands(engine: AnsweringEngine) -> None:
    session = engine.ask("a", ASKED, config=WRITTEN)
    engine.settle()
    with pytest.raises(OrderError, match="expected a prepared session, got closed"):
        engine.sessions.break_speech(session)


def test_closing_drops_a_reply(engine: AnsweringEngine) -> None:
    session = engine.ask("a", ASKED, config=SPOKEN)
    engine.run_until(lambda: bool(partials(engine.events["a"])))
    n = len(engine.events["a"])
    engine.sessions.close(session)
    engine.settle()
    assert len(engine.events["a"]) == n, "expected no further events"


# --- other sessions ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def separate(parts: EngineParts) -> dict[str, list[Event]]:
    with short_chunks(), short_speech():
        return one_by_one(AnsweringEngine(parts, Mixed(listen=0.2)), list(ANSWERS))


@pytest.mark.parametrize("order", range(2))
def test_events_do_not_depend_on_other_sessions(
    engine: AnsweringEngine, order: int, separate: dict[str, list[Event]]
) -> None:
    engine.use(engine.vocoder, Mixed(listen=0.2))
    assert all(isinstance(separate[name][-1], ReplyResult) for name in ANSWERS)
    assert any(getattr(event, "pcm", None) is not None for event in separate["duplex"])
    for name, events in all_at_once(engine, list(ANSWERS), np.random.default_rng(order)).items():
        assert_same_events(name, events, separate[name])


def test_sound_does_not_depend_on_other_sessions(engine: AnsweringEngine) -> None:
    """With the real vocoder."""
    engine.use(engine.parts.vocoder, Mixed(listen=0.0))
    names = ["warm", "reference"]
    expected = one_by_one(engine, names, n_units=1)
    for name, events in all_at_once(engine, names, np.random.default_rng(3), n_units=1).items():
        assert_same_events(name, events, expected[name])


# --- engine thread ----------------------------------------------------------------------


def test_engine_chat(parts: EngineParts) -> None:
    received: queue.Queue[Event] = queue.Queue()
    messages = [{"role": "user", "content": ASKED}]
    with short_chunks(), Engine(parts, make_config(3, LLM_LEN)) as engine:
        with pytest.raises(MessageError):
            engine.chat("a", [], None, received.put)
        for _ in range(2):
            engine.chat("a", messages, SPOKEN, received.put, voice=voice(0)).result(10)
            events = [received.get(timeout=10)]
            while not isinstance(events[-1], ReplyResult | Failure):
                events.append(received.get(timeout=10))
            assert isinstance(events[0], Prefilled)
            assert events[-1].pcm is not None, f"expected sound, got {events[-1]}"
        handle = engine.chat(
            "b", messages, SPOKEN.model_copy(update={"max_new_tokens": 200}), received.put, voice=voice(0)
        )
        handle.result(10).close().result(10)
        assert engine.n_free() == 3, "expected a slot of a chat that is closed to be free"
        with pytest.raises(ContextOverflowError):
            engine.chat("c", messages, WRITTEN.model_copy(update={"max_new_tokens": 4000}), received.put).result(10)
