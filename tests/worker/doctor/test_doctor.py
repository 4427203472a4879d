"""The doctor: the finding of each check for given facts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from assets.build_tiny_speech import build
from tests.worker.doctor.machines import (
    EAGER,
    H200,
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
from worker.doctor.__main__ import CHECKS, examine
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
    check("weights", machine(fp8), OK, "fp8")
    check("weights", machine(int4), OK, "llm int4, tts int8, vpm int8, apm int8 (model.weights is int4)")
    check("weights", machine(int4, torch=ON_CPU), NOTE, "int4 are dequantised at each product on a CPU", "int8 or bf16")
    check("weights", machine(settings(model={"weights": "int8"}), torch=ON_CPU), OK, "int8")
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


def test_settings_that_do_not_load_are_a_problem() -> None:
    broken = machine(_loaded=(default_config(), "", "setting x: expected y, got z"))
    check("config", broken, PROBLEM, "setting x: expected y, got z", "docs/configuration.md")
    check("model", broken, OK, "assets/tiny")
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


@pytest.mark.parametrize(
    ("name", "torch", "level", "said"),
    [
        (
            "torch",
            TorchFacts(errors={"torch": "the process exited with -11: no message"}),
            PROBLEM,
            ["exited with -11"],
        ),
        ("torch", TorchFacts(), PROBLEM, ["not installed", "start_all.sh"]),
        (
            "torch",
            replace(ON_GPU, errors={"torchvision": "RuntimeError: operator torchvision::nms does not exist"}),
            PROBLEM,
            ["built for another torch", "-> pip uninstall torchvision"],
        ),
        (
            "torch",
            replace(ON_GPU, errors={"inductor": "AttributeError: 'KernelNamespace' object has no attribute 'mm'"}),
            PROBLEM,
            ["inductor does not load", "torch and triton do not fit each other", "start_all.sh"],
        ),
        ("torch", ON_CPU, OK, ["2.13.0+cpu, built for CPUs only"]),
        ("triton", ON_CPU, OK, ["does not need it"]),
        ("triton", replace(ON_GPU, triton=None), PROBLEM, ["compiling for a GPU needs it"]),
        ("triton", replace(ON_GPU, errors={"triton": "ImportError: x"}), PROBLEM, ["ImportError: x"]),
        (
            "triton",
            replace(ON_GPU, triton="3.5.1", triton_required=None),
            PROBLEM,
            ["3.5.1; torch 2.13.0+cu130 needs 3.6 or newer"],
        ),
        ("triton", replace(ON_GPU, triton="3.6.0"), PROBLEM, ["needs 3.7.0", '-> pip install "triton==3.7.0"']),
        ("triton", replace(ON_GPU, triton="3.7.1"), OK, ["3.7.1"]),
        ("driver", replace(ON_GPU, driver_cuda=(12, 8)), PROBLEM, ["up to CUDA 12.8", "built for CUDA 13.0", "update"]),
        ("driver", replace(ON_GPU, cuda="12.9", driver_cuda=(12, 4)), OK, ["580.65.06, up to CUDA 12.4"]),
        ("driver", replace(ON_CPU, driver_cuda=(13, 0)), NOTE, ["built for CPUs only"]),
        ("driver", ON_CPU, OK, ["workers run on the CPU"]),
        (
            "gpus",
            replace(ON_GPU, gpus=(H200, replace(H200, error="RuntimeError: busy"))),
            PROBLEM,
            ["1 NVIDIA H200: RuntimeError: busy"],
        ),
        ("gpus", replace(ON_GPU, gpus=(), errors={"cuda": "RuntimeError: no driver"}), PROBLEM, ["no driver"]),
        ("gpus", ON_GPU, OK, ["0 NVIDIA H200, 139.0 GiB\n1 NVIDIA H200, 139.0 GiB"]),
        (
            "capability",
            replace(ON_GPU, architectures=("sm_80", "sm_100")),
            PROBLEM,
            ["NVIDIA H200 has 9.0, and torch is built for sm_80 sm_100"],
        ),
        ("capability", replace(ON_GPU, architectures=("compute_80",)), OK, ["9.0"]),
        ("capability", replace(ON_GPU, gpus=(replace(H200, capability=(9, 1)),)), OK, ["9.1"]),
        ("capability", replace(ON_GPU, gpus=(replace(H200, capability=(7, 5)),)), NOTE, ["bfloat16", "float32"]),
        ("gpu-memory", replace(ON_GPU, gpus=(replace(H200, free=18 * GIB),)), PROBLEM, ["0: 18.0 GiB free"]),
        ("gpu-memory", replace(ON_GPU, gpus=(replace(H200, free=19 * GIB),)), PROBLEM, ["at least 19.4 GiB needed"]),
    ],
)
def test_checks_of_torch_and_gpus(name: str, torch: TorchFacts, level: Level, said: list[str]) -> None:
    check(name, machine(torch=torch), level, *said)


def test_checks_follow_the_device_of_the_settings() -> None:
    gone = replace(ON_GPU, gpus=(), driver_cuda=None, errors={"cuda": "RuntimeError: no driver"})
    on_second = settings(model={"device": "cuda:1"})
    check("driver", machine(on_second, torch=gone), PROBLEM, "model.device is cuda:1")
    check("driver", machine(on_second, torch=replace(ON_CPU, driver_cuda=(13, 0))), PROBLEM, "CPUs only")
    check("gpus", machine(on_second, torch=gone, n_gpus=None), PROBLEM, "no driver")
    check("gpus", machine(torch=gone, n_gpus=None), OK, "none")
    check(
        "gpus",
        machine(on_second, torch=replace(ON_GPU, gpus=(H200,))),
        PROBLEM,
        "1 visible, and model.device is cuda:1",
    )
    small = replace(ON_GPU, gpus=(replace(H200, free=GIB, capability=(7, 0)), H200))
    check("gpu-memory", machine(on_second, torch=small), OK, "1: 138.0 GiB free")
    check("capability", machine(on_second, torch=small), OK, "9.0")
    check("gpu-memory", machine(settings(model={"device": "cpu"}), torch=small), OK, "no GPU is used")


def test_compiling_needs_capability_and_memory_of_a_gpu() -> None:
    config = settings(service=compiling())
    old = replace(ON_GPU, architectures=("sm_60",), gpus=(replace(H200, capability=(6, 1)),))
    check("capability", machine(config, torch=old), PROBLEM, "triton needs 7.0 or higher")
    tight = replace(ON_GPU, gpus=(replace(H200, free=19 * GIB),))
    check("gpu-memory", machine(config, torch=tight), PROBLEM, "at least 19.4 GiB needed")
    check("gpu-memory", machine(settings(service=EAGER), torch=tight), OK, "at least 18.4 GiB needed")


@pytest.mark.parametrize(
    ("visible", "wrong"),
    [
        ("0,2", "expected numbers below 2, got 2"),
        ("0, one", "got 'one'"),
        ("0,,1", "got ''"),
        ("1,1", "expected each GPU once"),
        ("0,1", None),
        ("GPU-5a3f,MIG-11", None),
        ("", None),
        ("-1", None),
    ],
)
def test_checks_visible_devices(visible: str, wrong: str | None) -> None:
    made = machine(environ={"CUDA_VISIBLE_DEVICES": visible})
    check("gpus", made, PROBLEM if wrong else OK, *([f"CUDA_VISIBLE_DEVICES={visible}: ", wrong] if wrong else []))


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_refuses_allocators_that_do_not_fit_graphs(variable: str) -> None:
    environ = {variable: "expandable_segments:True,backend:cudaMallocAsync"}
    for settings_ in ({}, {"cuda_graphs": "on"}, {"cuda_graphs": "off", "mode": "reduce-overhead"}):
        made = machine(settings(service=compiling(**settings_)), environ)
        check("allocator", made, PROBLEM, "checkPoolLiveAllocations", f"unset {variable}")
    check("allocator", machine(settings(service=compiling(cuda_graphs="off")), environ), NOTE, variable)
    check("allocator", machine(settings(service=compiling()), environ, torch=ON_CPU), NOTE)
    check("allocator", machine(settings(service=EAGER), environ), NOTE)
    check("allocator", machine(environ={variable: "expandable_segments:True"}), OK, "expandable_segments")


def test_graphs_need_the_caching_allocator() -> None:
    environ = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    check(
        "allocator",
        machine(settings(service=compiling()), environ),
        PROBLEM,
        "need memory that stays allocated",
        "unset",
    )
    check("allocator", machine(settings(service=compiling(cuda_graphs="off")), environ), OK)


def test_names_the_setting_that_turns_kernels_off() -> None:
    check("kernels", machine(settings(service=compiling())), OK, "run the model's layers")
    for settings_ in ({"kernels": "off"}, {"mode": "max-autotune"}, {"attention": "sdpa"}):
        [(name, value)] = settings_.items()
        made = machine(settings(service=compiling(**settings_)))
        check("kernels", made, NOTE, f"service.compile.{name} is {value}", "layers are compiled")
    made = machine(settings(service=compiling()), torch=replace(ON_GPU, triton=None))
    check("kernels", made, NOTE, "triton is not installed")
    old = replace(ON_GPU, gpus=(replace(H200, name="NVIDIA T4", capability=(7, 5)),))
    check(
        "kernels",
        machine(settings(service=compiling()), torch=old),
        NOTE,
        "NVIDIA T4",
        "service.compile.kernels to off",
    )
    check("kernels", machine(settings(service=compiling()), torch=ON_CPU), OK, "no GPU")


def test_warns_about_eager_execution_on_a_gpu() -> None:
    check("compile", machine(settings(service=EAGER)), NOTE, "service.compile is false", "eagerly on a GPU", '"auto"')
    check("compile", machine(settings(service=EAGER, model={"device": "cuda:1"})), NOTE, "eagerly on a GPU")
    check("compile", machine(), OK, "on: service.compile is auto")
    check("compile", machine(settings(service=compiling())), OK, "on: service.compile is true")
    check("compile", machine(settings(service=EAGER), torch=ON_CPU), OK, "off: service.compile is false")
    check("compile", machine(torch=ON_CPU), OK, "off: service.compile is auto")
    check("compile", machine(settings(model={"device": "cpu"})), OK, "off: service.compile is auto")


@pytest.mark.parametrize(
    ("dtype", "tf32", "level", "said"),
    [
        ("auto", True, OK, ["on"]),
        ("bfloat16", False, NOTE, ["without tensor cores", "-> set service.compile.tf32 to true"]),
        ("float32", True, NOTE, ["10 mantissa bits", "-> set service.compile.tf32 to false"]),
        ("float32", False, OK, ["full accuracy"]),
    ],
)
def test_advises_on_tf32(dtype: str, tf32: bool, level: Level, said: list[str]) -> None:
    check("tf32", machine(settings(service=compiling(tf32=tf32), model={"dtype": dtype})), level, *said)


@pytest.mark.parametrize("variable", ["NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"])
def test_reports_variables_that_override_tf32(variable: str) -> None:
    on, off = settings(service=compiling()), settings(service=compiling(tf32=False), model={"dtype": "float32"})
    check("tf32", machine(on, {variable: "0"}), NOTE, f"{variable}=0 turns it off", f"-> unset {variable}")
    check("tf32", machine(off, {variable: "1"}), NOTE, f"{variable}=1 turns it on", "accuracy", f"-> unset {variable}")
    check("tf32", machine(on, {variable: "1"}), OK)
    check("tf32", machine(off, {variable: "0"}), OK)


def test_tf32_concerns_gpus_that_have_it() -> None:
    off = settings(service=compiling(tf32=False))
    turing = replace(ON_GPU, gpus=(replace(H200, capability=(7, 5)),))
    check("tf32", machine(off, torch=turing), OK, "no GPU with TF32")
    check("tf32", machine(off, torch=ON_CPU), OK, "no GPU with TF32")
    check("tf32", machine(settings(service=EAGER)), OK, "the finding `compile`")


@pytest.mark.parametrize(("minor", "torchvision"), [(10, "0.25.1"), (11, "0.26.0"), (12, "0.27.0"), (13, "0.28.0")])
def test_accepts_libraries_released_with_torch(minor: int, torchvision: str) -> None:
    fitting = {"torchvision": f"{torchvision}+cu130", "torchaudio": f"2.{minor}.0+cu130"}
    torch = replace(ON_GPU, version=f"2.{minor}.0+cu130", libraries=fitting)
    check("torch-libraries", machine(torch=torch), OK, f"torchvision {torchvision}+cu130")


def test_warns_about_libraries_of_another_torch() -> None:
    torch = replace(ON_GPU, libraries={"torchvision": "0.26.0+cu130", "torchaudio": "2.11.0"})
    check(
        "torch-libraries",
        machine(torch=torch),
        NOTE,
        "torchvision 0.26.0+cu130: torch 2.13.0+cu130 needs 0.28",
        "torchaudio 2.11.0: torch 2.13.0+cu130 needs 2.13",
        'pip install "torchvision==0.28.*" "torchaudio==2.13.*" --index-url https://download.pytorch.org/whl/cu130',
    )
    torch = replace(ON_CPU, version="2.10.0", libraries={"torchvision": "0.28.0", "torchaudio": "2.10.0"})
    check("torch-libraries", machine(torch=torch), NOTE, 'pip install "torchvision==0.25.*"; or uninstall')
    check("torch-libraries", machine(), OK, "neither torchvision nor torchaudio is installed")
    check("torch-libraries", machine(torch=TorchFacts()), OK)


def test_reports_variables_that_change_torch() -> None:
    off = {"TORCHDYNAMO_DISABLE": "1", "TORCH_LOGS": "recompiles"}
    check(
        "environment",
        machine(settings(service=EAGER), off),
        NOTE,
        "TORCHDYNAMO_DISABLE=1: nothing is compiled",
        "unset TORCH",
    )
    check("environment", machine(settings(service=compiling()), off), PROBLEM)
    check("environment", machine(settings(service=compiling()), {"TORCH_LOGS": "all"}), NOTE, "TORCH_LOGS=all")
    check("environment", machine(environ={"TORCH_COMPILE_DISABLE": "0", "NVIDIA_TF32_OVERRIDE": "0"}), NOTE, "tf32")
    check("environment", machine(environ={"TORCH_COMPILE_DISABLE": "0"}), OK)


def test_names_missing_files_of_the_model(tmp_path: Path) -> None:
    config = settings(model={"pt_path": tmp_path / "w.pt", "token2wav_path": tmp_path / "v"})
    check("model", machine(config), PROBLEM, f"{tmp_path}/w.pt", "model.pt_path")
    check("vocoder", machine(config, vocoder_files={}), PROBLEM, f"{tmp_path}/v: no files")


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


def test_flash_attention_needs_sixteen_bits_and_a_recent_gpu() -> None:
    flash = compiling(attention="flash")
    check("attention", machine(settings(service=flash)), OK, "PyTorch's flash kernels")
    check("attention", machine(settings(service=compiling())), OK, "auto")
    wide = settings(service=flash, model={"dtype": "float32"})
    package = replace(ON_GPU, libraries={"flash-attn": "2.8.3"})
    check("attention", machine(wide, torch=package), NOTE, "model.dtype is float32", "flash-attn 2.8.3 is not used")
    check("torch-libraries", machine(torch=package), OK, "neither")
    old = replace(ON_GPU, gpus=(replace(H200, name="NVIDIA T4", capability=(7, 5)),))
    check("attention", machine(settings(service=flash), torch=old), NOTE, "NVIDIA T4 is older", "attention to auto")
    check("attention", machine(settings(service=flash), torch=ON_CPU), OK, "no GPU")


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
    weights = folder / "speech_tokenizer" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    (folder / "config.json").unlink()
    check("speech", machine(alone), PROBLEM, "config.json", "bytes according to its header", "-> set model.speech_path")


def test_backend_flags_of_an_eager_worker_count_if_they_are_given() -> None:
    eager = {"compile": CompileConfig(enabled=False)}
    check("tf32", machine(settings(service=eager, model={"dtype": "float32"})), OK, "PyTorch's default")
    given = {"compile": CompileConfig(enabled=False, tf32=True)}
    check("tf32", machine(settings(service=given, model={"dtype": "float32"})), NOTE, "10 mantissa bits")
