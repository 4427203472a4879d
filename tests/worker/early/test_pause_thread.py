"""The thread that listens for pauses: several sessions at a time, each in order."""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.worker.early.test_pause import CERTAIN, NEEDED, PAUSE_MS, SILENCE, SPEECH, LoudnessNetwork, sound_of
from worker.early.pause import HeardPiece, PauseDetector
from worker.early.pause_thread import MAX_DATA, TAIL, ArrivedPiece, PauseThread, shared_thread
from worker.protocol.messages import AudioChunk
from worker.protocol.wire import Sound

PATIENCE_S = 20.0
Heard = list[tuple[str, HeardPiece, int]]


class HeldNetwork(LoudnessNetwork):
    """Waits in its first call until it is released, so that pieces gather behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.free = threading.Event(), threading.Event()

    def probabilities(self, sounds: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.begun.set()
        assert self.free.wait(PATIENCE_S)
        return super().probabilities(sounds, states)


def listen(thread: PauseThread, pieces: Sequence[tuple[str, PauseDetector, AudioChunk]]) -> Heard:
    """What pieces contain, in the order in which the thread has heard them."""
    found: queue.SimpleQueue[tuple[str, HeardPiece, int]] = queue.SimpleQueue()
    for name, detector, chunk in pieces:
        thread.submit(ArrivedPiece(detector, chunk, lambda heard, n, name=name: found.put((name, heard, n))))
        if isinstance(thread.network, HeldNetwork):  # it has begun with the first one
            assert thread.network.begun.wait(PATIENCE_S)
    if isinstance(thread.network, HeldNetwork):
        thread.network.free.set()
    return [found.get(timeout=PATIENCE_S) for _ in pieces]


def chunk(row: Sequence[float]) -> AudioChunk:
    return AudioChunk(audio_base64=Sound(sound_of(row)))


def test_waiting_pieces_are_heard_together_and_each_session_in_order() -> None:
    network = HeldNetwork()
    first, a, b = (PauseDetector(network, PAUSE_MS) for _ in range(3))
    spoken, silent = chunk([SPEECH] * CERTAIN), chunk([SILENCE] * NEEDED)
    given = [("first", first, silent), ("a", a, spoken), ("a", a, silent), ("b", b, spoken), ("b", b, silent)]
    got = listen(PauseThread(network), given)
    assert [one for one in got if one[0] == "a"] == [
        ("a", HeardPiece(True, False), 512 * CERTAIN),
        ("a", HeardPiece(False, True), 512 * NEEDED),
    ]
    assert [one[1].is_pause for one in got if one[0] == "b"] == [False, True]
    # The first piece has begun alone. Of those behind it, the second one of each session waits for the first.
    assert network.batches == [1] * NEEDED + [2] * CERTAIN + [2] * NEEDED


def test_pieces_that_cannot_be_heard_leave_those_after_them_alone() -> None:
    class FailingNetwork(LoudnessNetwork):
        def probabilities(self, sounds: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            if (sounds[:, -1] > 2).any():
                raise RuntimeError("a network that fails")
            return super().probabilities(sounds, states)

    network = FailingNetwork()
    thread, detector = PauseThread(network), PauseDetector(network, PAUSE_MS)
    broken, loud = AudioChunk(audio_base64="AAA"), chunk([3.0])
    [undecoded] = listen(thread, [("broken", detector, broken)])
    assert undecoded == ("broken", HeardPiece(False, False), 0)
    [failed] = listen(thread, [("loud", PauseDetector(network, PAUSE_MS), loud)])
    assert failed == ("loud", HeardPiece(False, False), 512)
    [heard] = listen(thread, [("after", detector, chunk([SPEECH]))])
    assert heard == ("after", HeardPiece(True, False), 512)


def test_long_pieces_are_heard_at_their_end() -> None:
    network = LoudnessNetwork()
    thread, detector = PauseThread(network), PauseDetector(network, PAUSE_MS)
    long = chunk([SPEECH] * 400 + [SILENCE] * NEEDED)
    [(_, heard, n)] = listen(thread, [("long", detector, long)])
    assert heard == HeardPiece(True, True) and n == 512 * (400 + NEEDED)
    assert len(network.batches) == TAIL // 512, f"expected half a second of windows, got {len(network.batches)}"
    huge = AudioChunk(audio_base64="A" * (MAX_DATA + 1))
    [(_, heard, n)] = listen(thread, [("huge", detector, huge)])
    assert heard == HeardPiece(False, False) and n > TAIL, "expected a chunk of that size not to be decoded"


def test_first_sessions_of_a_process_share_one_thread() -> None:
    with ThreadPoolExecutor(6) as pool:
        threads = list(pool.map(lambda _: shared_thread(), range(6)))
    assert all(one is threads[0] for one in threads), "expected one thread for all sessions"
