"""Voice conversion: one S3Gen on a thread of its own, which speaks pieces of many requests together.

The thread compiles, captures and replays, as compiled code belongs to a thread. On a GPU it has a stream of its own, so
that units of the omni model do not wait for it on the host, and each step waits until units leave time for it. Contains
no sockets and no messages.

An error ends its request: the units of the omni model go on, also after a lack of memory. Only a device that fails
every call ends the engine of both.
"""

import hashlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.errors import ModelError, SlotError
from models.token2wav.backends import Kernels
from models.token2wav.s3gen.components import S3Modes, compile_components
from models.token2wav.s3gen.load import load_s3gen
from models.token2wav.s3gen.model import S3Voice
from models.token2wav.s3gen.pieces import Piece, PieceJoiner, pieces
from models.token2wav.s3gen.region_table import S3Shapes
from models.token2wav.s3gen.synthesizer import S3Synthesizer, Utterance
from worker.assembly.backend_flags import apply_backend_flags, uses_kernels
from worker.config import compile as config
from worker.config.compile import CompileConfig
from worker.conversion.unit_gate import UnitGate
from worker.loop.batch_runner import DeviceLostError, check_device
from worker.loop.order.step_cost import StepCost
from worker.start.voices import ReferenceSound

LOG = logging.getLogger(__name__)
MAX_JOBS = 64  # that wait or run
MAX_VOICES = 16  # that are kept
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ConversionSource:
    """What is spoken: a sound, or given speech tokens.

    samples: [n] float32 at `rate` Hz. speech_tokens: 25 a second.
    """

    samples: np.ndarray | None = None
    rate: int = 0
    speech_tokens: tuple[int, ...] | None = None


@dataclass(eq=False)
class ConversionJob:
    """One request on its way.

    Attributes:
        source, voice, seed: of the request.
        emit: receives the number of speech tokens, then parts of the sound, [n] float32 at 24 kHz; on the thread of
            the converter, and must return at once.
        done: its outcome: the number of speech tokens.
    """

    source: ConversionSource
    voice: ReferenceSound
    seed: int
    emit: Callable[[int | np.ndarray], None]
    done: "Future[int]" = field(default_factory=Future)
    is_cancelled: bool = False
    # On the thread of the converter.
    speech_tokens: Tensor | None = None
    prepared: S3Voice | None = None
    waiting: list[Piece] = field(default_factory=list)
    joiner: PieceJoiner = field(default_factory=PieceJoiner)

    def cancel(self) -> None:
        """End the job before its next piece."""
        self.is_cancelled = True

    def fail(self, error: Exception) -> None:
        """Set the error as the outcome, unless there is one."""
        if not self.done.done():
            self.done.set_exception(error)


class Converter:
    """One S3Gen that serves. `close` ends it."""

    def __init__(
        self,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        compile: CompileConfig,
        modes: config.S3CompileModes | None = None,
        shapes: S3Shapes | None = None,
        gate: UnitGate | None = None,
    ):
        """
        Args:
            path: checkpoint file.
            device: of all networks.
            dtype: of the flow.
            compile: with `enabled` true or false.
            modes: of each component; None = the default ones.
            shapes: bucket sizes; None = the default ones.
            gate: what each step waits for; None: nothing.
        Raises: CheckpointError, SettingsError; the compiler's errors.
        """
        self._path, self._device, self._dtype, self._compile = path, device, dtype, compile
        self._shapes, self._modes = shapes or S3Shapes(), S3Modes(**(modes or config.S3CompileModes()).model_dump())
        self._gate, self._preparing, self._speaking = gate, StepCost(), StepCost()
        self._jobs: queue.SimpleQueue[ConversionJob | None] = queue.SimpleQueue()
        self._voices: OrderedDict[str, S3Voice] = OrderedDict()
        self._lock, self._n_jobs, self._is_closed = threading.Lock(), 0, False
        self.batches = 0  # calls that spoke pieces
        self.pieces = 0  # pieces that they spoke
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, name="conversion", daemon=True)
        self._thread.start()
        self._ready.result()

    def submit(
        self, source: ConversionSource, voice: ReferenceSound, seed: int, emit: Callable[[int | np.ndarray], None]
    ) -> ConversionJob:
        """Begin a conversion; see `ConversionJob`.

        Future errors: AudioError, TokenError, ShapeError; ModelError if the converter is closed.
        Raises: SlotError with `MAX_JOBS` of them.
        """
        job = ConversionJob(source, voice, seed, emit)
        with self._lock:
            if self._is_closed:
                raise ModelError("voice conversion", expected="one that runs", got="one that was closed")
            if self._n_jobs >= MAX_JOBS:
                raise SlotError("voice conversion", expected=f"fewer than {MAX_JOBS} at a time", got=self._n_jobs)
            self._n_jobs += 1
            self._jobs.put(job)
        job.done.add_done_callback(self._forget)
        return job

    def close(self) -> None:
        """Fail all jobs, end the thread and free the networks, their graphs and compiled code."""
        with self._lock:
            self._is_closed = True
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            LOG.error("a piece of a voice conversion did not end within %.0f s", CLOSE_TIMEOUT_S)

    @property
    def is_running(self) -> bool:
        """Whether it accepts jobs: false after `close`, and after a failure of its thread."""
        return not self._is_closed

    @property
    def n_jobs(self) -> int:
        """Jobs that wait or run."""
        return self._n_jobs

    def _forget(self, _: "Future[int]") -> None:
        with self._lock:
            self._n_jobs -= 1

    # --- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        active: list[ConversionJob] = []
        synthesizer: S3Synthesizer | None = None
        try:
            with torch.no_grad(), self._stream():
                synthesizer = self._built()
                self._ready.set_result(None)
                while self._accept(active):
                    self._step(synthesizer, active)
        except BaseException as error:
            if isinstance(error, DeviceLostError) and self._gate is not None:
                self._gate.end_engine(error)
            if self._ready.done():
                LOG.exception("voice conversion failed")
            else:
                self._ready.set_exception(error)
        finally:
            self._end(active)
            self._voices.clear()
            if synthesizer is not None:
                synthesizer.release()

    def _stream(self) -> "torch.cuda.StreamContext | nullcontext[None]":
        if self._device.type != "cuda":
            return nullcontext()
        torch.cuda.set_device(self._device.index or 0)
        return torch.cuda.stream(torch.cuda.Stream(self._device))

    def _built(self) -> S3Synthesizer:
        model = load_s3gen(self._path, device=self._device, dtype=self._dtype)
        synthesizer, compiling = S3Synthesizer(model, self._shapes), self._compile
        apply_backend_flags(compiling, self._device)
        if not compiling.enabled:
            return synthesizer
        captures = self._device.type == "cuda" and compiling.cuda_graphs != "off"
        kernels: Kernels = "auto" if uses_kernels(compiling, self._device) else "plain"
        compile_components(
            synthesizer.regions, self._modes, captures=captures, dynamic=compiling.dynamic, kernels=kernels
        )
        if captures:
            synthesizer.regions.capture()
            synthesizer.regions.seal()
        else:
            synthesizer.regions.warm_up()
        LOG.info("voice conversion: %s, %d graphs", self._path.name, synthesizer.regions.n_captured)
        return synthesizer

    def _accept(self, active: list[ConversionJob]) -> bool:
        """Take new jobs; wait for one if there is none. Returns: False at the end."""
        while not self._jobs.empty() or not active:
            job = self._jobs.get()
            if job is None:
                return False
            # From here on a client that leaves sets `is_cancelled` and cannot cancel the future.
            if job.done.set_running_or_notify_cancel():
                active.append(job)
        return True

    def _step(self, synthesizer: S3Synthesizer, active: list[ConversionJob]) -> None:
        """Prepare new jobs, then speak the next piece of several."""
        for job in [job for job in active if job.speech_tokens is None]:
            with self._timed(self._preparing, [job]):
                self._guarded(job, partial(self._prepare, synthesizer, job))
        for job in [job for job in active if job.is_cancelled and not job.done.done()]:
            job.fail(ModelError("voice conversion", expected="a client that waits", got="a cancelled one"))
        active[:] = [job for job in active if not job.done.done()]
        if not active:
            return
        batch = active[: self._shapes.batch[-1]]
        active[:] = [*active[len(batch) :], *batch]  # others come next
        with self._timed(self._speaking, batch):
            if not all(job.is_cancelled for job in batch):
                self._speak_guarded(synthesizer, batch)
        active[:] = [job for job in active if not job.done.done()]

    def _prepare(self, synthesizer: S3Synthesizer, job: ConversionJob) -> None:
        source = job.source
        if source.speech_tokens is not None:
            job.speech_tokens = torch.tensor(source.speech_tokens, dtype=torch.int64)
        else:
            job.speech_tokens = synthesizer.speech_tokens(source.samples, source.rate)
        job.prepared = self._voice(synthesizer, job.voice)
        job.waiting = list(pieces(len(job.speech_tokens), self._shapes.speech_tokens[-1]))
        synthesizer.model.check(job.speech_tokens, job.prepared)
        job.emit(len(job.speech_tokens))

    def _voice(self, synthesizer: S3Synthesizer, sound: ReferenceSound) -> S3Voice:
        first = sound.samples[0]
        key = hashlib.sha256(repr((sound.rate, len(first))).encode() + first.numpy().tobytes()).hexdigest()
        if key not in self._voices:
            (self._voices[key],) = synthesizer.prepare([(first, sound.rate)])
            if len(self._voices) > MAX_VOICES:
                self._voices.popitem(last=False)
        self._voices.move_to_end(key)
        return self._voices[key]

    def _speak(self, synthesizer: S3Synthesizer, batch: list[ConversionJob]) -> None:
        utterances = []
        for job in batch:
            assert job.speech_tokens is not None and job.prepared is not None, "expected a prepared job"
            piece = job.waiting[0]
            utterances.append(Utterance(job.speech_tokens[piece.start : piece.end], job.prepared, job.seed))
        waves = synthesizer.speak(utterances)
        self.batches, self.pieces = self.batches + 1, self.pieces + len(batch)
        for job, wave in zip(batch, waves, strict=True):
            piece = job.waiting.pop(0)
            job.emit(job.joiner.push(wave, piece).cpu().numpy())
            if piece.is_last:
                job.done.set_result(0 if job.speech_tokens is None else len(job.speech_tokens))

    def _speak_guarded(self, synthesizer: S3Synthesizer, batch: list[ConversionJob]) -> None:
        try:
            self._speak(synthesizer, batch)
        except Exception as error:
            check_device(error, self._device)
            for job in batch:  # one of them must not end the others
                if not job.done.done():
                    self._guarded(job, partial(self._speak, synthesizer, [job]))

    @contextmanager
    def _timed(self, cost: StepCost, jobs: Sequence[ConversionJob]) -> Iterator[None]:
        """Wait until units leave time for a step of these jobs, and count what it takes."""

        def is_over() -> bool:
            return self._is_closed or all(job.is_cancelled for job in jobs)

        if self._gate is not None:
            self._gate.wait(cost.seconds(time.monotonic()), is_over)
        began = time.monotonic()
        yield
        if not is_over():
            cost.count(time.monotonic() - began, time.monotonic())

    def _guarded(self, job: ConversionJob, step: Callable[[], None]) -> None:
        """Run a step of a job; its error ends the job alone. Raises: DeviceLostError."""
        try:
            step()
        except Exception as error:
            check_device(error, self._device)
            if not isinstance(error, ModelError):
                LOG.exception("voice conversion")
            job.fail(error)

    def _end(self, active: list[ConversionJob]) -> None:
        with self._lock:
            self._is_closed = True
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None and job.done.set_running_or_notify_cancel():
                active.append(job)
        for job in active:
            job.fail(ModelError("voice conversion", expected="one that runs", got="one that was closed"))
        active.clear()
