"""A start compares the files of a quantised checkpoint with their checksums, beside its other work."""

import json
import logging
import shutil
import threading
from pathlib import Path

import pytest

from models.checkpoint.checksums import INDEX
from models.checkpoint.embedded import DEFAULT
from models.errors import CheckpointError
from tests.worker.loop.engines import TINY
from worker.config.session import EngineConfig
from worker.start import file_check, starting
from worker.start.file_check import FileCheck
from worker.start.starting import Started, start_engine
from worker.start.warmup import WarmUpError
from worker.status import State, Status

SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / DEFAULT, tmp_path / "talker"))


def start(root: Path, folder: Path, cache_dir: Path, status: Status) -> Started:
    config = EngineConfig(model_path=folder, device="cpu", max_sessions=1, euler_steps=1, weights="int8")
    video = root / "assets" / "warmup.mp4"
    return start_engine(
        config, video=video, ref_audio=None, max_units=1, cache_dir=cache_dir, status=status, targets={}
    )


def flip(file: Path, n_bytes: int = 1000) -> None:
    """Change the last bits of bytes in the middle of a file: weights stay finite."""
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        found = opened.read(n_bytes)
        opened.seek(-n_bytes, 1)
        opened.write(bytes(byte ^ 1 for byte in found))


def test_flipped_bytes_end_the_start(root: Path, folder: Path, tmp_path: Path) -> None:
    flip(folder / SHARD)
    status = Status()
    with pytest.raises(CheckpointError) as caught:
        start(root, folder, tmp_path, status)
    listed = json.loads((folder / INDEX).read_text())["metadata"]["files"][SHARD]
    assert f"{SHARD}: expected {listed}, got {{'bytes': {listed['bytes']}, 'sha256'" in str(caught.value)
    assert status.state is State.WARMING_UP, "expected a failure before the worker serves"
    assert not [one for one in threading.enumerate() if one.name in ("engine", "checksums")]


def test_equal_files_are_counted(root: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "README.md").write_text("not listed")
    with caplog.at_level(logging.INFO, logger="worker.start.file_check"):
        started = start(root, folder, tmp_path, Status())
    started.engine.close()
    n_files = len(json.loads((folder / INDEX).read_text())["metadata"]["files"])
    assert list(started.seconds) == ["load", "warm_up", "checksums"] and started.seconds["checksums"] > 0
    assert f"checksums: {n_files} files in " in caplog.text and "beside the start, which waited" in caplog.text


def test_differences_are_the_reason_of_a_failed_warm_up(
    root: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise WarmUpError("unit 1", expected="finite logits", got="NaN")

    monkeypatch.setattr(starting, "warm_up", fail)
    with pytest.raises(WarmUpError):
        start(root, folder, tmp_path, Status())
    flip(folder / SHARD)
    with pytest.raises(CheckpointError, match=f"{SHARD}: expected"):
        start(root, folder, tmp_path, Status())


def test_the_comparison_runs_beside_the_caller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, said = threading.Event(), []

    def compare(given: Path, patterns: object) -> int:
        assert given == folder and goes_on.wait(60)
        return 7

    def progress(text: str) -> None:
        said.append(text)
        goes_on.set()

    monkeypatch.setattr(file_check, "check_files", compare)
    seconds = FileCheck(folder).finish(progress)
    assert seconds is not None and said == ["checksums of the model's files"]


def test_folders_without_quantised_matrices_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(file_check, "check_files", lambda *given: read.append(given))
    assert FileCheck(TINY).finish(read.append) is None and not read


def test_a_quantised_folder_without_checksums_does_not_start(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["metadata"]["files"]
    (folder / INDEX).chmod(0o644)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected checksums of the folder's files, which python -m models"):
        FileCheck(folder).finish(print)
