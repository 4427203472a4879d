"""Sessions that send units and note when what came back.

Knows scripts, clocks and events. Does not know what the times are good for.
"""

import queue
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.duplex.engine import Running
from models.inputs.audio_sizes import SAMPLE_RATE
from worker.config.session import SessionConfig
from worker.loop.observer import Observer
from worker.loop.results import Failure, PartialResult, StageTimes, UnitResult
from worker.loop.sessions import SystemPrompt

LISTEN, SPEAK = "LISTEN", "SPEAK"
STAGES = [one.name for one in fields(StageTimes)]
TEXT_TOKENS = 8
RESULT_TIMEOUT_S = 600.0


class DecisionScript(Observer):
    """Decides instead of the model, whose sampler still works: sessions whose name begins with LISTEN listen, those
    that begin with SPEAK say so many tokens in every unit, others do as they like.
    """

    def __init__(self, n_text: int = TEXT_TOKENS):
        self._n_text = n_text

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        n_chosen = len(job.decoder.all_ids)
        if session.startswith(LISTEN):
            return job.language.control_tokens.listen
        if not session.startswith(SPEAK):
            return token
        ids = job.language.control_tokens
        if n_chosen == 0:
            return ids.speak
        return ids.chunk_eos if n_chosen > self._n_text else ord("a") + n_chosen


@dataclass
class SentUnit:
    """A unit on its way, and what became of it. due, first_sound, done: moments on the monotonic clock. sound: kept if
    the session keeps it.
    """

    session: str
    due: float
    first_sound: float | None = None
    done: float | None = None
    result: UnitResult | None = None
    n_samples: int = 0
    sound: bytes = b""
    error: str = ""

    @property
    def total_ms(self) -> float | None:
        """From when it was due to its result; None without one."""
        return 1e3 * (self.done - self.due) if self.result is not None and self.done is not None else None

    @property
    def first_sound_ms(self) -> float | None:
        return None if self.first_sound is None else 1e3 * (self.first_sound - self.due)


class Talker:
    """One session."""

    def __init__(
        self,
        running: Running,
        name: str,
        *,
        context: int,
        config: SessionConfig | None = None,
        seed: int = 0,
        keeps_sound: bool = False,
        done: "queue.SimpleQueue[SentUnit] | None" = None,
    ):
        """context: tokens of its prompt. done: gets every unit when it is over."""
        self.name, self._flight, self._keeps = name, deque[SentUnit](), keeps_sound
        self.done: queue.SimpleQueue[SentUnit] = done or queue.SimpleQueue()
        self.handle = running.engine.open(name, config, self._take).result()
        prompt = SystemPrompt(chr(ord("a") + seed % 26) * context, "", None, running.voice)
        self.n_prompt = self.handle.prepare(prompt).result()

    @property
    def n_waiting(self) -> int:
        """Units without a result."""
        return len(self._flight)

    def send(self, sound: np.ndarray, pictures: Sequence[Image.Image], due: float | None = None) -> SentUnit:
        """One unit. due: when it was to be sent; None: now."""
        sent = SentUnit(self.name, time.monotonic() if due is None else due)
        self._flight.append(sent)
        self.handle.send(sound, pictures).add_done_callback(lambda future: self._taken(sent, future))
        return sent

    def close(self) -> None:
        self.handle.close().result()

    def _taken(self, sent: SentUnit, future: "Future[None]") -> None:
        if (error := future.exception()) is not None:
            self._flight.remove(sent)
            self._over(sent, error)

    def _take(self, event: Any) -> None:
        """On the engine's thread."""
        now = time.monotonic()
        if isinstance(event, PartialResult) and event.pcm is not None and self._flight[0].first_sound is None:
            self._flight[0].first_sound = now
        elif isinstance(event, Failure):
            self._over(self._flight.popleft(), event.error)
        elif isinstance(event, UnitResult):
            sent = self._flight.popleft()
            sent.done, sent.result = now, replace(event, pcm=None)
            if event.pcm is not None:
                sent.n_samples = len(event.pcm)
                sent.sound = event.pcm.tobytes() if self._keeps else b""
            self.done.put(sent)

    def _over(self, sent: SentUnit, error: BaseException) -> None:
        sent.done, sent.error = time.monotonic(), f"{type(error).__name__}: {error}"
        self.done.put(sent)


@dataclass
class Scenes:
    """What sessions hear and see: noise, always the same."""

    n_frames: int
    sounds: np.ndarray = field(init=False)
    pictures: list[Image.Image] = field(init=False)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(0)
        self.sounds = (0.1 * generator.standard_normal((64, SAMPLE_RATE))).astype(np.float32)
        pixels = generator.integers(0, 256, (448, 448, 3), dtype=np.uint8)
        self.pictures = [Image.fromarray(pixels)] * self.n_frames

    def sound(self, unit: int, session: int = 0) -> np.ndarray:
        return self.sounds[(unit + 7 * session) % len(self.sounds)]


def converse(
    running: Running, talkers: Sequence[Talker], scenes: Scenes, n_units: int, first: int = 0
) -> list[SentUnit]:
    """Units of all sessions at once, the next when all are closed. Raises: RuntimeError for a unit that failed."""
    units: list[SentUnit] = []
    for unit in range(first, first + n_units):
        sent = [talker.send(scenes.sound(unit, n), scenes.pictures) for n, talker in enumerate(talkers)]
        for talker in talkers:
            done = talker.done.get(timeout=RESULT_TIMEOUT_S)
            if done.error:
                raise RuntimeError(f"{done.session}, unit {unit}: expected a result, got {done.error}")
        running.settle()
        units += sent
    return units


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """Of those that are there; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p95, p99 = np.percentile(known, (50, 95, 99))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": float(max(known))}
