"""`TalkLog` and `ReplySound` with given messages and times."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from clients.record import TalkLog
from clients.reply_sound import SOUND_RATE, ReplySound
from models.errors import SettingsError
from worker.protocol.messages import Error, Result


def result(text: str | None = None, *, ends: bool = False) -> Result:
    return Result(
        is_listen=text is None,
        text=text or "",
        end_of_turn=ends,
        current_time=1,
        cost_all_ms=1.0,
        server_send_ts=0.0,
        wall_clock_ms=2.0,
        kv_cache_length=7,
        headroom_ms=900.0,
    )


def test_log_builds_turns_and_summary() -> None:
    record = TalkLog()
    answers = [result(), result("a "), result("b", ends=True), result("c "), result(ends=True), result("d")]
    for number, answer in enumerate(answers):
        record.sent(number, number + 1.0)
        record.answered(answer, number + (1.5 if number == 3 else 0.1))
    record.sent(6, 7.0)
    failed = record.failed(Error(error="no room", code="context_full"), 6.2)
    record.sent(7, 8.0)
    assert (failed.decision, failed.error) == ("FAILED", "context_full: no room")
    assert record.turn_open and record.n_open == 1
    got = [(turn.start, turn.end, turn.text) for turn in record.turns]
    assert got == [(1, 2, "a b"), (3, 4, "c "), (5, 5, "d")], got
    summary = record.summary()
    counts = {key: summary[key] for key in ("units", "answered", "spoken", "failed", "turns", "deadline_misses")}
    assert counts == {"units": 8, "answered": 7, "spoken": 4, "failed": 1, "turns": 3, "deadline_misses": 1}, counts
    assert summary["reply_ms"]["p50"] == pytest.approx(100) and summary["reply_ms"]["max"] == pytest.approx(1500)
    assert summary["first_sound_ms"] is None
    document = json.loads(record.as_json({"input": "x"}))
    assert document["units"][6]["error"] == "context_full: no room" and "sound_start" not in document["units"][0]
    assert record.answered(result(), 9.0) is not None and record.answered(result(), 9.0) is None


def test_first_sound_counts_from_sending() -> None:
    record = TalkLog()
    unit = record.sent(10.0, 1.0)
    assert unit.arrived_s(10.25) == 1.25
    record.sounded(unit, 10.25, 100, 7)
    record.sounded(unit, 10.5, 100, 107)
    assert (unit.first_sound_ms, unit.sound_start, unit.n_samples) == (250, 7, 200)


def test_places_sound_on_the_time_line(tmp_path: Path) -> None:
    """Sound starts after the player's delay, follows playing sound without a gap, and is delayed after silence."""
    path = tmp_path / "reply.wav"
    loud = np.full(SOUND_RATE, 0.5, np.float32)
    with ReplySound(path, delay_ms=200) as reply:
        begins = [reply.add(second, loud) / SOUND_RATE for second in (1.5, 2.0, 5.0)]
        assert begins == [1.7, 2.7, 5.2], f"expected 1.7, 2.7, 5.2 s, got {begins}"
        assert not path.exists()
        reply.fill(8)
    wave, rate = soundfile.read(path, dtype="int16")
    expected = np.zeros(8 * SOUND_RATE, np.int16)
    for begin in begins:
        expected[round(begin * SOUND_RATE) :][:SOUND_RATE] = 16_384
    assert rate == SOUND_RATE and np.array_equal(wave, expected)
    assert [one.name for one in tmp_path.iterdir()] == ["reply.wav"]


def test_empty_reply_leaves_no_file(tmp_path: Path) -> None:
    with ReplySound(tmp_path / "reply.wav"):
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(SettingsError, match="expected a writable file path, got a missing folder"):
        ReplySound(tmp_path / "nowhere" / "reply.wav")
