"""Model ids of the Hugging Face hub: which paths are ids, the cache, downloads, and errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.errors import CheckpointError
from tests.worker.assembly.fake_hub import COMMIT, NAME, fill_cache, hub, use_cache
from worker.assembly.hub import cached, download, with_local_checkpoint
from worker.config.hub_id import hub_id
from worker.config.session import EngineConfig

FILES = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
    "model.safetensors.index.json": b"[]",
    "tokenizer.json": b"{}",
    "assets/token2wav/flow.pt": b"flow",
    "pytorch_model.bin": b"the same weights again",
    "README.md": b"# words",
}
READ = sorted(set(FILES) - {"pytorch_model.bin", "README.md"})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, without a token and without network."""
    return use_cache(tmp_path / "hub", monkeypatch)


@pytest.fixture
def online(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(cache, monkeypatch, offline=False)


def serve_from(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )


def test_a_relative_path_of_two_parts_is_an_id(tmp_path: Path) -> None:
    assert hub_id("openbmb/MiniCPM-o-4_5", tmp_path) == hub_id(Path("openbmb/MiniCPM-o-4_5"), tmp_path)
    assert hub_id("openbmb/MiniCPM-o-4_5", tmp_path) == "openbmb/MiniCPM-o-4_5"
    (tmp_path / "openbmb" / "MiniCPM-o-4_5").mkdir(parents=True)
    assert hub_id("openbmb/MiniCPM-o-4_5", tmp_path) is None, "expected an existing folder to be a folder"


@pytest.mark.parametrize("path", ["/openbmb/m", "m", "a/b/c", "./a/b", "../b", "~/b", "a/", "", "a/../b", "a b/c"])
def test_other_paths_are_no_ids(path: str, tmp_path: Path) -> None:
    assert hub_id(path, tmp_path) is None


def test_a_folder_is_used_as_it_is(tiny: Path, cache: Path) -> None:
    for path in (tiny, cache / "missing"):
        config = EngineConfig(model_path=path)
        assert with_local_checkpoint(config) is config


def test_an_id_in_the_cache_becomes_its_snapshot(tiny: Path, cache: Path) -> None:
    snapshot = fill_cache(cache, tiny)
    assert cached(NAME) == snapshot
    lines: list[str] = []
    config = with_local_checkpoint(EngineConfig(model_path=Path(NAME)), lines.append)
    assert config.model_path == snapshot and config.token2wav_folder == snapshot / "assets" / "token2wav"
    assert lines == [f"files of {NAME} from the Hugging Face cache"]


def test_offline_without_the_model_names_the_remedies(cache: Path) -> None:
    for find in (cached, download):
        with pytest.raises(CheckpointError) as caught:
            find(NAME)
        text = str(caught.value)
        assert text.startswith(f"model {NAME}: expected a folder or a model id of the Hugging Face hub, got neither"), (
            text
        )
        assert "HF_HUB_OFFLINE" in text and str(cache) in text and "model.model_path" in text, text


def test_a_model_not_in_the_cache_is_no_error_while_online(online: Path) -> None:
    assert cached(NAME) is None


def test_an_interrupted_download_is_not_taken_from_the_cache(online: Path, tmp_path: Path) -> None:
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    files = {"config.json": b"{}", "model.safetensors.index.json": index, "model-00001-of-00002.safetensors": b"1"}
    folder = tmp_path / "partial"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    fill_cache(online, folder)
    assert cached(NAME) is None, "expected a download of the second weight file"


def test_no_connection_names_the_remedies(online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_from("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(CheckpointError, match=r"got no connection to the hub \(.*\); .*model\.model_path"):
        download(NAME)


def test_downloads_only_what_is_read(online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(FILES) as (address, requested):
        serve_from(address, monkeypatch)
        folder = download(NAME)
        assert folder.name == COMMIT and sorted(requested) == READ
        assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()) == READ
        assert (folder / "assets/token2wav/flow.pt").read_bytes() == b"flow"
        assert download(NAME) == folder and sorted(requested) == READ, "expected no second download"
    assert download(NAME) == folder, "expected the cache to be enough without a connection"


def test_an_unknown_id_is_named(online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(FILES) as (address, _):
        serve_from(address, monkeypatch)
        with pytest.raises(CheckpointError, match=r"model someone/else: expected .*, got no such model: check"):
            download("someone/else")


def test_an_id_that_the_hub_cannot_have(online: Path) -> None:
    for find in (cached, download):
        with pytest.raises(CheckpointError, match=r"model a--b/c: expected .*, got HFValidationError: "):
            find("a--b/c")


def test_processes_that_start_at_once_download_each_file_once(tmp_path: Path) -> None:
    program = "import sys; from worker.assembly.hub import download; print(download(sys.argv[1]))"
    with hub(FILES) as (address, requested):
        environ = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", program, NAME]
        running = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        folders = {one.communicate(timeout=120)[0].strip() for one in running}
    assert len(folders) == 1 and Path(folders.pop()).name == COMMIT
    assert sorted(requested) == READ
