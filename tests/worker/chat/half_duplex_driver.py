"""A half-duplex conversation on an engine without a thread: push sound, step the loop, compare the context."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import soundfile
import torch

from models.inputs.audio import placeholder_groups
from models.stages.message_reader import Content
from models.stages.runner import Rows
from tests.models.compare import assert_close
from tests.worker.chat.reply_engine import SPOKEN, AnsweringEngine, rows_of, short_chunks
from tests.worker.loop.engines import assert_mirrors, voice
from worker.assembly.parts import EngineParts
from worker.chat import config as reply_config
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.chat.half_duplex import HalfDuplex
from worker.loop.results import Failure, ReplyResult
from worker.loop.session import Session

CONFIG = HalfDuplexConfig(reply=SPOKEN, deaf_s=0.5)
CHUNK = 8_000  # samples of one push
PAUSE = 12_000  # samples of silence after a sentence, enough to end the segment


@contextmanager
def half_duplex_engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    """An engine with short rounds. Checks that all slots are free afterwards."""
    # A slot of the small engine has no room for a round of 30 s.
    with mock.patch.object(reply_config, "SEGMENT_ROWS", 100), short_chunks():
        engine = AnsweringEngine(parts)
        yield engine
    engine.sessions.close_all()
    assert engine.n_free == (3, 3), f"slots: expected all free afterwards, got {engine.n_free}"


class Clock:
    """A clock that only tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class DirectPort:
    """`SessionPort` that calls the engine directly, on the test's thread."""

    def __init__(self, engine: AnsweringEngine, session: Session):
        self.engine, self.session, self.name = engine, session, session.id

    @property
    def context_len(self) -> int:
        return self.engine.unit_steps.context_len(self.session.slot)

    def answer(self, content: Content, config: ReplyConfig, arrived: float) -> Future[None]:
        return self._done(self.engine.answers.answer, self.session, content, config, arrived)

    def take_back(self) -> Future[bool]:
        return self._done(self.engine.answers.take_back, self.session)

    def break_speech(self) -> Future[None]:
        return self._done(self.engine.sessions.break_speech, self.session)

    def close(self) -> Future[None]:
        return self._done(self.engine.sessions.close, self.session)

    def _done(self, call: Any, *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*given))
        except Exception as error:
            future.set_exception(error)
        return future


class Conversation:
    """A conversation whose clock and engine the test steps."""

    def __init__(
        self,
        engine: AnsweringEngine,
        name: str = "talk",
        config: HalfDuplexConfig = CONFIG,
        system: Sequence[Any] = ("You are kind.",),
    ):
        self.engine, self.name, self.clock = engine, name, Clock()
        self.events = engine.events[name]
        self.half_duplex = HalfDuplex(
            engine.reader, config, self.events.append, engine.unit_steps.max_context_len, clock=self.clock
        )
        prompt = engine.reader.read(
            [{"role": "system", "content": list(system)}], reply_config.PromptOptions(add_generation_prompt=False)
        )
        self.session = engine.answers.converse(
            name, engine.reader.cut(prompt), config, self.half_duplex.forward, voice=voice(0)
        )
        self.slot = self.session.slot
        self.half_duplex.begin(DirectPort(engine, self.session))
        self.clock.now += 1

    def push(self, wave: np.ndarray, *, pause: int = PAUSE) -> None:
        """Push a sentence and a pause in pieces, as a client does; the engine does not run meanwhile."""
        wave = np.concatenate((wave, np.zeros(pause, np.float32)))
        for start in range(0, len(wave), CHUNK):
            self.half_duplex.push(wave[start : start + CHUNK])

    def say(self, wave: np.ndarray) -> ReplyResult | Failure:
        """Push, then run the engine until the answer is over. Returns: the outcome."""
        self.push(wave)
        self.engine.settle()
        self.check()
        return self.events[-1]

    def check(self) -> None:
        """Assert that host counters equal the device's and that no speech of an answer is left."""
        assert_mirrors(self.engine.unit_steps, self.slot)
        assert not self.engine.unit_steps.speaker.is_in_call(self.slot), "expected no call in flight"
        n_rows = self.engine.unit_steps.speaker.rows(self.slot)
        assert n_rows == 0, f"rows of speech: expected none, got {n_rows}"

    @property
    def n_rows(self) -> int:
        return self.engine.unit_steps.context_len(self.slot)


def load(root: Any, name: str) -> np.ndarray:
    """A recorded sentence, [n] float32 at 16 kHz, after a quarter of a second of silence."""
    wave = soundfile.read(root / f"tests/data/{name}.wav", dtype="float32")[0]
    return np.concatenate((np.zeros(4_000, np.float32), wave))


def script(engine: AnsweringEngine, *answers: str, end: str = "<|im_end|>") -> list[int]:
    """Set the model's next answers in the conversation `talk`."""
    encode = engine.language.tokenizer.encode
    engine.observer.ids["talk"] = [token for text in answers for token in encode(text + end)]


def record_segments(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """A list that receives the sound of every later user's turn."""
    waves: list[np.ndarray] = []
    read = engine.reader.read_segment

    def recorded(message: Any, options: Any) -> Any:
        waves.append(message.parts[0])
        return read(message, options)

    monkeypatch.setattr(engine.reader, "read_segment", recorded)
    return waves


def assert_context(conversation: Conversation, parts: Sequence[str | np.ndarray]) -> None:
    """Assert that the slot holds what one prefill of text and sound gives."""
    engine, steps = conversation.engine, conversation.engine.unit_steps
    ids: list[int] = []
    media: list[tuple[int, torch.Tensor]] = []
    for part in parts:
        if isinstance(part, str):
            ids += engine.language.tokenizer.encode(part)
            continue
        (rows,) = steps.encode_clips([torch.from_numpy(part)], chunk_length=1.0)
        for n in placeholder_groups(len(part), chunked=True):
            ids += [engine.language.special.audio_start, *[0] * n, engine.language.special.audio_end]
            media.append((len(ids) - 1 - n, rows[:n]))
            rows = rows[n:]
    assert conversation.n_rows == len(ids), f"rows: expected {len(ids)}, got {conversation.n_rows}"
    with steps.lease() as slot:
        steps.feed([slot], [Rows.mixed(ids, media)], [False])
        expected = rows_of(steps, slot)
    for number, (got, one) in enumerate(zip(rows_of(steps, conversation.slot), expected, strict=True)):
        assert_close(got, one, 1e-4, f"tensor {number}")
