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
TAIL = 8_000  # last samples of a longer piece; only these are heard, so that pieces of other sessions do not wait
MAX_DATA = 2**20  # base64 characters, bytes or samples of a piece; a longer one is not decoded here


class ArrivedPiece(NamedTuple):
    """A piece of a session's sound that waits for the thread.

    Args:
        detector: of the session.
        chunk: the piece. One that is invalid or longer than `MAX_DATA` counts as a piece without speech.
        on_heard: called on the thread with what the piece contains and its number of samples; must return at once.
    """

    detector: PauseDetector
    chunk: AudioChunk
    on_heard: Callable[[HeardPiece, int], None]


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
        heard, lengths = [NOTHING_HEARD] * len(pieces), [0] * len(pieces)
        try:
            sounds = [_samples(one.chunk) for one in pieces]
            lengths = [n for _, n in sounds]
            heard = hear(self.network, [(one.detector, own) for one, (own, _) in zip(pieces, sounds, strict=True)])
        except Exception:
            LOG.exception("pauses in the sound of %d sessions could not be found", len(pieces))
        for one, what, n in zip(pieces, heard, lengths, strict=True):
            try:
                one.on_heard(what, n)
            except Exception:
                LOG.exception("a piece of sound that was heard could not be reported")


def _one_of_each(waiting: deque[ArrivedPiece]) -> list[ArrivedPiece]:
    """Remove the first piece of each session. Returns: them, in order."""
    first = {id(one.detector): one for one in reversed(waiting)}
    taken = [one for one in waiting if first[id(one.detector)] is one]
    later = [one for one in waiting if first[id(one.detector)] is not one]
    waiting.clear()
    waiting.extend(later)
    return taken


def _samples(chunk: AudioChunk) -> tuple[np.ndarray, int]:
    """The last `TAIL` samples, [n] float32 at 16 kHz, and the number of all samples.

    Sound above `MAX_DATA` is not decoded: no samples, and the length of its data. Invalid sound: no samples, and 0.
    """
    if (n_data := len(chunk.audio_base64.data)) > MAX_DATA:
        return np.zeros(0, np.float32), n_data
    try:
        samples = chunk.samples()
    except WireError:
        return np.zeros(0, np.float32), 0
    return samples[-TAIL:], len(samples)


_STARTING = threading.Lock()


def shared_thread() -> PauseThread:
    """The process's only thread, started on first use. Slow: it loads the network."""
    with _STARTING:  # `functools.cache` alone would call it once for each of several first callers
        return _started_thread()


@functools.cache
def _started_thread() -> PauseThread:
    return PauseThread(shared_network())
