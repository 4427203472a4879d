"""The thread that listens for pauses in the sound of all sessions, several pieces at a time. Torch-free."""

import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from worker.early.pause import NOTHING_HEARD, HeardPiece, PauseDetector, hear
from worker.protocol.messages import AudioChunk
from worker.protocol.wire import WireError
from worker.vad_network import SpeechNetwork, shared_network

LOG = logging.getLogger(__name__)
SPACING_S = 0.01  # from one batch of pieces to the next one, so that with many sessions a batch has more than one


class ArrivedPiece(NamedTuple):
    """A piece of a session's sound. heard: gets what it contains and its samples, on the thread; must return at once.

    A chunk that cannot be decoded contains nothing, and is reported with its unit.
    """

    detector: PauseDetector
    chunk: AudioChunk
    heard: Callable[[HeardPiece, int], None]


class PauseThread:
    """The thread. Pieces of one session are heard in order. network: that of all detectors."""

    def __init__(self, network: SpeechNetwork):
        self.network = network
        self._pieces: queue.SimpleQueue[ArrivedPiece] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="pauses", daemon=True).start()

    def submit(self, piece: ArrivedPiece) -> None:
        """Listen to a piece after all earlier ones."""
        self._pieces.put(piece)

    def _run(self) -> None:
        waiting: deque[ArrivedPiece] = deque()
        while True:
            if not waiting:
                waiting.append(self._pieces.get())
            began = time.monotonic()
            while not self._pieces.empty():
                waiting.append(self._pieces.get())
            self._hear(_one_of_each(waiting))
            if not waiting:
                time.sleep(max(began + SPACING_S - time.monotonic(), 0))

    def _hear(self, pieces: list[ArrivedPiece]) -> None:
        sounds = [_samples(one.chunk) for one in pieces]
        try:
            heard = hear(self.network, [(one.detector, own) for one, own in zip(pieces, sounds, strict=True)])
        except Exception:
            LOG.exception("pauses in the sound of %d sessions could not be found", len(pieces))
            heard = [NOTHING_HEARD] * len(pieces)
        for one, what, own in zip(pieces, heard, sounds, strict=True):
            one.heard(what, len(own))


def _one_of_each(waiting: deque[ArrivedPiece]) -> list[ArrivedPiece]:
    """Remove the first piece of each session. Returns: them, in order."""
    first = {id(one.detector): one for one in reversed(waiting)}
    taken = [one for one in waiting if first[id(one.detector)] is one]
    later = [one for one in waiting if first[id(one.detector)] is not one]
    waiting.clear()
    waiting.extend(later)
    return taken


def _samples(chunk: AudioChunk) -> np.ndarray:
    try:
        return chunk.samples()
    except WireError:
        return np.zeros(0, np.float32)


@functools.cache
def shared_thread() -> PauseThread:
    """The process's only thread, started on first use. Slow: it loads the network."""
    return PauseThread(shared_network())
