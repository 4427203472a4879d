"""`python -m models.quantize`: int8 folders load strictly and nearly equal their source."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint.checksums import INDEX
from models.checkpoint.files import list_tensors
from models.checkpoint.packing import SCALE, ZEROS
from models.checkpoint.precision import PRESETS, Kind, Precision, Weights
from models.checkpoint.quantized import quantize
from models.errors import CheckpointError, SettingsError
from models.layers.quantized import QuantizedLinear
from models.load import load_model
from models.quantize import check_files, files_in, main, quantize_folder
from models.token2wav.load import parts
from models.token2wav.load.parts import FLOW, HIFT, load_flow_and_hift, load_token2wav

NAME = "llm.model.layers.0.mlp.up_proj.weight"
VOCODER = Path("assets/token2wav")


@pytest.fixture(scope="module")
def int8(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int8") / "tiny"
    quantize_folder(tiny, out, keep=["resampler."], shard_bytes=1_000_000)
    return out


@pytest.fixture
def copy(int8: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(int8, tmp_path / "copy"))


def change_shard(folder: Path, change: Callable[[dict[str, Tensor]], None], name: str = NAME) -> None:
    """Change the tensors of the file that has `name`, and list its tensors in the index."""
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"][name]
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
    index["weight_map"] = {key: where for key, where in index["weight_map"].items() if where != file}
    index["weight_map"] |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps(index))


def change_metadata(folder: Path, **changes: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["metadata"] = {key: one for key, one in (index["metadata"] | changes).items() if one is not None}
    (folder / INDEX).write_text(json.dumps(index))


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_are_the_rounded_ones(tiny: Path, int8: Path, dtype: torch.dtype) -> None:
    source, got = (load_model(folder, dtype=dtype).state_dict() for folder in (tiny, int8))
    plain = load_model(tiny).state_dict()
    stored, problems = list_tensors(int8)
    assert not problems and {one.name for one in stored} == source.keys()
    matrices = [one.name for one in stored if one.parts]
    assert NAME in matrices and len(matrices) > 40
    assert not [name for name in matrices if name.startswith("resampler.")], "expected kept floats"
    for name, tensor in got.items():
        expected = quantize(plain[name]).dequantized().to(tensor.dtype) if name in matrices else source[name]
        assert torch.equal(tensor, expected), f"{name}: max diff {(tensor - expected).abs().max()}"


def test_hidden_states_stay_close(tiny: Path, int8: Path) -> None:
    models = [load_model(folder) for folder in (tiny, int8)]
    ids = torch.arange(20, 44)[None]
    with torch.no_grad():
        outputs = [model.llm.lm_head(model.llm.model.embed_tokens(ids)) for model in models]
    error = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert 0 < error < 0.02, f"expected a relative error below 0.02, got {error}"


def test_vocoder_is_rounded_and_its_pitch_is_not(tiny: Path, int8: Path) -> None:
    source, got = (load_token2wav(folder / VOCODER) for folder in (tiny, int8))
    for expected, module in ((source.flow, got.flow), (source.hift, got.hift)):
        weights = expected.state_dict()
        for name, tensor in module.state_dict().items():
            error = (tensor - weights[name]).norm() / weights[name].norm().clamp_min(1e-9)
            assert error < 0.02, f"{name}: expected a relative error below 0.02, got {error}"
    pitch = source.hift.f0_predictor.state_dict()
    assert all(torch.equal(tensor, pitch[name]) for name, tensor in got.hift.f0_predictor.state_dict().items())
    assert torch.load(int8 / VOCODER / HIFT, weights_only=True)["quantization"] == {"format": "int8", "version": 1}
    assert not torch.equal(source.flow.input_embedding.weight, got.flow.input_embedding.weight)


def test_stored_matrices_of_the_flow_are_used_as_they_are(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torch.load(int8 / VOCODER / FLOW, weights_only=True)["state_dict"]
    as_fp8 = load_flow_and_hift(int8 / VOCODER, precision=Precision(flow="fp8")).flow
    monkeypatch.setattr(parts, "quantize", None)
    flow = load_flow_and_hift(int8 / VOCODER, precision=Precision(flow="int8")).flow
    layers = {name: one for name, one in flow.named_modules() if isinstance(one, QuantizedLinear)}
    assert len(layers) == 36, "expected all layers of the encoder's and the estimator's blocks"
    for name, layer in layers.items():
        assert torch.equal(layer.weight.values, stored[f"{name}.weight"]), name
        assert torch.equal(layer.weight.scale, stored[f"{name}.weight{SCALE}"]), name
        other = as_fp8.get_submodule(name)
        assert isinstance(other, QuantizedLinear) and other.kind == "fp8"
        exact = layer.weight.dequantized()
        assert (other.weight.dequantized() - exact).norm() < 0.05 * exact.norm(), name


def test_size_and_checksums(tiny: Path, int8: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = list(int8.glob("*.safetensors"))
    assert len(shards) > 1 and max(file.stat().st_size for file in shards) < 1_100_000
    assert main([str(int8), "--check"]) == 0
    with (copy / VOCODER / HIFT).open("r+b") as file:
        file.seek(5000)
        file.write(b"\x01\x02\x03")
    (copy / "vocab.json").write_text("{}")
    (copy / "merges.txt").unlink()
    shutil.copy(shards[0], copy / "other.safetensors")
    assert main([str(copy), "--check"]) == 2
    error = capsys.readouterr().err
    for expected in (
        f"{VOCODER}/hift.pt: expected {{'bytes'",
        "vocab.json: expected {'bytes'",
        "got {'bytes': 2};",
        "got no such file;",
        "other.safetensors: expected no shard that the index does not list",
    ):
        assert expected in error, f"expected {expected}, got {error}"


def test_files_that_the_index_does_not_list_are_ignored(copy: Path) -> None:
    n_files = check_files(copy)
    (copy / ".cache" / "huggingface").mkdir(parents=True)
    for name in ("README.md", ".cache/huggingface/x.metadata", "assets/notes.txt", "._model-00001.safetensors"):
        (copy / name).write_text("x")
    assert main([str(copy), "--check"]) == 0 and check_files(copy) == n_files
    assert check_files(copy, ["vocab.json", "assets/*.pt"]) == 3


def test_hidden_files_are_not_copied(tiny: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny, tmp_path / "source")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("x")
    quantize_folder(source, tmp_path / "out")
    assert not (tmp_path / "out" / ".git").exists()
    assert check_files(tmp_path / "out") == len(list(files_in(tmp_path / "out"))) - 1


@pytest.mark.parametrize("files", [None, {}, [], {"merges.txt": "x"}])
def test_an_index_without_checksums_fails_the_check(
    copy: Path, files: object, capsys: pytest.CaptureFixture[str]
) -> None:
    change_metadata(copy, files=files)
    assert main([str(copy), "--check"]) == 2
    assert "which python -m models.quantize SRC DST writes" in (error := capsys.readouterr().err), error


@pytest.mark.parametrize("metadata", ["quantization", 5, ["quantization"]])
def test_metadata_that_is_no_object_is_refused(copy: Path, metadata: object) -> None:
    index = json.loads((copy / INDEX).read_text()) | {"metadata": metadata}
    (copy / INDEX).write_text(json.dumps(index))
    expected = f"and an object as metadata if there is any, got TypeError: metadata {metadata!r}"
    assert expected in (got := error_of(copy)), f"expected {expected}, got {got}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(NAME + SCALE), rf"{NAME}{SCALE}: expected F32 [192] beside int8 values, got nothing"),
        (lambda t: t.update({NAME + SCALE: torch.ones(7)}), "expected F32 [192] beside int8 values, got F32 [7]"),
        (lambda t: t.update({NAME + SCALE: torch.ones(192).half()}), "got F16 [192]"),
        (lambda t: t[NAME + SCALE].fill_(torch.inf), f"{NAME}{SCALE}: expected finite scales that are not negative"),
        (lambda t: t.update({NAME: t[NAME][:, :5].contiguous()}), f"{NAME}: expected [192, 128], got [192, 5]"),
        (lambda t: t.update({NAME: t[NAME].to(torch.int16)}), f"{NAME}: expected one of"),
        (lambda t: t.update({"llm.odd.scale": torch.ones(1)}), "unexpected (1):\n  llm.odd.scale [1]"),
    ],
)
def test_shards_that_do_not_fit_are_refused(
    copy: Path, change: Callable[[dict[str, Tensor]], None], expected: str
) -> None:
    change_shard(copy, change)
    assert expected in (got := error_of(copy)), f"expected {expected}, got {got}"


@pytest.mark.parametrize(
    "declared",
    [{"format": "int8", "version": 2}, {"format": "fp4", "version": 1}, {"format": "int8"}, "int8", []],
)
def test_unknown_declarations_are_refused(copy: Path, declared: object) -> None:
    change_metadata(copy, quantization=declared)
    expected = f"quantization: expected {{'format': 'int8', 'version': 1}}, or format fp8 or int4, got {declared}"
    assert expected in error_of(copy)


def test_undeclared_int8_is_refused(copy: Path) -> None:
    change_metadata(copy, quantization=None)
    message = error_of(copy)
    assert f"{NAME}: expected one of ['BF16', 'F16', 'F32', 'F64'], got I8" in message
    assert f"{NAME}{SCALE} [192]" in message


def test_an_unfinished_folder_does_not_load(copy: Path) -> None:
    (copy / INDEX).unlink()
    assert f"expected {INDEX} or model.safetensors, got neither" in error_of(copy)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (lambda int8, tmp: [str(int8), str(tmp / "again")], "expected a checkpoint of floats"),
        (lambda int8, tmp: [str(tmp / "none"), str(tmp / "out")], "no such file"),
        (lambda int8, tmp: [str(int8.parents[1]), "--check"], "expected checksums of the folder's files"),
    ],
)
def test_command_names_what_is_wrong(
    int8: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: Callable[[Path, Path], list[str]],
    expected: str,
) -> None:
    assert main(arguments(int8, tmp_path)) == 2
    assert expected in (got := capsys.readouterr().err), f"expected {expected}, got {got}"


def test_result_must_be_empty(tiny: Path, copy: Path) -> None:
    with pytest.raises(CheckpointError, match="expected an empty folder or none, got a folder with files"):
        quantize_folder(tiny, copy)


@pytest.mark.parametrize("place", ["inside", "around", "same", "linked"])
def test_result_must_not_overlap_the_source(tiny: Path, tmp_path: Path, place: str) -> None:
    source = shutil.copytree(tiny, tmp_path / "folder" / "source")
    (tmp_path / "link").symlink_to(source)
    before = sorted(tmp_path.rglob("*"))
    folders = {"inside": source / "int8", "around": tmp_path, "same": source, "linked": tmp_path / "link" / "int8"}
    with pytest.raises(CheckpointError, match=f"expected a folder neither in {source} nor around it, got"):
        quantize_folder(source, folders[place])
    assert sorted(tmp_path.rglob("*")) == before, "expected nothing written"


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("int8", {"shard_bytes": 0}, "shard_bytes: expected at least 1, got 0"),
        ("int8", {"shard_bytes": -1}, "shard_bytes: expected at least 1, got -1"),
        (
            "int8",
            {"keep": ["llm.", "resampla."]},
            "keep: expected prefixes of tensors' names, got resampla., which",
        ),
        ("fp8", {"keep": ["decoder."]}, "got decoder., which none has"),
    ],
)
def test_settings_without_meaning_are_refused(
    tiny: Path, tmp_path: Path, kind: Kind, given: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        quantize_folder(tiny, tmp_path / "out", kind, **given)
    assert expected in str(caught.value) and not (tmp_path / "out").exists(), caught.value


def test_prefixes_of_the_vocoder_are_kept(tiny: Path, tmp_path: Path) -> None:
    quantize_folder(tiny, tmp_path / "out", keep=["decoder."])
    stored = torch.load(tmp_path / "out" / VOCODER / "flow.pt", weights_only=True)["state_dict"]
    assert not [name for name in stored if name.startswith("decoder.") and name.endswith(SCALE)]


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_a_source_with_nan_leaves_no_result(tiny: Path, tmp_path: Path, kind: Kind, exists: bool) -> None:
    source = shutil.copytree(tiny, tmp_path / "source")
    name = NAME.replace("up_proj", "down_proj")
    for file in files_in(source):
        file.chmod(0o644)
    change_shard(source, lambda tensors: tensors[name][3].fill_(torch.nan), name)
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    with pytest.raises(CheckpointError, match=f"{name} to store as {kind}: expected finite values, got NaN"):
        quantize_folder(source, out, kind)
    assert out.exists() is exists and not list(out.glob("*")), "expected the result as it was before"
    with pytest.raises(CheckpointError, match=f"{name} to store as {kind}"):  # rounded while loading
        load_model(source, precision=PRESETS[kind])


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_nan_among_fp8_values_is_refused(tiny: Path, tmp_path: Path, bits: int, weights: Weights) -> None:
    quantize_folder(tiny, tmp_path / "out", "fp8")
    name = NAME.replace("up_proj", "down_proj")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8)[100, 7] = bits

    change_shard(tmp_path / "out", change, name)
    with pytest.raises(CheckpointError, match=f"{name}: expected finite fp8 values, got NaN"):
        load_model(tmp_path / "out", precision=PRESETS[weights])


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_folders_of_other_kinds_load_as_their_source(tiny: Path, tmp_path: Path, kind: Weights) -> None:
    folder = tmp_path / "out"
    assert main([str(tiny), str(folder), "--weights", kind]) == 0
    check_files(folder)
    for name in (VOCODER / "flow.pt", "config.json"):
        assert (folder / name).read_bytes() == (tiny / name).read_bytes(), f"{name}: expected it unchanged"
    parameters = [dict(load_model(one, precision=PRESETS[kind]).named_parameters()) for one in (tiny, folder)]
    assert parameters[0].keys() == parameters[1].keys()
    for name, tensor in parameters[0].items():
        assert tensor.dtype is parameters[1][name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), parameters[1][name].view(torch.uint8)), name
    name = NAME.replace("up_proj", "down_proj")  # the layers that are fp8 in the preset of that name
    plain = load_model(folder).state_dict()[name]
    assert torch.equal(plain, quantize(load_model(tiny).state_dict()[name], kind).dequantized())
    if kind == "int4":
        change_shard(folder, lambda tensors: tensors.pop(NAME + ZEROS))
        message = error_of(folder)
        assert f"{NAME}{ZEROS}: expected U8 [1, 192] beside int4 values, got nothing" in message, message
    change_metadata(folder, quantization={"format": "int8", "version": 1})
    assert f"{name}: expected one of" in error_of(folder)
