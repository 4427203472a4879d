"""Load on `SpeechStreams`: requests that arrive at random, and slots that are always full."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.timing import Timing
from benchmarks.tts.frames import random_prompt
from benchmarks.tts.toggles import Toggle
from models.qwen3_tts.codec.codec import SpeechCodec
from models.qwen3_tts.codec.config import SAMPLE_RATE
from models.qwen3_tts.codec.load import SpeechTokenizer
from models.qwen3_tts.codec.region_table import CodecShapes
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.prompt import Array
from models.qwen3_tts.region_table import TalkerShapes
from models.qwen3_tts.runaway import RunawayLimits
from models.qwen3_tts.runner import TalkerRunner
from models.qwen3_tts.streams import SpeechStreams, SpokenRequest

USED_BY_CODEC = ["codec_begin", "codec_decode"]  # its other regions read reference sounds
POLL_S = 0.0002  # between polls for an arrival
AUDIBLE = 10 ** (-40 / 20)  # of full scale


@dataclass(frozen=True)
class Sizes:
    """Slots, buckets and requests of a run."""

    batch: tuple[int, ...]
    prompt_rows: int = 48
    frames: int = 62  # of an answer: 5 s
    max_len: int = 512

    @property
    def n_slots(self) -> int:
        return self.batch[-1]


def built_streams(
    model: Qwen3TTS, tokenizer: SpeechTokenizer, sizes: Sizes, toggle: Toggle, rows: tuple[int, ...] = ()
) -> SpeechStreams:
    """Slots that are compiled, captured and warmed up as the toggle says. rows: more sizes of prompts."""
    shapes = TalkerShapes(
        batch=sizes.batch,
        rows=tuple(sorted({sizes.prompt_rows, *rows})),
        kv=(sizes.max_len,),
        text=(16,),
    )
    model.use_kernels(toggle.kernels)
    runner = TalkerRunner(model, n_slots=sizes.n_slots, max_len=sizes.max_len, shapes=shapes)
    codec = SpeechCodec(tokenizer, n_slots=sizes.n_slots, shapes=CodecShapes(batch=sizes.batch, sound_frames=(50,)))
    mode = "default" if toggle.graphs else toggle.mode
    if toggle.compiled and not toggle.kernels:
        runner.table.compile(by_layer=True, dynamic=True, mode=mode)
    if toggle.compiled:
        codec.regions.compile(USED_BY_CODEC[1:], by_layer=True, dynamic=True, mode=mode)
    runner.table.marks_steps = codec.regions.marks_steps = mode != "default"
    if toggle.graphs:
        runner.table.capture()
        codec.regions.capture(USED_BY_CODEC)
    else:
        runner.table.warm_up()
        codec.regions.warm_up(USED_BY_CODEC)
    return SpeechStreams(runner, codec)


def drop(streams: SpeechStreams) -> None:
    """Delete graphs and compiled code, which refer to the slots."""
    for table in (streams.runner.table, streams.codec.regions):
        table.drop_graphs()
        table.uncompile()


@dataclass
class _Answer:
    """One request on its way. arrived: seconds of the run. first: those of the first part with an audible sample.

    played_until: when its sound so far has been played. late: how often a part came after that.
    """

    arrived: float
    first: float | None = None
    played_until: float = 0.0
    samples: int = 0
    late: int = 0

    def take(self, now: float, samples: Array) -> None:
        if len(samples) == 0:
            return
        if self.first is None and np.abs(samples).max() > AUDIBLE:
            self.first = now
        self.late += self.samples > 0 and now > self.played_until
        self.played_until = max(now, self.played_until) + len(samples) / SAMPLE_RATE
        self.samples += len(samples)


@dataclass
class _Run:
    """Requests of one run, driven by one thread: at most one start before each frame, as in a worker."""

    streams: SpeechStreams
    sizes: Sizes
    clock: Callable[[], float] = time.perf_counter
    answers: list[_Answer] = field(default_factory=list)
    active: dict[int, _Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began, self._prompt = self.clock(), random_prompt(self.streams.runner.model, self.sizes.prompt_rows)

    @property
    def now(self) -> float:
        return self.clock() - self._began

    def start(self, arrived: float) -> None:
        answer, seed = _Answer(arrived), len(self.answers)
        limits = RunawayLimits(max_frames=self.sizes.frames)
        slot = self.streams.start(SpokenRequest(self._prompt, self.sizes.frames, seed=seed, limits=limits))
        self.answers.append(answer)
        self.active[slot] = answer

    def step(self) -> None:
        parts, now = self.streams.step(), self.now
        for part in parts:
            self.active[part.slot].take(now, part.samples)
            if part.end is not None:
                del self.active[part.slot]

    def cancel(self) -> None:
        for slot in list(self.active):
            self.streams.cancel(slot)
        self.active.clear()


def first_sounds(streams: SpeechStreams, sizes: Sizes, *, rate: float, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Milliseconds from arrival to the first audible samples on the host, for requests that arrive independently.

    Args:
        rate: requests a second on average.
        seconds: during which requests arrive; all of them are answered.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=max(1, round(rate * seconds)))
    arrivals, run = np.cumsum(gaps).tolist(), _Run(streams, sizes)
    n_started = 0
    while n_started < len(arrivals) or run.active:
        if n_started < len(arrivals) and arrivals[n_started] <= run.now and streams.runner.free_slots:
            run.start(arrivals[n_started])
            n_started += 1
        if run.active:
            run.step()
        else:
            time.sleep(POLL_S)
    waits = [1e3 * (one.first - one.arrived) for one in run.answers if one.first is not None]
    assert waits, f"expected requests with sound, got {len(arrivals)} without"
    return {
        "rate": rate,
        "first_audio": asdict(Timing.of(waits)),
        "requests": len(arrivals),
        "without_sound": len(arrivals) - len(waits),
        "late_parts": sum(one.late for one in run.answers),
    }


def full_slots(streams: SpeechStreams, sizes: Sizes, *, n: int, seconds: float) -> dict[str, Any]:
    """Seconds of sound a second with `n` requests at any time. late_parts: underruns of a player without a buffer."""
    run = _Run(streams, sizes)
    while run.now < seconds:
        if len(run.active) < n:
            run.start(run.now)
        run.step()
    elapsed = run.now
    run.cancel()
    return {
        "slots": n,
        "audio_s_per_s": sum(one.samples for one in run.answers) / SAMPLE_RATE / elapsed,
        "late_parts": sum(one.late for one in run.answers),
        "requests": len(run.answers),
    }


def real_time_factor(streams: SpeechStreams, sizes: Sizes) -> dict[str, float]:
    """One request alone: milliseconds to its first audible samples, and seconds of computation for one of sound."""
    run = _Run(streams, sizes)
    run.start(0.0)
    while run.active:
        run.step()
    if streams.runner.model.device.type == "cuda":
        torch.cuda.synchronize()
    (answer,) = run.answers
    assert answer.first is not None, "expected a request with sound"
    return {"latency_ms": 1e3 * answer.first, "rtf": run.now / (answer.samples / SAMPLE_RATE)}
