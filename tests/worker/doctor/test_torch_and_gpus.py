"""Findings about torch, GPUs, compilation, and what changes their behaviour."""

from dataclasses import replace
from typing import Any

import pytest

from tests.worker.doctor.machines import (
    EAGER,
    H200,
    NOTE,
    OK,
    ON_CPU,
    ON_GPU,
    PROBLEM,
    check,
    compiling,
    machine,
    settings,
)
from worker.config.compile import CompileConfig
from worker.doctor.facts import TorchFacts
from worker.doctor.findings import GIB, Level


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
    for settings_ in ({"kernels": "off"}, {"mode": "max-autotune"}, {"attention": "sdpa"}, {"cuda_graphs": "off"}):
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


def test_reports_the_layout_of_sessions() -> None:
    asked: list[tuple[str, int]] = []

    def layout(said: list[str], fitting: int | None = None, torch: TorchFacts = ON_GPU, **sections: Any) -> None:
        def n_fitting(kv_layout: str, total: int) -> int:
            assert fitting is not None, f"expected no question, got one about {kv_layout}"
            asked.append((kv_layout, total))
            return fitting

        check("kv-layout", machine(settings(**sections), torch=torch, n_fitting=n_fitting), OK, *said)

    layout(["0: NVIDIA H200, pages\n1: NVIDIA H200, pages (model.kv_layout is auto)"], 5)
    assert asked == [("pages", H200.total)], f"expected one question for equal GPUs, got {asked}"
    layout(["1: NVIDIA H200, slots (model.kv_layout is auto)"], 4)
    layout(["0: NVIDIA H200, pages (model.kv_layout is auto)"], model={"device": "cuda:0"}, duplex={"max_sessions": 5})
    layout(["1: NVIDIA H200, slots"], duplex={"max_sessions": 4})
    layout(["1: NVIDIA H200, slots"], service=EAGER)
    layout(["1: NVIDIA H200, slots"], service=compiling(cuda_graphs="off"))
    layout(["1: NVIDIA H200, slots"], torch=replace(ON_GPU, triton=None))
    layout(["slots (model.kv_layout is auto)"], torch=ON_CPU, duplex={"max_sessions": 8})
    layout(["pages (model.kv_layout is pages)"], torch=ON_CPU, model={"kv_layout": "pages"})
    layout(["the omni model is not served"], model={"omni": False})


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


def test_flash_attention_needs_sixteen_bits_and_a_recent_gpu() -> None:
    flash = compiling(attention="flash")
    check("attention", machine(settings(service=flash)), OK, "PyTorch's flash kernels")
    check("attention", machine(settings(service=compiling())), OK, "auto")
    wide = settings(service=flash, model={"dtype": "float32"})
    package = replace(ON_GPU, libraries={"flash-attn": "2.8.3"})
    check(
        "attention",
        machine(wide, torch=package),
        NOTE,
        "model.dtype is float32",
        "flash-attn 2.8.3 is not used: slots of",
    )
    check("torch-libraries", machine(torch=package), OK, "neither")
    old = replace(ON_GPU, gpus=(replace(H200, name="NVIDIA T4", capability=(7, 5)),))
    check("attention", machine(settings(service=flash), torch=old), NOTE, "NVIDIA T4 is older", "attention to auto")
    check("attention", machine(settings(service=flash), torch=ON_CPU), OK, "no GPU")


def test_backend_flags_of_an_eager_worker_count_if_they_are_given() -> None:
    eager = {"compile": CompileConfig(enabled=False)}
    check("tf32", machine(settings(service=eager, model={"dtype": "float32"})), OK, "PyTorch's default")
    given = {"compile": CompileConfig(enabled=False, tf32=True)}
    check("tf32", machine(settings(service=given, model={"dtype": "float32"})), NOTE, "10 mantissa bits")
