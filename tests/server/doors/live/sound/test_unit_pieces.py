"""Pieces of a unit: what goes to the worker, and how much of the next unit is sent when one has run early."""

import numpy as np
import pytest

from server.doors.live.sound.unit_buffer import UnitBuffer
from server.doors.live.sound.unit_pieces import MAX_OPEN, UnitPieces
from tests.server.doors.recorded_units import RecordedUnits
from worker.protocol.messages import AudioChunk, Error, Result

COUNT = 1 - np.arange(40_000, dtype=np.float32) / 80_000  # falls: no speech


def result(**given: object) -> Result:
    numbers = {"current_time": 1, "cost_all_ms": 1.0, "server_send_ts": 0.0, "wall_clock_ms": 1.0, "kv_cache_length": 1}
    return Result(**{"is_listen": True, **numbers, **given})


WAITS, OVER = result(incomplete=True), result()


class Sender:
    """A buffer, its pieces and a worker that records. heard: the sound that the worker got."""

    def __init__(self) -> None:
        self.buffer, self.worker, self.n = UnitBuffer(), RecordedUnits(), 0
        self.pieces = UnitPieces(self.buffer)

    def say(self, n: int) -> int:
        """The user says `n` samples. Returns: messages that were sent for them."""
        before = len(self.worker.sent)
        self.buffer.append(COUNT[self.n : self.n + n])
        self.n += n
        self.pieces.send(self.worker)
        return len(self.worker.sent) - before

    @property
    def heard(self) -> np.ndarray:
        return np.concatenate([chunk.samples() for chunk in self.worker.sent])


@pytest.fixture
def sender() -> Sender:
    return Sender()


def test_pieces_and_rest_are_one_unit(sender: Sender) -> None:
    """Small appends are put together, and the last tenth waits for what the unit must do."""
    assert [sender.say(800) for _ in range(20)] == [0, 1] * 9 + [0, 0]
    for chunk in list(sender.worker.sent):
        assert not sender.pieces.ends_unit(chunk, WAITS)
    assert sender.buffer.has_unit and sender.buffer.n_units == 1 and sender.pieces.oldest is None
    unit = sender.pieces.take_unit(force_listen=False, force_speak=True)
    assert len(unit.samples()) == 16_000 - MAX_OPEN and unit.force_speak
    assert sender.pieces.ends_unit(unit, OVER), "expected that a message that is no piece ends its unit"
    sender.worker.send(unit)
    assert np.array_equal(sender.heard, COUNT[:16_000]) and sender.buffer.n_missing == 16_000


def test_pieces_are_short_beside_speech() -> None:
    """And right after it, so that a pause is found soon; not in noise or silence, nor much later."""
    rng, sender, sizes = np.random.default_rng(0), Sender(), list[int]()
    noise = 0.004 * rng.standard_normal(64_000).astype(np.float32)
    spoken = noise.copy()
    spoken[16_000:32_000] += 0.1 * np.sin(np.arange(16_000, dtype=np.float32) / 5)
    for at in range(0, len(spoken), 320):
        n_before = len(sender.worker.sent)
        sender.buffer.append(spoken[at : at + 320])
        sender.pieces.send(sender.worker)
        sizes += [len(chunk.samples()) for chunk in sender.worker.sent[n_before:]]
        while (piece := sender.pieces.oldest) is not None:
            sender.pieces.ends_unit(piece, WAITS)
        if sender.buffer.has_unit:
            sender.pieces.take_unit(force_listen=False, force_speak=False)
    assert set(sizes[:9]) == {1_600}, f"expected pieces of 100 ms in noise, got {sizes}"
    assert sizes.count(640) >= 30, f"expected pieces of 40 ms beside speech, got {sizes}"
    assert set(sizes[-12:]) == {1_600}, f"expected pieces of 100 ms long after speech, got {sizes}"


def test_rest_is_filled_with_silence(sender: Sender) -> None:
    sender.say(4_000)
    sender.say(500)
    assert sender.buffer.n_missing == 11_500
    assert not sender.pieces.ends_unit(sender.worker.sent[0], WAITS)
    rest = sender.pieces.take_unit(force_listen=False, force_speak=False).samples()
    assert len(rest) == 12_000 and np.array_equal(rest[:500], COUNT[4_000:4_500]) and not rest[500:].any()


def test_early_unit_leaves_later_pieces_to_the_next_one(sender: Sender) -> None:
    for n in (6_000, 1_600, 2_000):
        sender.say(n)
    first, second, third = sender.worker.sent
    assert sender.pieces.ends_unit(first, result(early=True, shift_ms=625.0)), "expected an early unit"
    assert sender.buffer.n_missing == 16_000 - 3_600
    assert [sender.pieces.ends_unit(piece, WAITS) for piece in (second, third)] == [False, False]
    sender.say(12_400)
    assert sender.buffer.has_unit and sender.pieces.oldest is sender.worker.sent[-1]


def test_first_pictures_go_with_a_piece(sender: Sender) -> None:
    """Later ones wait for the rest of the unit."""
    sender.buffer.add_picture(b"a", 1)
    sender.say(2_000)
    sender.buffer.add_picture(b"b", 2)
    sender.say(2_000)
    rest = sender.pieces.take_unit(force_listen=False, force_speak=False)
    sent: list[AudioChunk] = [*sender.worker.sent, rest]
    assert [len(chunk.frame_base64_list) for chunk in sent] == [1, 0, 1] and rest.max_slice_nums == [2]


def test_sound_of_a_failed_piece_is_not_counted(sender: Sender) -> None:
    sender.say(5_000)
    assert sender.pieces.ends_unit(sender.worker.sent[0], Error(error="bad"))
    assert sender.buffer.n_missing == 16_000
    sender.say(5_000)
    sender.pieces.clear()
    assert sender.pieces.oldest is None and sender.buffer.n_missing == 16_000
