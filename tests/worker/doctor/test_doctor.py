"""The doctor: the finding of each check for given facts; `test_torch_and_gpus` has those about torch and GPUs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from assets.build_tiny_speech import build
from models.checkpoint.checksums import INDEX, file_facts
from models.checkpoint.embedded import DEFAULT
from tests.worker.doctor.machines import (
    EAGER,
    NOTE,
    OK,
    ON_CPU,
    ON_GPU,
    PROBLEM,
    REAL_MODEL,
    check,
    compiling,
    machine,
    settings,
)
from worker.config.compile import CompileConfig
from worker.config.service import default_config
from worker.config.weights import PartWeights
from worker.doctor.__main__ import CHECKS, examine
from worker.doctor.checkpoint_facts import checkpoint_facts, compared_files
from worker.doctor.facts import FolderFacts, MediaFacts, ModelFacts, ProgramFacts, Requirement, TorchFacts, UnknownFact
from worker.doctor.findings import GIB, MIB, Finding, Level
from worker.doctor.machine import Machine


@pytest.mark.parametrize("torch", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("enabled", ["auto", True])
def test_a_healthy_machine_has_no_problem(torch: TorchFacts, enabled: bool | Literal["auto"]) -> None:
    config = settings(service={"compile": CompileConfig(enabled=enabled)})
    found = examine(machine(config, torch=torch, n_gpus=len(torch.gpus)))
    assert [one.name for one in found] == list(CHECKS)
    assert {one.level for one in found} == {OK}, [one for one in found if one.level is not OK]


@pytest.mark.parametrize(
    ("name", "facts", "level", "said"),
    [
        ("python", {"python": (3, 10, 9)}, PROBLEM, ["3.10.9", "Python 3.11 or newer"]),
        (
            "dependencies",
            {"requirements": [Requirement("a", ">=2", None), Requirement("b", ">=1,<2", "2.0")]},
            PROBLEM,
            ["a>=2 is not installed", "b 2.0 is not >=1,<2", "start_all.sh"],
        ),
        ("compiler", {"c_compiler": ProgramFacts(None)}, PROBLEM, ["no C compiler", "apt-get install gcc"]),
        ("compiler", {"torch": ON_CPU, "cpp_compiler": ProgramFacts(None)}, NOTE, ["no C++ compiler"]),
        ("ffmpeg", {"ffmpeg": ProgramFacts(None)}, PROBLEM, ["none", "apt-get install ffmpeg"]),
        ("ffmpeg", {"ffmpeg": ProgramFacts("/f", error="/f -version does not run")}, PROBLEM, ["does not run"]),
        ("ffmpeg", {}, OK, ["ffmpeg version 7.1 at /usr/bin/ffmpeg"]),
        (
            "ports",
            {"taken_ports": {8006: "Address already in use", 22401: "Permission denied"}},
            PROBLEM,
            ["8006: Address already in use\n22401: Permission denied", "service.worker_base_port"],
        ),
        (
            "ports",
            {"taken_ports": {8006: "Address already in use", 22401: "in use"}, "own_ports": frozenset({8006})},
            PROBLEM,
            ["22401: in use\n->"],
        ),
        (
            "ports",
            {"taken_ports": {8006: "in use", 22400: "in use"}, "own_ports": frozenset({8006, 22400})},
            OK,
            ["8006, 22400: Duologue is running there"],
        ),
        ("files", {"max_open_files": 1000}, NOTE, ["1000 open files", "ulimit -n"]),
        ("files", {"max_open_files": 255}, PROBLEM, ["255 open files"]),
        ("files", {"max_open_files": -1}, OK, ["no limit"]),
        ("model", {"model": ModelFacts(problems=("a: x", "b: y"))}, PROBLEM, ["a: x\nb: y", "model.model_path"]),
        (
            "checksums",
            {"checked_files": (9, "a: expected x, got y")},
            PROBLEM,
            ["a: expected x, got y", "models.quantize"],
        ),
        ("checksums", {"checked_files": (0, "")}, OK, ["the index has none; python -m models.quantize"]),
        ("tokenizer", {"tokenizer_error": "no <unit>"}, PROBLEM, ["no <unit>", "tokenizer.json"]),
        ("vocoder", {"vocoder_files": {}}, NOTE, ["replies have no speech", "model.token2wav_path"]),
        (
            "vocoder",
            {"vocoder_files": {"flow.yaml": 1, "flow.pt": 0, "hift.pt": 1, "campplus.onnx": 1}},
            PROBLEM,
            ["missing or empty: flow.pt, speech_tokenizer_v2_25hz.onnx"],
        ),
        ("warmup", {"warmup_video": MediaFacts(error="no such file")}, PROBLEM, ["warmup.mp4: no such file"]),
        ("voice", {"voice": MediaFacts(error="no such file")}, PROBLEM, ["default.wav: no such file", "0.5 to 30 s"]),
        ("voice", {"voice": None}, NOTE, ["silent"]),
        ("memory", {"free_memory": 300 * MIB}, PROBLEM, ["300.0 MiB free, at least 512.0 MiB needed"]),
        # 9.3e9 numbers and 8192 rows of 73728, four bytes each, half a GiB for the process.
        ("memory", {"torch": ON_CPU, "free_memory": 37 * GIB}, PROBLEM, ["at least 37.4 GiB needed"]),
        ("memory", {"torch": ON_CPU, "free_memory": 38 * GIB}, OK, []),
    ],
)
def test_checks_of_programs_and_files(name: str, facts: dict[str, Any], level: Level, said: list[str]) -> None:
    check(name, machine(**facts), level, *said)


def test_weights() -> None:
    int4, fp8 = settings(model={"weights": "int4"}), settings(model={"weights": "fp8"})
    check("weights", machine(), OK, "bf16")
    check("weights", machine(fp8), OK, "llm int8 and fp8, tts bf16, vpm bf16, apm int8 (model.weights is fp8)")
    check("weights", machine(int4), OK, "llm int4, tts int8, vpm int8, apm int8 (model.weights is int4)")
    check("weights", machine(int4, torch=ON_CPU), NOTE, "int4 are dequantised at each product on a CPU", "int8 or bf16")
    check("weights", machine(settings(model={"weights": "int8"}), torch=ON_CPU), OK, "int8")
    flow = machine(settings(model={"part_weights": PartWeights(flow="fp8")}), torch=ON_CPU)
    check("weights", flow, NOTE, "bf16, flow fp8: fp8 are dequantised", "set model.part_weights.flow to int8 or bf16")
    eager = settings(model={"weights": "fp8"}, service=EAGER)
    check("weights", machine(eager), NOTE, "without the project's kernels", "service.compile")
    for stored in ("awq", "int4"):
        kept = replace(REAL_MODEL, stored=stored)
        check("weights", machine(model=kept), NOTE, f"the folder stores {stored}", "model.weights to int4")
        check("weights", machine(int4, model=kept), OK)
    check("weights", machine(model=replace(REAL_MODEL, stored="int8")), OK)
    # Weights of 18.6, 11.1 and 7.5 GB, one session's context and, if compiled, 1 GiB.
    sizes = replace(REAL_MODEL, place_values={"llm": 7_000_000_000, "head": 500_000_000})
    for free, profile in ((141, "bf16"), (16, "int8"), (12, "int4"), (6, "none that fits")):
        card = replace(ON_GPU.gpus[0], free=free * GIB)
        check("weights", machine(model=sizes, torch=replace(ON_GPU, gpus=(card,))), OK, f"(sm_90), profile {profile}")
    small = replace(ON_GPU, gpus=(replace(ON_GPU.gpus[0], free=12 * GIB),))
    check("gpu-memory", machine(model=sizes, torch=small), PROBLEM, "set model.weights to int4")
    # 7.5e9 of the numbers in a byte instead of two.
    large = replace(REAL_MODEL, place_values={"llm": 7_000_000_000, "head": 500_000_000})
    needed = (2 * (9_300_000_000 + 73_728 * 8192) - 7_500_000_000) / GIB
    check(
        "gpu-memory", machine(settings(model={"weights": "fp8"}, service=EAGER), model=large), OK, f"{needed:.1f} GiB"
    )


@pytest.mark.parametrize(("decode_copy", "bytes_a_copied_weight"), [(True, 1.5), ("auto", 0.0), (False, 0.0)])
def test_gpu_memory_counts_a_copy_that_must_fit(decode_copy: bool | str, bytes_a_copied_weight: float) -> None:
    large = replace(REAL_MODEL, place_values={"llm": 7_000_000_000, "head": 500_000_000, "vpm": 400_000_000})
    needed = (2 * (9_300_000_000 + 73_728 * 8192) + bytes_a_copied_weight * 7_500_000_000) / GIB + 1
    config = settings(service=compiling(), model={"decode_copy": decode_copy}, duplex={"max_sessions": 1})
    check("gpu-memory", machine(config, model=large), OK, f"at least {needed:.1f} GiB needed")


def test_reports_a_copy_that_cannot_be_made() -> None:
    asked = {"decode_copy": True}
    check("decode-copy", machine(), OK, "not asked for")
    check("decode-copy", machine(settings(model=asked)), OK, "of the language model's weights of bfloat16 numbers")
    check("decode-copy", machine(settings(model=asked), torch=ON_CPU), NOTE, "has no effect: the model runs on a CPU")
    int8 = machine(settings(model={**asked, "weights": "int8"}))
    check("decode-copy", int8, NOTE, "has no effect: the language model's weights are quantised", 'to "auto"')
    for service in (EAGER, compiling(kernels="off")):
        check("decode-copy", machine(settings(model=asked, service=service)), NOTE, "service.compile does not let")


def test_settings_that_do_not_load_are_a_problem() -> None:
    broken = machine(_loaded=(default_config(), "", "setting x: expected y, got z"))
    check("config", broken, PROBLEM, "setting x: expected y, got z", "docs/configuration.md")
    check("model", broken, OK, str(DEFAULT))
    check("config", machine(_loaded=(default_config(), "/c\nsetting s has no effect", None)), NOTE, "has no effect")


def test_requirements_of_compiling_are_notes_without_compiling() -> None:
    full = FolderFacts(Path("/cache"), True, GIB)
    locked = replace(full, free=9 * GIB, error="/cache: Permission denied")
    for facts, name, said in [
        ({"torch": ON_CPU, "cpp_compiler": ProgramFacts(None)}, "compiler", "no C++ compiler"),
        (
            {"cpp_compiler": ProgramFacts(None), "c_compiler": ProgramFacts("/cc", error="/cc broke")},
            "compiler",
            "/cc broke",
        ),
        ({"python_headers": None}, "compiler", "python3-dev"),
        ({"cache_folder": full}, "cache", "1.0 GiB free, compiling may need 2.0 GiB"),
        ({"cache_folder": locked}, "cache", "Permission denied"),
        ({"cache_folder": replace(full, runs_code=False)}, "cache", "noexec"),
    ]:
        check(name, machine(settings(service=EAGER), **facts), NOTE, said)
        check(name, machine(settings(service=compiling()), **facts), PROBLEM, said, "service.")
    check("compiler", machine(cpp_compiler=ProgramFacts(None)), OK)
    empty = FolderFacts(Path("/cache"), False, 9 * GIB)
    check("cache", machine(settings(service=compiling()), cache_folder=empty), NOTE, "precompile.py")
    check("cache", machine(settings(service=EAGER), cache_folder=empty), OK, "/cache: 9.0 GiB free")


def test_a_data_folder_without_permission_is_a_problem_for_recordings() -> None:
    locked = FolderFacts(Path("/data"), True, GIB, error="/data: Permission denied")
    check("data", machine(data_folder=locked), NOTE, "/data: Permission denied", "service.data_dir")
    check("data", machine(settings(recording={"enabled": True}), data_folder=locked), PROBLEM, "service.data_dir")
    check("data", machine(), OK, "/data: 100.0 GiB free")


def test_names_missing_files_of_the_model(tmp_path: Path) -> None:
    config = settings(model={"pt_path": tmp_path / "w.pt", "token2wav_path": tmp_path / "v"})
    check("model", machine(config), PROBLEM, f"{tmp_path}/w.pt", "model.pt_path")
    check("vocoder", machine(config, vocoder_files={}), PROBLEM, f"{tmp_path}/v: no files")


def test_finds_changed_files_of_a_quantised_model(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    index = {"metadata": {"files": file_facts(tmp_path)}, "weight_map": {}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    found = Machine(None, {})
    found.__dict__["_checkpoint"] = tmp_path, None
    assert found.checked_files == (1, "")
    (tmp_path / "a.bin").write_bytes(b"abd")
    del found.__dict__["checked_files"]
    n_files, error = found.checked_files
    assert n_files == 1 and "a.bin: expected {'bytes': 3" in error, error


def test_extra_files_of_a_quantised_model_are_no_problem(tmp_path: Path) -> None:
    folder = shutil.copytree(DEFAULT, tmp_path / "talker")
    n_files, _ = compared_files(folder)
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    for name in ("README.md", ".cache/huggingface/x.metadata"):
        (folder / name).write_text("x")
    assert n_files > 10 and compared_files(folder) == (n_files, "")
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"x")
    assert "model-00002-of-00002.safetensors: expected no shard" in compared_files(folder)[1]
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "vocab.json").unlink()
    assert compared_files(folder, ["*.safetensors"]) == (1, ""), "expected one of the files"
    assert "vocab.json: expected {" in compared_files(folder)[1]


def test_a_quantised_model_without_checksums_is_a_problem(tmp_path: Path) -> None:
    index = {"metadata": {"quantization": {"format": "int8", "version": 1}}, "weight_map": {}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    n_files, error = compared_files(tmp_path)
    assert n_files == 0 and "expected checksums of the folder's files" in error, error
    check("checksums", machine(checked_files=(n_files, error)), PROBLEM, "got KeyError: 'files'", "models.quantize")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {}}))
    assert compared_files(tmp_path) == (0, ""), "expected none for a folder as it was published"


def test_damaged_declarations_of_a_model_are_problems(tmp_path: Path) -> None:
    folder = shutil.copytree(DEFAULT, tmp_path / "talker")
    index = json.loads((folder / INDEX).read_text())
    assert not checkpoint_facts(folder).problems
    (folder / INDEX).write_text(json.dumps(index | {"metadata": "quantization"}))
    [problem] = checkpoint_facts(folder).problems
    assert "an object as metadata if there is any, got TypeError: metadata 'quantization'" in problem, problem
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": None}
    (folder / "config.json").write_text(json.dumps(config))
    [problem] = checkpoint_facts(folder).problems
    assert "group_size: expected a number of columns with one scale, or -1 for all, got None" in problem, problem


@pytest.mark.parametrize("name", CHECKS)
def test_reports_a_check_that_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> Callable[[Machine], Finding]:
        def check(_: Machine) -> Finding:
            raise error

        return check

    monkeypatch.setitem(CHECKS, name, fails(UnknownFact("no such thing here")))
    check(name, machine(), NOTE, "not checked: no such thing here")
    monkeypatch.setitem(CHECKS, name, fails(ZeroDivisionError("oh")))
    check(name, machine(), PROBLEM, "the check itself failed: ZeroDivisionError: oh")


def test_finds_the_checkpoint_of_voice_conversion(tmp_path: Path) -> None:
    check("conversion", machine(), OK, "model.s3gen_path is null")
    path = tmp_path / "s3gen.safetensors"
    configured = settings(model={"s3gen_path": path})
    check("conversion", machine(configured), PROBLEM, "no such file", "s3gen_meanflow.safetensors")
    path.write_bytes(bytes(2048))
    check("conversion", machine(configured), OK, "s3gen.safetensors: ")


def test_reads_the_checkpoint_of_the_speech_model(tmp_path: Path) -> None:
    check("speech", machine(), OK, "model.speech_path is null")
    folder = build(tmp_path / "voices")
    alone = settings(model={"speech_path": folder, "omni": False})
    check("speech", machine(alone), OK, f"{folder}: ", " numbers")
    for name in ("model", "tokenizer", "vocoder"):
        check(name, machine(alone), OK, "model.omni is false")
    # Without the omni model 1 GiB for compiling is most of it; beside it the speech model's slots count too.
    check("gpu-memory", machine(alone), OK, "at least 1.0 GiB needed", "for the speech model with its slots")
    large = replace(REAL_MODEL, n_values=1_000_000_000, row_values=2 * 28 * 8 * 128)
    path = tmp_path / "s3gen.safetensors"
    path.write_bytes(bytes(MIB))  # of float32 numbers
    both = settings(model={"speech_path": folder, "s3gen_path": path}, service=EAGER)
    slots = f"{2 * (1_000_000_000 + 32 * 2048 * 57_344) / GIB:.1f} GiB for the speech model with its slots"
    check("gpu-memory", machine(both, speech=large), OK, slots, "0.5 MiB for voice conversion")
    tight = replace(ON_GPU, gpus=(replace(ON_GPU.gpus[0], free=25 * GIB),))
    check("gpu-memory", machine(both, speech=large, torch=tight), PROBLEM, "lower model.speech_sessions")
    check("gpu-memory", machine(settings(service=EAGER), torch=tight), OK, "at least 18.4 GiB needed")
    check("memory", machine(both, speech=large, torch=ON_CPU, free_memory=42 * GIB), PROBLEM, "at least 42.9 GiB")
    weights = folder / "speech_tokenizer" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    (folder / "config.json").unlink()
    check("speech", machine(alone), PROBLEM, "config.json", "bytes according to its header", "-> set model.speech_path")
