"""Listens to one session's sound as it arrives, beside the engine, and permits trials at its pauses. Torch-free."""

import asyncio
from collections import deque
from contextlib import suppress

from worker.config.session import SessionConfig
from worker.early.pause import HeardPiece, PauseDetector
from worker.early.pause_thread import ArrivedPiece, PauseThread, shared_thread
from worker.early.trial import EarlyTrial
from worker.protocol.messages import AudioChunk

MAX_SAMPLES = 8_000  # of a piece; a longer one gets no trial, and makes an open one void
MAX_UNHEARD = 64  # pieces of a session; further ones are not listened to
MAX_WAIT_S = 0.02  # of a chunk for the detector; a chunk that is not heard by then has no trial


class _Hearing:
    """A chunk that the thread listens to. is_done: `trial` is known. waiter: set then, on the event loop."""

    def __init__(self, chunk: AudioChunk):
        self.chunk, self.is_done = chunk, False
        self.trial: EarlyTrial | None = None
        self.waiter: asyncio.Event | None = None


class PauseListener:
    """Trials at the pauses of one session; none until `configure` turns it on.

    Its methods are called on the event loop's thread; only `_heard` runs on the `PauseThread`.
    """

    def __init__(self) -> None:
        self._thread: PauseThread | None = None
        self._detector: PauseDetector | None = None
        self._pause_ms: int | None = None
        self._hearing: deque[_Hearing] = deque()
        self._trial: EarlyTrial | None = None  # the newest one
        self._n_pushed = self._n_heard = 0  # pieces, counted on the event loop's thread and on the other one
        self._loop = asyncio.get_running_loop()

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
            self._thread = await asyncio.to_thread(shared_thread)
            self._detector = PauseDetector(self._thread.network, pause_ms)

    def push(self, chunk: AudioChunk) -> None:
        """Listen to a chunk that has arrived. Expects all chunks in order; `trial_of` follows for each of them."""
        detector = self._detector
        if detector is None or self._thread is None or self._n_pushed - self._n_heard >= MAX_UNHEARD:
            return
        self._n_pushed += 1
        hearing = _Hearing(chunk)
        self._hearing.append(hearing)
        self._thread.submit(ArrivedPiece(detector, chunk, lambda heard, n: self._heard(detector, hearing, heard, n)))

    async def trial_of(self, chunk: AudioChunk) -> EarlyTrial | None:
        """The trial of a chunk that ends in a pause; None without a pause, or if the chunk is not heard in time.

        Chunks are asked for in order.
        """
        if not any(one.chunk is chunk for one in self._hearing):
            return None
        hearing = self._hearing.popleft()
        while hearing.chunk is not chunk:  # chunks before it were refused
            hearing = self._hearing.popleft()
        if not hearing.is_done:
            hearing.waiter = asyncio.Event()
            if not hearing.is_done:  # the thread sets this first and looks for the waiter after that
                with suppress(TimeoutError):
                    async with asyncio.timeout(MAX_WAIT_S):
                        await hearing.waiter.wait()
        return hearing.trial

    def close(self) -> None:
        """Stop listening; a trial that is open is void."""
        self._hearing.clear()
        self._detector = self._pause_ms = None
        self._void()

    def _heard(self, detector: PauseDetector, hearing: _Hearing, heard: HeardPiece, n_samples: int) -> None:
        """Take what a chunk contains, on the detector's thread."""
        self._n_heard += 1
        if detector is not self._detector:  # the session listens no more, or from the start again
            return
        if heard.has_speech or n_samples > MAX_SAMPLES:
            self._void()
        if heard.is_pause and n_samples <= MAX_SAMPLES:
            hearing.trial = self._trial = EarlyTrial()
        hearing.is_done = True
        if hearing.waiter is not None:
            with suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(hearing.waiter.set)

    def _void(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.void()
