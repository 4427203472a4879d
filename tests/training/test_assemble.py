"""The talker's checkpoint of all parts: below its size in int8, loaded and served like any other."""

import json
from pathlib import Path

import pytest
import torch

from models.checkpoint.checksums import INDEX, check_files
from models.checkpoint.config import parse_config
from models.errors import ModelError
from models.load import expected_tensors, load_model
from models.quantize import TOKEN2WAV, folder_bytes
from models.token2wav.load.parts import load_token2wav
from tests.worker.start.test_starting import CONFIG, start
from training.assemble.talker import Sources, assemble, main
from training.evaluate_vocoder import trained_networks
from training.loop import weights_file, write_weights
from training.talker.checkpoint import write_checkpoint
from training.talker.sizes import MAX_BYTES, talker_config

MAX_FILE_BYTES = 15_000_000


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Parts as training writes them: a mind whose weights are 1/32, speech of 1/16, one stage of the vocoder."""
    folder = tmp_path_factory.mktemp("parts")
    shapes = expected_tensors(parse_config(talker_config()))
    for part, value in (("mind", 1 / 32), ("speech", 1 / 16)):
        write_checkpoint(folder / part, {name: torch.full(shape, value) for name, shape in shapes.items()})
    hift = trained_networks(None)[1]
    assert hift.conv_pre.bias is not None
    torch.nn.init.constant_(hift.conv_pre.bias, 0.25)
    (folder / "vocoder").mkdir()
    write_weights(weights_file(folder / "vocoder", "hift"), hift.state_dict())
    return Sources(folder / "mind", folder / "speech", folder / "vocoder")


@pytest.fixture(scope="module")
def talker(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("assets") / "talker"
    return out, assemble(out, sources)


def test_every_part_comes_from_its_source(talker: tuple[Path, str], sources: Sources) -> None:
    folder, table = talker
    weights = load_model(folder).state_dict()
    assert (weights["llm.model.norm.weight"] == 1 / 32).all() and (weights["tts.model.norm.weight"] == 1 / 16).all()
    parts = load_token2wav(folder / TOKEN2WAV)
    assert parts.hift.conv_pre.bias is not None and (parts.hift.conv_pre.bias == 0.25).all()
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in table.splitlines()[2:]}
    expected = {"llm": str(sources.mind), "tts": str(sources.speech), "hift": str(sources.vocoder), "flow": "random"}
    assert {part: rows[part] for part in expected} == expected, table


def test_files_stay_below_their_limits(talker: tuple[Path, str]) -> None:
    folder, table = talker
    assert folder_bytes(folder) <= MAX_BYTES, table
    assert max(file.stat().st_size for file in folder.rglob("*")) <= MAX_FILE_BYTES
    assert f"| sum |  | {folder_bytes(folder) / 1e6:.2f} |" in table
    assert json.loads((folder / INDEX).read_text())["metadata"]["quantization"] == {"format": "int8", "version": 1}
    check_files(folder)


def test_the_talker_is_served(talker: tuple[Path, str], tmp_path: Path) -> None:
    started = start(tmp_path, CONFIG.model_copy(update={"model_path": talker[0]}))
    started.engine.close()
    assert started.warm_up.n_units == 1 and started.voices is not None


def test_a_folder_that_is_too_large_is_not_written(sources: Sources, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected at most 1,000,000, got 2") as caught:
        assemble(tmp_path / "talker", sources, max_bytes=1_000_000)
    assert f"| tts | {sources.speech} |" in str(caught.value)
    assert not list(tmp_path.iterdir()), "expected no file, got a rest"


def test_command_replaces_a_talker_and_nothing_else(
    sources: Sources, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "talker"
    out.mkdir()
    for name in ("config.json", INDEX):
        (out / name).write_text("{}")
    trained = ["--mind", str(sources.mind), "--speech", str(sources.speech), "--weights", str(sources.vocoder)]
    assert main(["--out", str(out), *trained]) == 0
    assert capsys.readouterr().out.startswith("| part | source | MB |")
    check_files(out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    assert main(["--out", str(tmp_path / "other"), *trained]) == 2
    assert "expected a checkpoint to replace, or no folder, got other files" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "t"), "--mind", str(tiny)]) == 2
    assert f"{tiny}: expected the talker's tensors, got others:" in capsys.readouterr().err
