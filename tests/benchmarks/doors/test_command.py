"""The benchmark of the doors: its arithmetic, and a short run of its parts with servers."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.doors import __main__ as doors
from benchmarks.doors import resampling
from benchmarks.doors.adapter import adapter_ms
from benchmarks.doors.stock_session import Loop


def test_noise_of_a_known_size_is_found() -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, 48_000)
    expected = 10 * np.log10(0.5**2 / 2 / 0.01**2)
    got = resampling.snr_db(lambda sound: 0.9 * sound + 0.9 * noise, 24_000, 24_000, 1009)
    assert got == pytest.approx(expected, abs=0.3), f"expected {expected:.1f} dB, got {got:.1f}"


def test_a_loop_repeats_its_sound() -> None:
    sound = Loop(bytes(960) + b"\1" * 960)
    got = [chunk[0] for chunk in sound.chunks(20, start_ms=20, n=3)]
    assert got == [1, 0, 1], f"expected the second chunk first, got {got}"


def test_every_unit_of_the_adapter_is_counted() -> None:
    spent = asyncio.run(adapter_ms(14, 100))
    assert {name: len(ms) for name, ms in spent.items()} == {"listen": 6, "speak": 8}
    assert all(ms > 0 for each in spent.values() for ms in each)


def test_parts_with_servers_write_their_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "doors.json"
    sizes = ["--rounds", "1", "--sessions", "2", "--seconds", "3", "--chunk-ms", "100", "--client-processes", "1"]
    doors.main(["--parts", "asked,sessions", *sizes, "--json", str(file)])
    result = json.loads(file.read_text())
    asked, [row] = result["asked"], result["sessions"]
    assert asked["n"] == 1 and asked["first_sound_ms"]["p50"] > 20 and asked["cancel_ms"]["p50"] > 0, asked
    assert (row["sessions"], row["n_late"]) == (2, 0) and row["reply_ms"]["max"] < 1000, row
    assert row["n_sound_bytes"] >= 2 * 48_000 and row["callbacks"]["n"] > 100, row
    assert row["cpu_ms_per_session_s"] > 0 and row["delay_below_ms"] > 0, row
    verdicts = result["verdicts"]
    assert verdicts.keys() == {
        "first sound above the engine's, ms",
        "cancel to response.done, ms",
        "longest callback, ms",
        "longest callback, CPU ms",
    }
    assert "2 sessions" in capsys.readouterr().out


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doors.parse(["--parts", "asked,nonsense"])
    assert "got nonsense" in capsys.readouterr().err
