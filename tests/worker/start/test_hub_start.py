"""A start with a model id of the Hugging Face hub loads its snapshot, vocoder included."""

from pathlib import Path

import pytest

from models.errors import CheckpointError
from tests.worker.assembly.fake_hub import NAME, fill_cache, use_cache
from worker.config.session import EngineConfig
from worker.start.starting import Started, start_engine
from worker.status import Status

CONFIG = EngineConfig(model_path=Path(NAME), device="cpu", max_sessions=1, euler_steps=1)


def start(root: Path, cache_dir: Path) -> Started:
    assets = root / "assets"
    files = {"video": assets / "warmup.mp4", "ref_audio": assets / "ref_audio" / "default.wav", "cache_dir": cache_dir}
    return start_engine(CONFIG, **files, max_units=1, status=Status(), targets={})


def test_a_cached_model_starts(root: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_cache(use_cache(tmp_path / "hub", monkeypatch), tiny)
    started = start(root, tmp_path)
    try:
        assert started.engine.parts.vocoder is not None and len(started.warm_up.decisions) > 0
    finally:
        started.engine.close()


def test_unavailable_model_ends_the_start(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path / "hub", monkeypatch)
    with pytest.raises(CheckpointError, match=f"model {NAME}: expected a folder or a model id"):
        start(root, tmp_path)
