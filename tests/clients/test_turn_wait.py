"""The parts of a wait for an answer, the end of speech in a sound, and how a log puts them together."""

import numpy as np
import pytest

from clients import talk_table
from clients.record import TalkLog
from clients.turn_wait import SpeechEnd, TurnWait, WorkerTimes
from worker.protocol.messages import Result

RNG = np.random.default_rng(0)
STAGES = {"wait": 5.0, "first_sound": 75.0, "first_vocoder": 20.0}


def result(**given: object) -> Result:
    """A unit that waited 30 ms in the worker, 5 of them in the engine, and sounded 70 ms later."""
    numbers = {"current_time": 1, "cost_all_ms": 1.0, "server_send_ts": 0.0, "wall_clock_ms": 2.0, "kv_cache_length": 7}
    return Result(**{"is_listen": False, "lag_ms": 30.0, "stages": STAGES, **numbers, **given})


def noise(seconds: float, level: float) -> np.ndarray:
    return (level * RNG.standard_normal(round(16_000 * seconds))).astype(np.float32)


def test_worker_times_count_from_the_arrival_of_the_piece() -> None:
    assert WorkerTimes.of(result()) == (80.0, 20.0)
    assert WorkerTimes.of(result(stages={})) is None


def test_parts_of_a_wait_add_up() -> None:
    wait = TurnWait.of(result(early=True, shift_ms=400.0), alignment=250.0, first_sound=104.0, playback=200.0)
    assert wait == TurnWait(250.0, 400.0, 80.0, 20.0, 4.0, 200.0) and wait.total == 554.0


@pytest.mark.parametrize("n", [160, 1_600, 16_000])
def test_end_of_speech_is_found_in_noise(n: int) -> None:
    """Whatever the size of the pieces; a click is no speech."""
    sound = np.concatenate((noise(1, 0.003), noise(0.5, 0.1), noise(0.5, 0.003), noise(0.01, 0.5), noise(0.99, 0.003)))
    speech, found = SpeechEnd(), []
    for start in range(0, len(sound), n):
        speech.push(sound[start : start + n])
        found.append(speech.end_s)
    assert found[0] is None and speech.end_s == pytest.approx(1.5, abs=0.011), found


def test_log_counts_pieces_as_one_unit_and_measures_each_wait_once() -> None:
    """Of speech that ended at 1.3 s, answered early with the piece that ends at 1.5 s."""
    log = TalkLog()
    for number in range(15):
        heard_s = (number + 1) / 10
        unit = log.sent(heard_s, heard_s, None if heard_s < 1 else min(heard_s, 1.3))
        if number == 14:
            log.sounded(unit, heard_s + 0.104, 240, round((heard_s + 0.304) * 24_000))
        message = {9: result(is_listen=True), 14: result(early=True, shift_ms=500.0)}
        log.answered(message.get(number, result(is_listen=True, incomplete=True)), heard_s + 0.2)
    assert [(unit.index, unit.decision, unit.heard_s) for unit in log.units] == [(0, "LISTEN", 1.0), (1, "SPEAK", 1.5)]
    wait = log.units[1].wait
    assert wait is not None and wait.total == pytest.approx(504.0), wait
    assert (round(wait.alignment), wait.saved, round(wait.transport), round(wait.playback)) == (200, 500.0, 4, 200)
    again = log.sent(2.5, 2.5, 1.3)
    log.answered(result(end_of_turn=True), 2.6)
    unit = log.sent(3.5, 3.5, 1.3)
    log.sounded(unit, 3.6, 240, 100_000)
    log.answered(result(), 3.7)
    assert again.wait is None and unit.wait is None, "expected one wait for the same speech"
    summary = log.summary()
    assert summary["early"] == 1 and summary["wait_ms"]["total"]["p50"] == pytest.approx(504.0)
    assert "saved 500" in talk_table.row(log.units[1]) and "alignment 200" in talk_table.closing(summary)
    assert '"total": 504.0' in log.as_json({})
