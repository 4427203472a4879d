"""The doctor on a model id of the Hugging Face hub: in the cache, to be downloaded, and unavailable."""

import json
from pathlib import Path

import pytest

from models.checkpoint.checksums import INDEX
from models.quantize import quantize_folder
from tests.worker.assembly.fake_hub import NAME, fill_cache, use_cache
from tests.worker.doctor.machines import NOTE, OK, PROBLEM, check
from worker.doctor.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """This machine, with a model id in the settings."""
    (tmp_path / "config.json").write_text(f'{{"model": {{"model_path": "{NAME}", "device": "cpu"}}}}')
    return Machine(tmp_path / "config.json", {})


def test_a_cached_model_is_examined(
    machine: Machine, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = fill_cache(use_cache(tmp_path / "hub", monkeypatch), tiny)
    check("model", machine, OK, f"{NAME}: 2 files of ")
    check("tokenizer", machine, OK)
    check("vocoder", machine, OK, str(snapshot / "assets" / "token2wav"))
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    check("model", Machine(tmp_path / "config.json", {}), PROBLEM, "model-00002-of-00002.safetensors: No such file")


def test_files_that_are_not_downloaded_have_no_checksum(
    machine: Machine, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "int8"
    quantize_folder(tiny, folder)
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["files"]["README.md"] = {"bytes": 3, "sha256": "0"}
    (folder / INDEX).write_text(json.dumps(index))
    snapshot = fill_cache(use_cache(tmp_path / "hub", monkeypatch), folder)
    check("checksums", machine, OK, "files equal their checksums")
    (snapshot / "vocab.json").unlink()
    check("checksums", Machine(tmp_path / "config.json", {}), PROBLEM, "vocab.json: expected", "got no such file")


def test_a_model_to_be_downloaded_is_a_note(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(tmp_path / "hub", monkeypatch, offline=False)
    for name in ("model", "tokenizer", "vocoder", "memory"):
        check(name, machine, NOTE, f"not checked: {NAME} is not in the Hugging Face cache")


def test_offline_without_the_model_is_a_problem(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache(tmp_path / "hub", monkeypatch)
    check(
        "model", machine, PROBLEM, f"model {NAME}: expected a folder", ")\n-> unset it, or download it where there is"
    )
    for name in ("tokenizer", "vocoder"):
        check(name, machine, NOTE, "HF_HUB_OFFLINE is set")
