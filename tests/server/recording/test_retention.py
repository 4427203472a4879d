"""Removal of old recordings, by age and by size."""

import asyncio
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from server.recording import retention
from server.recording.cleanup import main
from server.recording.files import create_folder
from server.recording.ids import new_recording_id
from server.recording.retention import RetentionLimits, RetentionTask, clean_up, clean_up_traces
from server.recording.store import RecordingStore
from server.recording.timeline import FILE_NAME, TimelineFile

NOW = datetime(2026, 5, 20, 12, 0, tzinfo=UTC)
NO_LIMIT = -1.0


def stored(store: RecordingStore, days: float, n_bytes: int = 1000, name: str = "omni_x") -> str:
    """A recording of this age and size."""
    created_at = NOW - timedelta(days=days)
    recording_id = new_recording_id(name, created_at)
    folder = store.folder_of(recording_id)
    create_folder(folder, {"session_id": recording_id, "created_at": created_at.isoformat()})
    (folder / "merged_replay.wav").write_bytes(bytes(n_bytes))
    return recording_id


def test_expired_recordings_go_first_and_then_the_oldest(tmp_path: Path) -> None:
    store = RecordingStore(tmp_path)
    expired, old, middle, new = (stored(store, days, 10_000_000) for days in (31, 20, 10, 1))
    removed = clean_up(store, RetentionLimits(30, NO_LIMIT), NOW)
    assert removed[:2] == (1, 0) and removed.n_bytes > 10_000_000
    assert store.ids() == [new, middle, old]
    removed = clean_up(store, RetentionLimits(30, 0.0205), NOW)
    assert removed[:2] == (0, 1) and store.ids() == [new, middle] and not store.folder_of(expired).exists()
    assert clean_up(store, RetentionLimits(NO_LIMIT, NO_LIMIT), NOW)[:2] == (0, 0)
    assert clean_up(store, RetentionLimits(0, 0), NOW)[0] == 2 and store.ids() == []


def test_folders_in_use_or_without_meta_stay(tmp_path: Path) -> None:
    store = RecordingStore(tmp_path)
    live, bare, foreign = stored(store, 50), stored(store, 60), tmp_path / "other"
    (store.folder_of(bare) / "meta.json").unlink()
    foreign.mkdir()
    (foreign / "meta.json").write_text("{}")
    with TimelineFile(store.folder_of(live) / FILE_NAME, create=True):
        assert clean_up(store, RetentionLimits(0, 0), NOW)[:2] == (0, 0)
    assert store.folder_of(bare).exists() and foreign.exists()
    assert clean_up(store, RetentionLimits(0, 0), NOW)[:2] == (1, 0), "expected the ended recording to go"


def test_damaged_meta_counts_from_the_id(tmp_path: Path) -> None:
    store = RecordingStore(tmp_path)
    old = stored(store, 50)
    (store.folder_of(old) / "meta.json").write_text("not JSON")
    assert clean_up(store, RetentionLimits(51, NO_LIMIT), NOW)[0] == 0
    assert clean_up(store, RetentionLimits(49, NO_LIMIT), NOW)[0] == 1


def test_traces_go_as_recordings_do(tmp_path: Path) -> None:
    """One that may still be written stays, whatever the limits are."""
    for name, days in (("expired", 31), ("old", 20), ("new", 10), ("open", 0)):
        path = tmp_path / f"{name}.trace.jsonl"
        path.touch()
        os.truncate(path, 10_000_000)
        at = (NOW - timedelta(days=days)).timestamp()
        os.utime(path, (at, at))
    (tmp_path / "other.txt").touch()

    def left(limits: RetentionLimits) -> set[str]:
        clean_up_traces(tmp_path, limits, NOW)
        return {path.name.partition(".")[0] for path in tmp_path.iterdir()}

    assert left(RetentionLimits(NO_LIMIT, NO_LIMIT)) == {"expired", "old", "new", "open", "other"}
    assert left(RetentionLimits(30, NO_LIMIT)) == {"old", "new", "open", "other"}
    assert left(RetentionLimits(30, 0.0205)) == {"new", "open", "other"}
    assert left(RetentionLimits(0, 0)) == {"open", "other"}


def test_task_runs_after_its_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RecordingStore(tmp_path)
    stored(store, 50)
    monkeypatch.setattr(retention, "FIRST_S", 0.01)

    async def scenario() -> None:
        task = RetentionTask(store, RetentionLimits(30, NO_LIMIT), tmp_path, now=lambda: NOW)
        task.start()
        async with asyncio.timeout(30):
            while store.ids():
                await asyncio.sleep(0.01)
        await task.stop()
        unlimited = RetentionTask(store, RetentionLimits(NO_LIMIT, NO_LIMIT), tmp_path)
        unlimited.start()
        assert len(asyncio.all_tasks()) == 1, "expected no task without limits"
        await unlimited.stop()

    asyncio.run(scenario())


def test_command_removes_and_reports(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = RecordingStore(tmp_path / "sessions")
    stored(store, 5000)
    command = [sys.executable, "-m", "server.recording.cleanup", "--data-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--retention-days", "-1", "--max-gb", "1"], cwd=root, capture_output=True, text=True
    )
    assert (
        done.returncode == 0 and done.stdout == "removed 0 recordings by age and 0 by size, 0.000 GB, and 0 traces\n"
    ), done.stderr
    assert main(["--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("removed 1 recordings by age") and store.ids() == []
