import numpy as np

from server.doors.realtime.lane_turn import RATE, TurnLane


def test_sound_beyond_the_bound_drops_the_oldest() -> None:
    lane = TurnLane(max_s=1)
    half = RATE // 2
    dropped = [lane.append(np.full(half, number, np.float32)) for number in range(3)]
    assert dropped == [0, 0, half]
    assert np.array_equal(np.unique(lane.take()), [1, 2]) and len(lane.take()) == 0
