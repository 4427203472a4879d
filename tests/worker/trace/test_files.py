"""Files of traces: names, rights, limits, damaged ends, and arrays that come back unchanged."""

import logging
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from models.errors import SettingsError
from worker.trace import files
from worker.trace.files import TraceFolder, recorder_for
from worker.trace.records import Record, TraceError, pack, read_records, to_line, unpack

HEADER = {"format": "duologue-trace", "version": 1}


def test_each_session_has_a_file_of_its_own(tmp_path: Path) -> None:
    """For the owner only. Names of sessions do not lead out of the folder."""
    folder = TraceFolder(tmp_path / "made" / "traces")
    for name in ("../../omni 1#2", "../../omni 1#2"):
        sink = folder.open(name)
        for record in (HEADER, {"kind": "unit", "text": "é"}):
            sink(lambda record=record: record)
        sink(None)
    folder.close()
    found = sorted((tmp_path / "made" / "traces").iterdir())
    assert [path.name.startswith("______omni_1_2-") for path in found] == [True, True], found
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
    assert read_records(found[0]) == read_records(found[1]) == [HEADER, {"kind": "unit", "text": "é"}]


def test_file_that_fails_or_is_full_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[str, object]:
        raise ValueError("no such array")

    monkeypatch.setattr(files, "MAX_FILE_CHARS", 200)
    folder = TraceFolder(tmp_path)
    broken, full, good = (folder.open(name) for name in ("broken", "full", "good"))
    with caplog.at_level(logging.WARNING, "worker.trace.files"):
        for sink in (broken, full, good):
            sink(lambda: HEADER)
        broken(fail)
        full(lambda: {"kind": "unit", "text": "x" * 300})
        for sink in (broken, full, good):
            sink(lambda: {"kind": "pause"})
        folder.close()
    kinds = {
        path.name.partition("-")[0]: [one.get("kind") for one in read_records(path)] for path in tmp_path.iterdir()
    }
    assert kinds == {"broken": [None], "full": [None], "good": [None, "pause"]}, kinds
    assert caplog.text.count(" ends: ") == 2 and "no such array" in caplog.text, caplog.text


def test_records_that_wait_for_a_slow_disk_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "MAX_WAITING", 2)
    folder, is_writing, may_go_on = TraceFolder(tmp_path), threading.Event(), threading.Event()

    def slow() -> Record:
        is_writing.set()
        may_go_on.wait()
        return {"kind": "slow"}

    sink = folder.open("a")
    sink(slow)
    is_writing.wait()
    for number in range(4):
        sink(lambda number=number: {"kind": "number", "number": number})
    may_go_on.set()
    sink(None)
    folder.close()
    (file,) = tmp_path.iterdir()
    kinds = [one.get("number") for one in read_records(file)]
    assert kinds == [None, 0, 1], f"expected the records before the bound without a gap, got {kinds}"
    assert caplog.text.count("trace ") == 1, f"expected one warning, got {caplog.text}"


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"service.trace_dir: expected a folder that can be made, got"):
        recorder_for(tmp_path / "file")
    assert recorder_for(None) is None


def test_cut_last_line_is_left_out(tmp_path: Path) -> None:
    """As a worker that was killed leaves it."""
    file = tmp_path / "cut"
    file.write_text(to_line(HEADER) + to_line({"kind": "pause"}) + '{"kind":"un', encoding="utf-8")
    assert [record.get("kind") for record in read_records(file)] == [None, "pause"]


def test_arrays_are_unchanged() -> None:
    """Sound that 16 bits hold takes 16 bits."""
    pcm16 = (np.arange(-300, 300) * 100).astype(np.float32) / np.float32(32768)
    rows = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    arrays = (pcm16, pcm16 / 3, rows, np.zeros((0, 2), np.uint8), np.arange(7), np.full(4, np.nan, np.float32))
    for array in arrays:
        got = unpack(pack(array))
        assert got.dtype == array.dtype and np.array_equal(got, array, equal_nan=array.dtype == np.float32)
    assert [pack(array)["dtype"] for array in arrays[:3]] == ["pcm16", "float32", "float32"]
    # A shape that does not fit the data, a bomb, and a type that could run code.
    for change in ({"shape": [5]}, {"shape": [1 << 40]}, {"dtype": "object"}, {"data": "*"}, {"shape": None}):
        with pytest.raises(TraceError, match="array of a trace"):
            unpack({**pack(rows), **change})
