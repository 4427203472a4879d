"""The loader of vocoder folders: strict checks, complete error messages, and all published name formats."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from assets.onnx_writer import write_onnx
from models.checkpoint.precision import Precision
from models.errors import CheckpointError, ConfigError, SettingsError
from models.token2wav.load.onnx_container import read_onnx
from models.token2wav.load.parts import (
    FLOW,
    FLOW_YAML,
    HIFT,
    HIFT_ORIGINAL,
    SPEAKER_ENCODER,
    SPEECH_TOKENIZER,
    hift_config_of,
    load_flow_and_hift,
    load_token2wav,
    load_voice_parts,
)

FILES = (FLOW_YAML, FLOW, HIFT, SPEAKER_ENCODER, SPEECH_TOKENIZER)
WeightsIn = dict[str, Tensor]


@pytest.fixture(scope="module")
def source(tiny: Path) -> Path:
    return tiny / "assets/token2wav"


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(source / name, tmp_path)
    return tmp_path


def rewrite(path: Path, change: Callable[[WeightsIn], WeightsIn | None]) -> None:
    tensors = dict(torch.load(path, weights_only=True))
    torch.save(change(tensors) or tensors, path)


def rewrite_onnx(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    graph = read_onnx(path)
    arrays = {name: np.array(array) for name, array in graph.initializers.items()}
    change(arrays)
    write_onnx(path, graph.nodes, arrays)


def error_of(load: Callable[[Path], object], folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def assert_same(got: nn.Module, expected: nn.Module) -> None:
    a, b = got.state_dict(), expected.state_dict()
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"expected equal tensors, got differences in {different}"


def test_loads_a_whole_folder(source: Path) -> None:
    parts = load_token2wav(source)
    assert parts.config == parts.flow.config
    for module in (parts.flow, parts.hift, parts.speaker_encoder, parts.speech_tokenizer):
        assert not module.training
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            assert not tensor.is_meta, f"expected data, got none for {name}"
            assert not tensor.requires_grad
    stored = torch.load(source / FLOW, weights_only=True)
    got = parts.flow.state_dict()
    assert got.keys() == stored.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in stored.items())
    assert parts.speech_tokenizer.config.first_norm_eps == 1e-6, "expected the file's own"


def test_parts_loaded_separately_equal_the_whole_folder(source: Path) -> None:
    parts, sound, voice = load_token2wav(source), load_flow_and_hift(source), load_voice_parts(source)
    assert_same(sound.flow, parts.flow)
    assert_same(sound.hift, parts.hift)
    assert_same(voice.speaker_encoder, parts.speaker_encoder)
    assert_same(voice.speech_tokenizer, parts.speech_tokenizer)


def test_parts_need_only_their_files(folder: Path) -> None:
    elsewhere = folder / "voice"
    elsewhere.mkdir()
    for name in (SPEAKER_ENCODER, SPEECH_TOKENIZER):
        (folder / name).rename(elsewhere / name)
    load_flow_and_hift(folder)
    load_voice_parts(elsewhere)
    message = error_of(load_token2wav, folder)
    assert message.endswith(f"got no {SPEAKER_ENCODER}, no {SPEECH_TOKENIZER}")


def test_lists_all_missing_files(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        assert error_of(load_token2wav, place).endswith("got " + ", ".join(f"no {name}" for name in FILES))
        assert error_of(load_flow_and_hift, place).endswith("got " + ", ".join(f"no {name}" for name in FILES[:3]))


def test_weight_norm_equals_torch(source: Path) -> None:
    stored = torch.load(source / HIFT, weights_only=True)
    hift = load_flow_and_hift(source).hift
    n_folded = 0
    for name, module in hift.named_modules():
        key = f"{name}.parametrizations.weight.original"
        if f"{key}0" not in stored:
            continue
        n_folded += 1
        shape = stored[f"{key}1"].shape
        plain = nn.ConvTranspose1d(*shape) if name.startswith("ups.") else nn.Conv1d(shape[1], shape[0], shape[2])
        normed = nn.utils.parametrizations.weight_norm(plain)
        with torch.no_grad():
            normed.parametrizations.weight.original0.copy_(stored[f"{key}0"])
            normed.parametrizations.weight.original1.copy_(stored[f"{key}1"])
        difference = (module.weight - normed.weight).abs().max()
        assert difference < 1e-6, f"{name}: expected under 1e-6, got {difference}"
    assert n_folded == 82


@pytest.mark.parametrize("prefix", ["", "generator."])
@pytest.mark.parametrize("name_format", ["parametrizations", "legacy", "folded"])
def test_name_formats_of_hift(source: Path, folder: Path, prefix: str, name_format: str) -> None:
    expected = load_flow_and_hift(source).hift

    def rename(tensors: WeightsIn) -> WeightsIn:
        if name_format == "folded":
            tensors = dict(expected.state_dict())
        if name_format == "legacy":
            for i, kind in enumerate("gv"):
                key = f".parametrizations.weight.original{i}"
                tensors = {name.replace(key, f".weight_{kind}"): tensor for name, tensor in tensors.items()}
        return {prefix + name: tensor for name, tensor in tensors.items()}

    rewrite(folder / HIFT, rename)
    assert_same(load_flow_and_hift(folder).hift, expected)


def test_newer_layout(source: Path, folder: Path) -> None:
    (folder / HIFT).rename(folder / HIFT_ORIGINAL)
    (folder / HIFT).write_bytes(b"a vocoder of another design")
    assert_same(load_flow_and_hift(folder).hift, load_flow_and_hift(source).hift)
    (folder / HIFT_ORIGINAL).write_bytes(b"damaged")
    assert HIFT_ORIGINAL in error_of(load_flow_and_hift, folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loads_in_each_dtype(source: Path, dtype: torch.dtype) -> None:
    parts = load_token2wav(source, dtype=dtype)
    assert {p.dtype for p in parts.flow.parameters()} == {dtype}
    for module in (parts.hift, parts.speaker_encoder, parts.speech_tokenizer):
        assert {p.dtype for p in module.parameters()} == {torch.float32}
    parts = load_token2wav(source, hift_dtype=dtype)
    assert {p.dtype for p in parts.flow.parameters()} == {torch.float32}
    assert parts.hift.conv_pre.weight.dtype == dtype
    assert {p.dtype for p in parts.hift.f0_predictor.parameters()} == {torch.float32}


def test_refuses_integer_dtypes(source: Path) -> None:
    for name in ("dtype", "hift_dtype"):
        with pytest.raises(SettingsError, match=f"^{name}"):
            load_flow_and_hift(source, **{name: torch.int64})


def test_loads_half_precision_files(source: Path, folder: Path) -> None:
    rewrite(folder / FLOW, lambda tensors: {name: tensor.half() for name, tensor in tensors.items()})
    flow, expected = load_flow_and_hift(folder).flow, load_flow_and_hift(source).flow
    assert torch.equal(flow.encoder_proj.weight, expected.encoder_proj.weight.half().float())


def test_lists_every_difference_of_both_files(folder: Path) -> None:
    def break_flow(tensors: WeightsIn) -> None:
        del tensors["encoder_proj.bias"], tensors["decoder.estimator.in_proj.weight"]
        tensors["encoder.more"] = torch.zeros(3)
        tensors["encoder.after_norm.weight"] = torch.zeros(7)

    def break_hift(tensors: WeightsIn) -> None:
        del tensors["source_downs.1.bias"]
        tensors["discriminator.weight"] = torch.zeros(2, 2)
        tensors["ups.0.parametrizations.weight.original1"] = torch.ones(32, 16, 15)

    rewrite(folder / FLOW, break_flow)
    rewrite(folder / HIFT, break_hift)
    message = error_of(load_flow_and_hift, folder)
    for part in (
        f"missing in {FLOW} (2):",
        "\n  encoder_proj.bias [80]",
        "\n  decoder.estimator.in_proj.weight [32, 320]",
        f"unexpected in {FLOW} (1):\n  encoder.more [3]",
        f"wrong shape in {FLOW} (1):\n  encoder.after_norm.weight: expected [32], got [7]",
        f"missing in {HIFT} (1):\n  source_downs.1.bias [8]",
        f"unexpected in {HIFT} (1):\n  discriminator.weight [2, 2]",
        f"wrong shape in {HIFT} (1):\n  ups.0.weight: expected [32, 16, 16], got [32, 16, 15]",
    ):
        assert part in message, f"expected {part!r}, got {message}"


def test_lists_every_difference_of_voice_files(folder: Path) -> None:
    def break_speaker(arrays: dict[str, np.ndarray]) -> None:
        del arrays["xvector.block3.tdnnd16.cam_layer.linear2.bias"]
        name = "xvector.transit1.linear.weight"
        arrays[name] = arrays[name][:, 1:]
        arrays["xvector.more.weight"] = np.zeros(2, np.float32)

    def break_tokenizer(arrays: dict[str, np.ndarray]) -> None:
        del arrays["blocks.1.attn.fsmn_block.weight"]
        arrays["quantizer.project_in.bias"] = np.zeros(9, np.float32)

    rewrite_onnx(folder / SPEAKER_ENCODER, break_speaker)
    rewrite_onnx(folder / SPEECH_TOKENIZER, break_tokenizer)
    message = error_of(load_voice_parts, folder)
    for part in (
        f"missing in {SPEAKER_ENCODER} (1):\n  xvector.block3.tdnnd16.cam_layer.linear2.bias [4]",
        f"wrong shape in {SPEAKER_ENCODER} (1):",
        "\n  xvector.transit1.linear.weight: expected [28, 56, 1], got [28, 55, 1]",
        f"unexpected in {SPEAKER_ENCODER} (1):\n  xvector.more.weight [2]",
        f"missing in {SPEECH_TOKENIZER} (1):\n  encoder.blocks.1.attn.fsmn_block.weight [64, 1, 31]",
        "quantizer._codebook.project_down.bias: expected [8], got [9]",
    ):
        assert part in message, f"expected {part!r}, got {message}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_tensors_that_are_not_finite(folder: Path, value: float) -> None:
    def insert_value(tensors: WeightsIn) -> None:
        tensors["encoder_proj.bias"][3] = value
        tensors["encoder.after_norm.weight"][0] = value

    rewrite(folder / FLOW, insert_value)
    rewrite(folder / HIFT, lambda tensors: tensors | {"conv_post.bias": torch.full((18,), value)})
    message = error_of(load_flow_and_hift, folder)
    assert f"not finite in {FLOW} (2):\n  encoder.after_norm.weight" in message
    assert f"not finite in {HIFT} (1):\n  conv_post.bias" in message


def test_refuses_quantised_layers_that_are_not_finite(folder: Path) -> None:
    name = "decoder.estimator.blocks.0.mlp.fc1.weight"
    rewrite(folder / FLOW, lambda tensors: tensors | {name: tensors[name] / 0})
    with pytest.raises(CheckpointError, match=rf"not finite in {FLOW} \(1\):\n  {name}"):
        load_flow_and_hift(folder, precision=Precision(flow="int8"))


def test_refuses_values_too_large_for_the_dtype(folder: Path) -> None:
    rewrite(folder / FLOW, lambda tensors: tensors | {"encoder_proj.bias": torch.full((80,), 1e6)})
    load_flow_and_hift(folder, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"encoder_proj\.bias as torch\.float16"):
        load_flow_and_hift(folder, dtype=torch.float16)


def test_refuses_a_negative_variance(folder: Path) -> None:
    name = "xvector.block1.tdnnd1.nonlinear1.batchnorm"
    rewrite_onnx(folder / SPEAKER_ENCODER, lambda arrays: arrays[f"{name}.running_var"].fill(-1))
    assert f"{name}.weight as torch.float32" in error_of(load_voice_parts, folder)


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
def test_refuses_truncated_files(folder: Path, name: str, kept: float) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * kept)])
    assert str(folder / name) in error_of(load_token2wav, folder)


def test_refuses_an_invalid_yaml(folder: Path) -> None:
    (folder / FLOW_YAML).write_text("flow: 3")
    with pytest.raises(ConfigError, match=FLOW_YAML):
        load_token2wav(folder)


def test_refuses_half_of_a_weight_norm_pair(folder: Path) -> None:
    gone = "conv_post.parametrizations.weight.original0"
    rewrite(folder / HIFT, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != gone})
    assert str(folder / HIFT) in error_of(load_flow_and_hift, folder)
    assert "conv_post" in error_of(load_flow_and_hift, folder)


def test_refuses_names_with_and_without_prefix(folder: Path) -> None:
    rewrite(folder / HIFT, lambda tensors: tensors | {"generator.conv_post.bias": tensors["conv_post.bias"]})
    assert "conv_post.bias: expected once, got with and without generator." in error_of(load_flow_and_hift, folder)


def test_refuses_missing_size_tensors(folder: Path) -> None:
    rewrite(folder / HIFT, lambda tensors: {name: t for name, t in tensors.items() if not name.startswith("conv_pre")})
    assert "conv_pre.weight: expected a kernel [out, in, taps] with values, got nothing" in error_of(
        load_flow_and_hift, folder
    )


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("conv_pre.weight", (0, 80, 7)),
        ("conv_pre.weight", (8, 0, 7)),
        ("f0_predictor.condnet.0.weight", (0, 80, 3)),
    ],
)
def test_refuses_impossible_sizes(name: str, shape: tuple[int, ...]) -> None:
    tensors = {"conv_pre.weight": torch.ones(8, 80, 7), "f0_predictor.condnet.0.weight": torch.ones(8, 80, 3)}
    with pytest.raises(CheckpointError) as caught:
        hift_config_of(tensors | {name: torch.ones(shape)}, "hift.pt")
    assert f"hift.pt: {name}: expected a kernel" in str(caught.value) and str(list(shape)) in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [Tensor.to_sparse, Tensor.to_sparse_csr, lambda tensor: torch.nested.nested_tensor([tensor, tensor[:3]])],
    ids=["coo", "csr", "nested"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
def test_refuses_tensors_that_are_not_dense(folder: Path, make: Callable[[Tensor], Tensor]) -> None:
    odd = make(torch.eye(80))
    for file in (FLOW, HIFT):
        kept = (folder / file).read_bytes()
        rewrite(folder / file, lambda tensors: tensors | {"odd.weight": odd})
        message = error_of(load_flow_and_hift, folder)
        assert file in message and "odd.weight: a tensor that is not dense" in message, message
        (folder / file).write_bytes(kept)


def test_refuses_files_of_different_models(folder: Path) -> None:
    def narrow(tensors: WeightsIn) -> None:
        for name in ("conv_pre", "f0_predictor.condnet.0"):
            key = f"{name}.parametrizations.weight.original1"
            tensors[key] = tensors[key][:, :60].clone()

    rewrite(folder / HIFT, narrow)
    assert "mel bins: expected 80 as in flow.yaml, got 60" in error_of(load_flow_and_hift, folder)


def test_refuses_a_speaker_vector_of_another_size(folder: Path) -> None:
    text = (folder / FLOW_YAML).read_text().replace("spk_embed_dim: 24", "spk_embed_dim: 23")
    (folder / FLOW_YAML).write_text(text)
    name = "spk_embed_affine_layer.weight"
    rewrite(folder / FLOW, lambda tensors: tensors | {name: tensors[name][:, :23].clone()})
    load_flow_and_hift(folder)
    assert "speaker vector: expected 23 values, got 24" in error_of(load_token2wav, folder)


def test_refuses_the_graph_of_another_network(folder: Path) -> None:
    for a, b in ((SPEAKER_ENCODER, SPEECH_TOKENIZER), (SPEECH_TOKENIZER, SPEAKER_ENCODER)):
        content = (folder / a).read_bytes()
        (folder / a).write_bytes((folder / b).read_bytes())
        assert str(folder / a) in error_of(load_voice_parts, folder)
        (folder / a).write_bytes(content)
    load_voice_parts(folder)
