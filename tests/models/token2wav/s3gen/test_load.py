"""A checkpoint file to S3Gen: trained name formats, sizes from shapes, and one error with all differences."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.errors import CheckpointError, SettingsError
from models.layers.weights import on_meta
from models.token2wav.s3gen.load import load_s3gen
from models.token2wav.s3gen.model import S3Gen
from models.token2wav.settings import S3GenConfig
from tests.models.compare import assert_close
from tests.models.token2wav.s3gen import tiny_s3gen

TENSORS = tiny_s3gen.random_tensors(tiny_s3gen.config())
RELEASED = 263_911_541  # parameters, with weight norms and batch norms folded


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_loads_a_file_with_trained_names(tmp_path: Path, suffix: str) -> None:
    got = load_s3gen(save(tmp_path, tiny_s3gen.as_trained(TENSORS), suffix))
    assert got.config == tiny_s3gen.config()
    assert not got.training
    state = got.state_dict()
    assert state.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert_close(state[name], expected, 1e-6, name)
    speech_tokens, voice = torch.arange(9), tiny_s3gen.voice(5, 10)
    assert_close(got.sound(speech_tokens, voice), tiny_s3gen.make().sound(speech_tokens, voice), 1e-3, "sound")


def test_a_mixer_selects_the_mean_flow_variant(tmp_path: Path) -> None:
    settings = tiny_s3gen.config(meanflow=True)
    got = load_s3gen(save(tmp_path, tiny_s3gen.random_tensors(settings)))
    assert got.config == settings
    assert got.flow.meanflow


def test_dtype_applies_to_the_flow_only(tmp_path: Path) -> None:
    model = load_s3gen(save(tmp_path, TENSORS), dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        expected = torch.bfloat16 if name.startswith("flow.") else torch.float32
        assert tensor.dtype == expected, f"{name}: expected {expected}, got {tensor.dtype}"
    speech_tokens, voice = torch.arange(9), tiny_s3gen.voice(5, 10)
    noise = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    got, expected = (each.mel(speech_tokens, voice, noise=noise) for each in (model, tiny_s3gen.make()))
    assert got.dtype == torch.float32
    assert_close(got, expected, 0.1 * expected.abs().max().item(), "mel in bfloat16")


def test_lists_all_differences_in_one_error(tmp_path: Path) -> None:
    wrong = dict(TENSORS)
    del wrong["flow.encoder.after_norm.bias"], wrong["tokenizer.encoder.conv2.weight"]
    wrong["flow.decoder.estimator.final_block.block.0.bias"] = torch.zeros(3)
    wrong["vocoder.extra"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as caught:
        load_s3gen(save(tmp_path, wrong))
    for line in (
        "missing (2):\n  flow.encoder.after_norm.bias [16]\n  tokenizer.encoder.conv2.weight [64, 64, 3]",
        "unexpected (1):\n  vocoder.extra [2]",
        "wrong shape (1):\n  flow.decoder.estimator.final_block.block.0.bias: expected [8], got [3]",
    ):
        assert line in str(caught.value), f"expected {line!r}, got {caught.value}"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"flow.encoder_proj.bias": torch.zeros(10, dtype=torch.int64)}, r"no float tensor \(1\):\n  flow\.enc.*int64"),
        ({"flow.encoder_proj.bias": torch.full((10,), torch.inf)}, r"not finite \(1\):\n  flow\.encoder_proj\.bias"),
        ({"flow.input_embedding.weight": None}, r"flow: .* got input_embedding\.weight \[\]"),
        ({"flow.input_embedding.weight": torch.zeros(40, 15)}, "even width that 2 heads divide, got 15"),
        ({"mel2wav.conv_pre.weight": torch.zeros(8, 12, 7)}, "mel bins of the vocoder: expected 10, got 12"),
        ({name: None for name in TENSORS if name.startswith("tokenizer.")}, r"absent part \(1\):\n  tokenizer\."),
    ],
)
def test_refuses_files_that_are_not_s3gen(tmp_path: Path, change: dict[str, Tensor | None], match: str) -> None:
    tensors = {name: tensor for name, tensor in (TENSORS | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=match):
        load_s3gen(save(tmp_path, tensors))


@pytest.mark.parametrize("name", ["s3gen.safetensors", "s3gen.pt"])
@pytest.mark.parametrize("content", [None, b"nothing of the kind"])
def test_refuses_unreadable_files(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_s3gen(path)


@pytest.mark.parametrize("content", [[1, 2], {1: torch.zeros(2)}])
def test_refuses_a_pt_file_of_another_kind(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "s3gen.pt")
    with pytest.raises(CheckpointError, match="a dict of named tensors, got"):
        load_s3gen(tmp_path / "s3gen.pt")


def test_refuses_integer_types(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="dtype"):
        load_s3gen(tmp_path, dtype=torch.int32)


def test_released_sizes_are_the_defaults() -> None:
    with on_meta():
        got = S3Gen(S3GenConfig()).state_dict()
    assert sum(tensor.numel() for tensor in got.values()) == RELEASED


def save(folder: Path, tensors: dict[str, Tensor], suffix: str = "safetensors") -> Path:
    path = folder / f"s3gen.{suffix}"
    if suffix == "pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return path
