"""Benchmark sessions: they send units and record when first sound and results arrive.

Contains scripted decisions, synthetic input and timestamps. Does not contain tables or targets.
"""

import queue
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace

import numpy as np
from PIL import Image

from benchmarks.duplex.engine import RunningEngine
from models.inputs.audio_sizes import SAMPLE_RATE
from worker.config.session import SessionConfig
from worker.early.trial import EarlyTrial
from worker.loop.duplex_job import DuplexJob
from worker.loop.observer import Observer
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Event, Failure, PartialResult, StageTimes, UnitResult
from worker.loop.session_handle import CutImage

LISTEN, SPEAK, TALK = "LISTEN", "SPEAK", "TALK"
SPOKEN_UNITS = 4  # of a turn of a session that talks; then it listens for as many
STAGES = [one.name for one in fields(StageTimes) if one.name not in ("load", "gaps")]
TEXT_TOKENS = 8  # of a speaking unit
RESULT_TIMEOUT_S = 600.0


class DecisionScript(Observer):
    """Replaces the sampled tokens; the sampler still runs.

    Sessions whose name starts with LISTEN listen in every unit. Sessions whose name starts with SPEAK speak `n_text`
    tokens in every unit, those whose name starts with TALK in the units of their turns (`place_in_cycle`). Other
    sessions keep their sampled tokens.
    """

    def __init__(self, n_text: int = TEXT_TOKENS):
        self._n_text = n_text

    def token_sampled(self, session: str, job: DuplexJob, token: int) -> int:
        n_chosen = len(job.decoder.all_ids)
        if session.startswith(LISTEN):
            return job.language.control_tokens.listen
        if not session.startswith((SPEAK, TALK)):
            return token
        ids, place = job.language.control_tokens, 0
        if session.startswith(TALK):
            place = place_in_cycle(session, job.session.n_decided)
            if place >= SPOKEN_UNITS:
                return ids.listen
        if n_chosen == 0:
            return ids.speak
        if n_chosen <= self._n_text:
            return ord("a") + n_chosen
        ends_turn = place == SPOKEN_UNITS - 1 and n_chosen == self._n_text + 1
        return ids.turn_eos if ends_turn else ids.chunk_eos


def place_in_cycle(session: str, n_units: int) -> int:
    """Where a session that talks is after `n_units` units: below SPOKEN_UNITS the next unit is that one of its turn."""
    return (n_units + int(session.removeprefix(TALK))) % (2 * SPOKEN_UNITS)


@dataclass
class SentUnit:
    """A unit that was sent, and its outcome.

    due, first_sound, done: seconds on the monotonic clock. sound: PCM bytes, if the session keeps them.
    pieces: arrival and samples of each part of the sound.
    """

    session: str
    due: float
    first_sound: float | None = None
    done: float | None = None
    result: UnitResult | None = None
    n_samples: int = 0
    sound: bytes = b""
    pieces: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""
    trial: EarlyTrial | None = None  # of the first half of a unit, which is no unit of its own unless it is committed

    @property
    def total_ms(self) -> float | None:
        """From `due` to the result; None without a result."""
        return 1e3 * (self.done - self.due) if self.result is not None and self.done is not None else None

    @property
    def first_sound_ms(self) -> float | None:
        return None if self.first_sound is None else 1e3 * (self.first_sound - self.due)


class BenchSession:
    """One session of the engine and its units in flight."""

    def __init__(
        self,
        running: RunningEngine,
        name: str,
        *,
        context: int,
        config: SessionConfig | None = None,
        seed: int = 0,
        keeps_sound: bool = False,
        done: "queue.SimpleQueue[SentUnit] | None" = None,
    ):
        """Open the session and feed its prompt.

        Args:
            context: tokens of the prompt.
            seed: selects the prompt's text.
            keeps_sound: keep the PCM bytes of every unit.
            done: receives every unit that has ended.
        """
        self.name, self._in_flight, self._keeps_sound = name, deque[SentUnit](), keeps_sound
        self.done: queue.SimpleQueue[SentUnit] = done or queue.SimpleQueue()
        self.handle = running.engine.open(name, config, self._on_event).result()
        prompt = SystemPrompt(chr(ord("a") + seed % 26) * context, "", None, running.voice)
        self.n_prompt = self.handle.prepare(prompt).result()

    @property
    def n_waiting(self) -> int:
        """Units sent and not ended."""
        return len(self._in_flight)

    def send_ahead(self, images: Sequence[Image.Image]) -> list[CutImage]:
        """Send the images of a later unit. Returns: them for `send`."""
        (limit,) = self.handle.slice_limits(1, None)
        return [self.handle.send_ahead(image, limit) for image in images]

    def send(
        self,
        sound: np.ndarray,
        images: Sequence[Image.Image | CutImage],
        due: float | None = None,
        *,
        trial: EarlyTrial | None = None,
    ) -> SentUnit:
        """Send one unit. due: scheduled time on the monotonic clock; None = now. trial: of a unit's first half."""
        sent = SentUnit(self.name, time.monotonic() if due is None else due, trial=trial)
        self._in_flight.append(sent)
        accepted = self.handle.send(sound, images, early=trial)
        accepted.add_done_callback(lambda future: self._on_accepted(sent, future))
        return sent

    def close(self) -> None:
        self.handle.close().result()

    def _on_accepted(self, sent: SentUnit, future: "Future[None]") -> None:
        if (error := future.exception()) is not None:
            self._in_flight.remove(sent)
            self._fail(sent, error)

    def _on_event(self, event: Event) -> None:
        """Runs on the engine thread."""
        now = time.monotonic()
        if isinstance(event, PartialResult) and event.pcm is not None:
            unit = self._in_flight[0]
            unit.first_sound = unit.first_sound or now
            unit.pieces.append((now, len(event.pcm)))
        elif isinstance(event, Failure):
            self._fail(self._in_flight.popleft(), event.error)
        elif isinstance(event, UnitResult):
            sent = self._in_flight.popleft()
            sent.done, sent.result = now, replace(event, pcm=None)
            if event.pcm is not None:
                sent.n_samples = len(event.pcm)
                sent.sound = event.pcm.tobytes() if self._keeps_sound else b""
            self.done.put(sent)

    def _fail(self, sent: SentUnit, error: BaseException) -> None:
        sent.done, sent.error = time.monotonic(), f"{type(error).__name__}: {error}"
        self.done.put(sent)


@dataclass
class SyntheticMedia:
    """Input of the sessions: noise from a fixed seed."""

    n_frames: int
    seconds: np.ndarray = field(init=False)
    images: list[Image.Image] = field(init=False)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(0)
        self.seconds = (0.1 * generator.standard_normal((64, SAMPLE_RATE))).astype(np.float32)
        pixels = generator.integers(0, 256, (448, 448, 3), dtype=np.uint8)
        self.images = [Image.fromarray(pixels)] * self.n_frames

    def audio(self, unit: int, session: int = 0) -> np.ndarray:
        """One second of audio, [16000] float32, different for neighbouring units and sessions."""
        return self.seconds[(unit + 7 * session) % len(self.seconds)]


def run_units(
    running: RunningEngine,
    sessions: Sequence[BenchSession],
    media: SyntheticMedia,
    n_units: int,
    first: int = 0,
    lead_s: float = 0.0,
) -> list[SentUnit]:
    """Send one unit of every session at once, and the next ones when all of these are closed.

    Args:
        lead_s: seconds by which the images come before their units; 0: with them.
    Raises: RuntimeError if a unit fails.
    """
    units: list[SentUnit] = []
    for unit in range(first, first + n_units):
        images: list[Sequence[Image.Image | CutImage]] = [media.images] * len(sessions)
        if lead_s:
            images = [session.send_ahead(media.images) for session in sessions]
            time.sleep(lead_s)
        sent = [session.send(media.audio(unit, n), images[n]) for n, session in enumerate(sessions)]
        del images  # an image's rows are held as long as it is referenced
        for session in sessions:
            done = session.done.get(timeout=RESULT_TIMEOUT_S)
            if done.error:
                raise RuntimeError(f"{done.session}, unit {unit}: expected a result, got {done.error}")
        running.wait_idle()
        units += sent
    return units


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """Percentiles of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p95, p99 = np.percentile(known, (50, 95, 99))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": float(max(known))}
