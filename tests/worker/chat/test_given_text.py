"""Replies whose text is given, and texts that end a reply."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from models.errors import ContextOverflowError
from tests.worker.chat.reply_engine import ASKED, SPOKEN, WRITTEN, AnsweringEngine, answering, script, words
from tests.worker.loop.engines import voice
from worker.assembly.parts import EngineParts
from worker.chat.config import ReplyConfig
from worker.chat.stop_texts import StopTexts
from worker.loop.results import PartialResult, ReplyResult

SILENCE = 3  # silence tokens at the start of every turn
TEXTS = ["Hello there, my friend. How are you today, and what is new?", "你好，世界。", "a", "<|im_end|> <unk> 🙂 &$"]


@pytest.fixture
def engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    with answering(parts) as engine:
        yield engine


def given(engine: AnsweringEngine, text: str, name: str = "given", config: ReplyConfig = SPOKEN) -> ReplyResult:
    """The reply to `ASKED` with this text."""
    ids = tuple(engine.language.tokenizer.encode_plain(text))
    content = replace(engine.content(ASKED, config=config), answer=ids)
    engine.answers.chat(name, content, config, engine.events[name].append, voice=voice(0), arrived=0.0)
    result = engine.outcome(name)
    assert isinstance(result, ReplyResult), f"expected a result, got {result}"
    return result


@pytest.mark.parametrize("text", TEXTS)
def test_given_text_is_said_exactly(engine: AnsweringEngine, text: str) -> None:
    result = given(engine, text)
    assert result.text == text and result.stopped == "stop" and result.voice_error is None
    assert result.pcm is not None and len(result.pcm) == 960 * (SILENCE + result.n_speech_tokens)
    parts = [event for event in engine.received("given") if isinstance(event, PartialResult)]
    assert "".join(part.text for part in parts) == text
    assert np.array_equal(np.concatenate([part.pcm for part in parts if part.pcm is not None]), result.pcm)


def test_speech_of_given_text_is_that_of_a_generated_answer(engine: AnsweringEngine) -> None:
    text = TEXTS[0]
    ids = engine.language.tokenizer.encode(text)
    script(engine, generated=[*ids, engine.language.special.im_end])
    config = SPOKEN.model_copy(update={"max_new_tokens": len(ids) + 1})
    engine.ask("generated", ASKED, config=config)
    generated = engine.outcome("generated")
    assert isinstance(generated, ReplyResult) and generated.text == text
    result = given(engine, text)
    assert result.n_speech_tokens == generated.n_speech_tokens
    assert result.pcm is not None and generated.pcm is not None and np.array_equal(result.pcm, generated.pcm)


def test_given_texts_share_batches_with_generated_answers(engine: AnsweringEngine) -> None:
    alone = given(engine, TEXTS[0], "alone")
    engine.ask("other", ASKED, config=WRITTEN)
    assert np.array_equal(given(engine, TEXTS[0], "beside").pcm, alone.pcm)


def test_given_text_must_fit_into_the_context(engine: AnsweringEngine) -> None:
    with pytest.raises(ContextOverflowError, match="prompt and answer"):
        given(engine, "x " * 600)


@pytest.mark.parametrize(("stop", "expected"), [(("xx",), "xx"), (("no", "xxxx"), "xxxx"), (("no",), "x" * 6)])
def test_reply_ends_after_stop_text(engine: AnsweringEngine, stop: tuple[str, ...], expected: str) -> None:
    script(engine, a=words(engine, 12))
    config = WRITTEN.model_copy(update={"stop": stop, "max_new_tokens": 6})
    engine.ask("a", ASKED, config=config)
    result = engine.outcome("a")
    assert isinstance(result, ReplyResult) and result.text == expected
    assert result.stopped == ("length" if expected == "x" * 6 else "stop")


def test_stop_text_is_found_across_tokens(engine: AnsweringEngine) -> None:
    language = engine.language
    stops = StopTexts(["好吗", "zz"], language.stream())
    ids = language.tokenizer.encode("ab 你好吗")
    found = []
    for token in ids:
        stops.push(token)
        found.append(stops.is_complete)
    assert found == [False] * (len(ids) - 1) + [True]


def test_usage_counts_rows_by_kind(engine: AnsweringEngine) -> None:
    sound = np.zeros(16_000, np.float32)
    engine.ask("a", "Hi", sound, config=WRITTEN.model_copy(update={"max_new_tokens": 2}))
    result = engine.outcome("a")
    assert isinstance(result, ReplyResult)
    assert 0 < result.n_prompt_sound < result.n_prompt and result.n_prompt_image == 0
