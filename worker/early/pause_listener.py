"""Listens to one session's sound as it arrives, beside the engine, and permits trials at its pauses. Torch-free."""

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from worker.config.session import SessionConfig
from worker.early.pause import NOTHING_HEARD, HeardPiece, PauseDetector
from worker.early.trial import EarlyTrial
from worker.protocol.messages import AudioChunk
from worker.protocol.wire import WireError
from worker.vad_network import shared_network

MAX_SAMPLES = 8_000  # of a piece; longer ones leave no time that a trial could save
PATIENCE_S = 0.02  # a unit does not wait for a detector that is slower than that
_POOL = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pauses")

_Hearing = asyncio.Task[EarlyTrial | None]


class PauseListener:
    """Trials at the pauses of one session; none until `configure` turns it on. For the event loop's thread."""

    def __init__(self) -> None:
        self._detector: PauseDetector | None = None
        self._pause_ms: int | None = None
        self._hearing: deque[tuple[AudioChunk, _Hearing]] = deque()
        self._newest: _Hearing | None = None
        self._trial: EarlyTrial | None = None  # the newest one

    async def configure(self, config: SessionConfig, *, starts_over: bool) -> None:
        """Follow the session's settings. starts_over: forget the sound so far.

        Loads the network the first time.
        """
        pause_ms = config.early_pause_ms if config.runs_early else None
        if pause_ms == self._pause_ms and not starts_over:
            return
        self.close()
        self._pause_ms = pause_ms
        if pause_ms is not None:
            network = await asyncio.get_running_loop().run_in_executor(_POOL, shared_network)
            self._detector = PauseDetector(network, pause_ms)

    def push(self, chunk: AudioChunk) -> None:
        """Listen to a chunk that has arrived. All chunks are pushed in order, and each one is then asked for."""
        if self._detector is None:
            return
        self._newest = asyncio.create_task(self._hear(self._detector, self._newest, chunk))
        self._hearing.append((chunk, self._newest))

    async def trial_of(self, chunk: AudioChunk) -> EarlyTrial | None:
        """The trial of a chunk that ends in a pause; None for any other. Chunks are asked for in order."""
        if not any(pushed is chunk for pushed, _ in self._hearing):
            return None
        pushed, hearing = self._hearing.popleft()
        while pushed is not chunk:  # chunks before it were refused
            pushed, hearing = self._hearing.popleft()
        done, _ = await asyncio.wait((hearing,), timeout=PATIENCE_S)
        return hearing.result() if done and not hearing.cancelled() else None

    def close(self) -> None:
        """Stop listening; a trial that is open is void."""
        for _, hearing in self._hearing:
            hearing.cancel()
        self._hearing.clear()
        self._detector = self._pause_ms = None
        self._void()

    async def _hear(self, detector: PauseDetector, before: _Hearing | None, chunk: AudioChunk) -> EarlyTrial | None:
        if before is not None:
            await asyncio.wait((before,))
        heard, n_samples = await asyncio.get_running_loop().run_in_executor(_POOL, _heard, detector, chunk)
        if heard.has_speech:
            self._void()
        if not heard.is_pause or n_samples > MAX_SAMPLES:
            return None
        self._trial = EarlyTrial()
        return self._trial

    def _void(self) -> None:
        if self._trial is not None:
            self._trial.void()
        self._trial = None


def _heard(detector: PauseDetector, chunk: AudioChunk) -> tuple[HeardPiece, int]:
    """What a chunk contains, and its samples; a chunk that cannot be decoded is reported with its unit."""
    try:
        samples = chunk.samples()
    except WireError:
        return NOTHING_HEARD, 0
    return detector.push(samples), len(samples)
