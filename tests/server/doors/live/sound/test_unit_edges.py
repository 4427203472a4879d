"""Silence before a session's first sound: units are full where the worker wants them, and no sound waits for it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from server.doors.live.sound.unit_buffer import UnitBuffer
from server.doors.live.sound.unit_edges import QUIET_S, UnitEdges
from worker.protocol.messages import Prepared

RATE, UNIT = 16_000, 16_000


class Sender:
    """A client that sends pieces at the pace of its sound, and the times at which its units are full."""

    def __init__(self, piece: int):
        self.piece, self.buffer, self.full_at = piece, UnitBuffer(), list[float]()
        self.silent = list[bool]()
        self.edges, self.is_prepared = UnitEdges(self.buffer), False

    def send(self, now: float) -> None:
        self.buffer.append(np.ones(self.piece, np.float32))
        self.edges.record_sound(self.piece, now)
        if self.is_prepared:
            self.take(now)

    def prepared(self, start_after_ms: float | None, now: float) -> None:
        self.is_prepared = True
        self.edges.on_answer(Prepared(prompt_length=1, start_after_ms=start_after_ms), now)
        self.take(now)

    def take(self, now: float) -> None:
        while self.buffer.has_unit:
            sound, _ = self.buffer.take()
            self.full_at.append(now)
            self.silent.append(not sound.all())
            assert not any(self.silent[1:]), "expected silence before the first sound alone"


def distance(time: float, edge: float) -> float:
    """Seconds between a time and the nearest edge of any second."""
    return abs((time - edge + 0.5) % 1 - 0.5)


@settings(max_examples=60)
@given(
    n=st.sampled_from((1, 2, 4, 10, 20, 50)),
    begin=st.floats(0, 1),
    prepared_at=st.floats(0, 3),
    start_after_ms=st.floats(1, 1000),
)
def test_units_are_full_at_the_edge(n: int, begin: float, prepared_at: float, start_after_ms: float) -> None:
    """Within half a piece, also if the context is prepared after the first sound; and with a piece."""
    sender = Sender(UNIT // n)
    times = [begin + number / n for number in range(5 * n)]
    for time in times:
        if not sender.is_prepared and prepared_at <= time:
            sender.prepared(start_after_ms, prepared_at)
        sender.send(time)
    edge, full_at = prepared_at + start_after_ms / 1000, [at for at in sender.full_at if at > prepared_at + 1]
    assert full_at and all(distance(at, edge) <= 0.5 / n + 1e-6 for at in full_at), (sender.full_at, edge)


def test_silence_is_added_again_after_a_quiet_time() -> None:
    sender = Sender(1_600)
    sender.prepared(250.0, 0.0)
    for begin in (0.4, 2.4 + QUIET_S):
        for number in range(15):
            sender.send(begin + number / 10)
        assert distance(sender.full_at[-1], 0.25) <= 0.05 + 1e-6, sender.full_at
        sender.buffer.clear_sound()
        sender.full_at, sender.silent = [], []


def test_sessions_without_a_place_or_with_whole_seconds_keep_their_time() -> None:
    """As long as a session is the only one of its worker, `prepared` says 0: it may begin at any time."""
    for piece, start_after_ms in ((1_600, None), (1_600, 0.0), (UNIT, 500.0)):
        sender = Sender(piece)
        sender.prepared(start_after_ms, 0.0)
        for number in range(UNIT // piece):
            assert not sender.full_at
            sender.send(0.3 + number * piece / RATE)
        assert len(sender.full_at) == 1 and not sender.buffer.n_samples
