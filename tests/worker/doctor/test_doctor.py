"""The doctor: what each check says of made-up facts, what is found out about this machine, and the command."""

import ast
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from worker.compile_config import CompileConfig
from worker.doctor import machine as machine_module
from worker.doctor.__main__ import CHECKS, examine, main
from worker.doctor.facts import FolderFacts, Gpu, MediaFacts, ModelFacts, NotKnown, Program, Requirement, TorchFacts
from worker.doctor.findings import GIB, MIB, Finding, Level, as_json, size, table
from worker.doctor.machine import Machine
from worker.doctor.versions import fits
from worker.service_config import Config, default_config

H200 = Gpu("NVIDIA H200", (9, 0), 139 * GIB, 138 * GIB)
ON_GPU = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    architectures=("sm_75", "sm_80", "sm_90", "compute_120"),
    gpus=(H200, H200),
    driver=(13, 0),
    triton="3.7.0",
    triton_wanted="3.7.0",
)
ON_CPU = TorchFacts(version="2.13.0+cpu")
REAL_MODEL = ModelFacts(n_files=4, n_bytes=18 * GIB, n_values=9_300_000_000, row_values=73_728)


def settings(**sections: dict[str, Any]) -> Config:
    """The defaults with some of their keys replaced."""
    config = default_config()
    changed = {name: getattr(config, name).model_copy(update=given) for name, given in sections.items()}
    return config.model_copy(update=changed)


def compiling(**knobs: Any) -> dict[str, Any]:
    return {"compile": CompileConfig(enabled=True, **knobs)}


def machine(config: Config | None = None, environ: dict[str, str] | None = None, **facts: Any) -> Machine:
    """One with two GPUs where everything is as it should be, but for what is given."""
    made = Machine(None, environ or {})
    healthy = {
        "_loaded": (config or default_config(), "/root/config.json", None),
        "python": (3, 12, 1),
        "python_headers": Path("/usr/include/Python.h"),
        "requirements": [Requirement("torch", ">=2.10,<2.14", "2.13.0+cu130")],
        "torch": ON_GPU,
        "n_gpus": 2,
        "cpp_compiler": Program("/usr/bin/g++", "g++ 12.2.0"),
        "c_compiler": Program("/usr/bin/gcc", "gcc 12.2.0"),
        "ffmpeg": Program("/usr/bin/ffmpeg", "ffmpeg version 7.1 Copyright (c) 2000-2025"),
        "taken_ports": {},
        "cache_folder": FolderFacts(Path("/cache"), True, 100 * GIB, 300, 40 * MIB),
        "model": REAL_MODEL,
        "tokenizer_error": None,
        "vocoder_files": dict.fromkeys(
            ("flow.yaml", "flow.pt", "hift.pt", "campplus.onnx", "speech_tokenizer_v2_25hz.onnx"), MIB
        ),
        "warmup_video": MediaFacts("pictures and sound, 00:00:12.00"),
        "voice": MediaFacts("5.0 s at 16000 Hz"),
        "free_memory": 64 * GIB,
        "most_open_files": 65_536,
    }
    vars(made).update({**healthy, **facts})
    return made


def check(name: str, made: Machine, level: Level, *said: str) -> None:
    """Run one check; `said` are parts of what was found, or of the remedy behind `->`."""
    [found] = examine(made, [name])
    text = f"{found.found}\n-> {found.remedy}"
    assert found.level is level, f"{name}: expected {level}, got {found}"
    for part in said:
        assert part in text, f"{name}: expected {part!r} in what is said, got {text!r}"
    assert found.remedy or level is not Level.PROBLEM, f"{name}: a problem without a remedy: {found}"


OK, NOTE, PROBLEM = Level.OK, Level.NOTE, Level.PROBLEM


# --- made-up facts --------------------------------------------------------------------------------


@pytest.mark.parametrize("torch", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("compile_on", [False, True])
def test_a_healthy_machine_has_no_problem(torch: TorchFacts, compile_on: bool) -> None:
    config = settings(service=compiling() if compile_on else {})
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
        ("compiler", {"c_compiler": Program(None)}, NOTE, ["no C compiler", "apt-get install gcc"]),
        ("ffmpeg", {"ffmpeg": Program(None)}, PROBLEM, ["none", "apt-get install ffmpeg"]),
        ("ffmpeg", {"ffmpeg": Program("/f", error="/f -version does not run")}, PROBLEM, ["does not run"]),
        ("ffmpeg", {}, OK, ["ffmpeg version 7.1 at /usr/bin/ffmpeg"]),
        (
            "ports",
            {"taken_ports": {8006: "Address already in use", 22401: "Permission denied"}},
            PROBLEM,
            ["8006: Address already in use\n22401: Permission denied", "service.worker_base_port"],
        ),
        ("files", {"most_open_files": 1000}, NOTE, ["1000 open files", "ulimit -n"]),
        ("files", {"most_open_files": 255}, PROBLEM, ["255 open files"]),
        ("files", {"most_open_files": -1}, OK, ["no limit"]),
        ("model", {"model": ModelFacts(problems=("a: x", "b: y"))}, PROBLEM, ["a: x\nb: y", "model.model_path"]),
        ("tokenizer", {"tokenizer_error": "no <unit>"}, PROBLEM, ["no <unit>", "tokenizer.json"]),
        ("vocoder", {"vocoder_files": {}}, NOTE, ["nothing will be spoken", "model.token2wav_path"]),
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


def test_settings_that_do_not_load() -> None:
    broken = machine(_loaded=(default_config(), "", "setting x: expected y, got z"))
    check("config", broken, PROBLEM, "setting x: expected y, got z", "docs/configuration.md")
    check("model", broken, OK, "assets/tiny")
    check("config", machine(_loaded=(default_config(), "/c\nsetting s has no effect", None)), NOTE, "has no effect")


def test_what_compiling_needs() -> None:
    """A problem where something is to be compiled, a note where nothing is."""
    full = FolderFacts(Path("/cache"), True, GIB)
    locked = replace(full, free=9 * GIB, error="/cache: Permission denied")
    for facts, name, said in [
        ({"torch": ON_CPU, "cpp_compiler": Program(None)}, "compiler", "no C++ compiler"),
        ({"cpp_compiler": Program(None), "c_compiler": Program("/cc", error="/cc broke")}, "compiler", "/cc broke"),
        ({"python_headers": None}, "compiler", "python3-dev"),
        ({"cache_folder": full}, "cache", "1.0 GiB free, compiling may need 2.0 GiB"),
        ({"cache_folder": locked}, "cache", "Permission denied"),
        ({"cache_folder": replace(full, runs_code=False)}, "cache", "noexec"),
    ]:
        check(name, machine(**facts), NOTE, said)
        check(name, machine(settings(service=compiling()), **facts), PROBLEM, said, "service.")
    check("compiler", machine(cpp_compiler=Program(None)), OK)
    empty = FolderFacts(Path("/cache"), False, 9 * GIB)
    check("cache", machine(settings(service=compiling()), cache_folder=empty), NOTE, "precompile.py")
    check("cache", machine(cache_folder=empty), OK, "/cache: 9.0 GiB free")


@pytest.mark.parametrize(
    ("name", "torch", "level", "said"),
    [
        (
            "torch",
            TorchFacts(errors={"torch": "the process ended with -11: nothing said"}),
            PROBLEM,
            ["ended with -11"],
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
            ["inductor does not load", "torch and triton do not belong together", "start_all.sh"],
        ),
        ("torch", ON_CPU, OK, ["2.13.0+cpu, built for CPUs only"]),
        ("triton", ON_CPU, OK, ["needs none"]),
        ("triton", replace(ON_GPU, triton=None), PROBLEM, ["nothing can be compiled for a GPU"]),
        ("triton", replace(ON_GPU, errors={"triton": "ImportError: x"}), PROBLEM, ["ImportError: x"]),
        (
            "triton",
            replace(ON_GPU, triton="3.5.1", triton_wanted=None),
            PROBLEM,
            ["3.5.1, and torch 2.13.0+cu130 goes with 3.6 or newer"],
        ),
        ("triton", replace(ON_GPU, triton="3.6.0"), PROBLEM, ["goes with 3.7.0", '-> pip install "triton==3.7.0"']),
        ("triton", replace(ON_GPU, triton="3.7.1"), OK, ["3.7.1"]),
        ("driver", replace(ON_GPU, driver=(12, 8)), PROBLEM, ["up to CUDA 12.8", "built for CUDA 13.0", "update"]),
        ("driver", replace(ON_GPU, cuda="12.9", driver=(12, 4)), OK, ["up to CUDA 12.4"]),
        ("driver", replace(ON_CPU, driver=(13, 0)), NOTE, ["built for CPUs only"]),
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
        ("gpu-memory", replace(ON_GPU, gpus=(replace(H200, free=19 * GIB),)), OK, ["at least 18.4 GiB needed"]),
    ],
)
def test_checks_of_torch_and_gpus(name: str, torch: TorchFacts, level: Level, said: list[str]) -> None:
    check(name, machine(torch=torch), level, *said)


def test_gpus_that_are_asked_for() -> None:
    gone = replace(ON_GPU, gpus=(), driver=None, errors={"cuda": "RuntimeError: no driver"})
    on_second = settings(model={"device": "cuda:1"})
    check("driver", machine(on_second, torch=gone), PROBLEM, "model.device is cuda:1")
    check("driver", machine(on_second, torch=replace(ON_CPU, driver=(13, 0))), PROBLEM, "CPUs only")
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


def test_what_compiling_asks_of_a_gpu() -> None:
    config = settings(service=compiling())
    old = replace(ON_GPU, architectures=("sm_60",), gpus=(replace(H200, capability=(6, 1)),))
    check("capability", machine(config, torch=old), PROBLEM, "triton compiles from 7.0 on")
    tight = replace(ON_GPU, gpus=(replace(H200, free=19 * GIB),))
    check("gpu-memory", machine(config, torch=tight), PROBLEM, "at least 19.4 GiB needed")


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
def test_visible_devices(visible: str, wrong: str | None) -> None:
    made = machine(environ={"CUDA_VISIBLE_DEVICES": visible})
    check("gpus", made, PROBLEM if wrong else OK, *([f"CUDA_VISIBLE_DEVICES={visible}: ", wrong] if wrong else []))


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_allocators_that_graphs_cannot_use(variable: str) -> None:
    environ = {variable: "expandable_segments:True,backend:cudaMallocAsync"}
    for knobs in ({}, {"cuda_graphs": "on"}, {"cuda_graphs": "off", "mode": "reduce-overhead"}):
        made = machine(settings(service=compiling(**knobs)), environ)
        check("allocator", made, PROBLEM, "checkPoolLiveAllocations", f"unset {variable}")
    check("allocator", machine(settings(service=compiling(cuda_graphs="off")), environ), NOTE, variable)
    check("allocator", machine(settings(service=compiling()), environ, torch=ON_CPU), NOTE)
    check("allocator", machine(environ=environ), NOTE)
    check("allocator", machine(environ={variable: "expandable_segments:True"}), OK, "expandable_segments")


def test_variables_that_change_torch() -> None:
    off = {"TORCHDYNAMO_DISABLE": "1", "TORCH_LOGS": "recompiles"}
    check("environment", machine(environ=off), NOTE, "TORCHDYNAMO_DISABLE=1: nothing is compiled", "unset TORCH")
    check("environment", machine(settings(service=compiling()), off), PROBLEM)
    check("environment", machine(settings(service=compiling()), {"TORCH_LOGS": "all"}), NOTE, "TORCH_LOGS=all")
    check("environment", machine(environ={"TORCH_COMPILE_DISABLE": "0", "NVIDIA_TF32_OVERRIDE": "0"}), NOTE, "tf32")
    check("environment", machine(environ={"TORCH_COMPILE_DISABLE": "0"}), OK)


def test_what_is_missing_is_told_by_name(tmp_path: Path) -> None:
    config = settings(model={"pt_path": tmp_path / "w.pt", "token2wav_path": tmp_path / "v"})
    check("model", machine(config), PROBLEM, f"{tmp_path}/w.pt", "model.pt_path")
    check("vocoder", machine(config, vocoder_files={}), PROBLEM, f"{tmp_path}/v: no files")


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_that_fails_is_a_finding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> Callable[[Machine], Finding]:
        def check(_: Machine) -> Finding:
            raise error

        return check

    monkeypatch.setitem(CHECKS, name, fails(NotKnown("no such thing here")))
    check(name, machine(), NOTE, "not looked at: no such thing here")
    monkeypatch.setitem(CHECKS, name, fails(ZeroDivisionError("oh")))
    check(name, machine(), PROBLEM, "the check itself failed: ZeroDivisionError: oh")


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("2.13.0+cu130", ">=2.10,<2.14", True),
        ("2.14.0a0+git1", ">=2.10,<2.14", False),
        ("2.9.1", ">=2.10,<2.14", False),
        ("2.10", ">=2.10.0", True),
        ("3.0", "==3", True),
        ("3.0.1", "==3", False),
        ("anything", "", True),
    ],
)
def test_versions_and_bounds(version: str, bounds: str, expected: bool) -> None:
    assert fits(version, bounds) is expected


def test_sizes() -> None:
    assert (size(1536 * MIB), size(12 * MIB), size(GIB - 1)) == ("1.5 GiB", "12.0 MiB", "1024.0 MiB")


FOUND = [
    Finding("python", OK, "3.12.1"),
    Finding("a-longer-one", NOTE, "first\nsecond", "do this\nand that"),
    Finding("ports", PROBLEM, "8006: taken", "stop it"),
]


def test_the_table_is_aligned() -> None:
    assert table(FOUND).splitlines() == [
        "ok       python        3.12.1",
        "note     a-longer-one  first",
        "                       second",
        "                       -> do this",
        "                          and that",
        "problem  ports         8006: taken",
        "                       -> stop it",
        "1 problem, 1 note, 1 ok",
    ]


def test_the_json() -> None:
    told = json.loads(as_json(FOUND))
    assert told["ok"] is False and json.loads(as_json(FOUND[:2]))["ok"] is True
    assert told["findings"][2] == {"name": "ports", "level": "problem", "found": "8006: taken", "remedy": "stop it"}


# --- this machine ---------------------------------------------------------------------------------


def real(config: Path | None = None, **environ: str) -> Machine:
    return Machine(config, environ)


def test_what_is_found_out_here(root: Path, tiny: Path) -> None:
    here = real()
    assert here.python == sys.version_info[:3] and here.config.model.model_path == tiny
    assert {one.name for one in here.requirements} >= {"torch", "pydantic", "imageio-ffmpeg"}
    assert all(one.installed and fits(one.installed, one.bounds) for one in here.requirements), here.requirements
    assert here.ffmpeg.path and here.ffmpeg.version.startswith("ffmpeg version"), here.ffmpeg
    assert here.tokenizer_error is None and here.vocoder_files["hift.pt"] > 1000
    assert here.voice == MediaFacts("2.1 s at 16000 Hz"), here.voice
    assert 64 * MIB < here.free_memory < 64 * 1024 * GIB
    assert here.most_open_files == -1 or here.most_open_files > 0
    names = [file.name for file in tiny.glob("*.safetensors")]
    total = sum((tiny / name).stat().st_size for name in names)
    assert (here.model.n_files, here.model.n_bytes, here.model.problems) == (len(names), total, ())


def test_what_the_model_holds(tiny: Path, tiny_model: Any) -> None:
    expected = sum(tensor.numel() for tensor in tiny_model.state_dict().values())
    assert real().model.n_values == expected, f"expected {expected} numbers, got {real().model.n_values}"
    llm = tiny_model.config
    assert real().model.row_values == 2 * llm.num_hidden_layers * llm.num_key_value_heads * llm.head_dim


def broken_model(tiny: Path, folder: Path, change: Callable[[Path], None]) -> tuple[str, ...]:
    """The problems of a copy of the embedded checkpoint to which something was done."""
    shutil.copytree(tiny, folder / "model", ignore=shutil.ignore_patterns("assets"))
    change(folder / "model")
    settings_file = folder / "config.json"
    settings_file.write_text('{"model": {"model_path": "model"}}')
    return real(settings_file).model.problems


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def cut_short(folder: Path) -> None:
    os.truncate(folder / FIRST, (folder / FIRST).stat().st_size - 100)


def swap_shards(folder: Path) -> None:
    shutil.copy(folder / SECOND, folder / FIRST)


def lose_a_key(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut_short, f"{FIRST}: expected "),
        (lambda folder: (folder / SECOND).unlink(), f"{SECOND}: No such file or directory"),
        (lambda folder: (folder / SECOND).write_bytes(b"<html>"), f"{SECOND}: expected a safetensors header, got none"),
        (lambda folder: (folder / SECOND).write_bytes(struct.pack("<Q", 9) + b"{broken}}"), f"{SECOND}: "),
        (swap_shards, "tensors that the index names, such as "),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "expected JSON with weight_map"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "or model.safetensors, got neither"),
        (lose_a_key, "hidden_size"),
        (lambda folder: shutil.rmtree(folder), "expected a checkpoint folder, got no such folder"),
    ],
)
def test_checkpoints_that_are_not_whole(tiny: Path, tmp_path: Path, change: Callable[[Path], None], said: str) -> None:
    problems = broken_model(tiny, tmp_path, change)
    assert len(problems) == 1 and said in problems[0], f"expected one problem with {said!r}, got {problems}"


def test_sounds_and_videos(root: Path, tmp_path: Path) -> None:
    (tmp_path / "noise.wav").write_bytes(b"no sound at all")
    file = tmp_path / "config.json"

    def look(voice: Path, video: Path) -> tuple[MediaFacts | None, MediaFacts]:
        given = {"audio": {"ref_audio_path": str(voice)}, "service": {"warmup_video": str(video)}}
        file.write_text(json.dumps(given))
        return real(file).voice, real(file).warmup_video

    sound = root / "assets" / "ref_audio" / "default.wav"
    voice, video = look(tmp_path / "noise.wav", sound)
    assert voice and "Format not recognised" in str(voice.error), voice
    assert video.error == "expected pictures and sound, got Audio only", video
    voice, video = look(tmp_path / "gone.wav", tmp_path / "noise.wav")
    assert voice == MediaFacts(error="no such file") and str(video.error).startswith("ffmpeg: "), (voice, video)


def test_ports_that_are_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        made = Machine(None, {"DUOLOGUE_SERVICE_GATEWAY_PORT": str(port)})
        vars(made)["torch"] = ON_GPU
        assert made.taken_ports.keys() == {port}, f"expected {port} alone to be taken, got {made.taken_ports}"
    vars(made).pop("taken_ports")
    assert not made.taken_ports, "expected a port to be free once nobody listens"


def test_folders_to_write_to(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kernel.so").write_bytes(b"12345")
    (tmp_path / "lost").symlink_to("nowhere")
    there = real(DUOLOGUE_SERVICE_CACHE_DIR=str(tmp_path)).cache_folder
    assert (there.exists, there.n_files, there.n_bytes, there.error, there.runs_code) == (True, 1, 5, None, True), there
    gone = real(DUOLOGUE_SERVICE_CACHE_DIR=str(tmp_path / "a" / "b")).cache_folder
    assert (gone.exists, gone.n_files, gone.error) == (False, 0, None) and gone.free > 0, gone
    assert not (tmp_path / "a").exists(), "expected nothing to be made"
    proc = real(DUOLOGUE_SERVICE_CACHE_DIR="/proc/none").cache_folder
    assert proc.error and proc.error.startswith("/proc: "), proc


def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in (("good", "echo good 1.2; echo more"), ("bad", "exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert real(CXX="good -O2").cpp_compiler == Program(str(tmp_path / "good"), "good 1.2")
    bad = real(CC="bad").c_compiler
    assert bad.error == f"{tmp_path}/bad --version does not run", bad
    assert real().cpp_compiler == Program(None)
    assert real().n_gpus is None


def test_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{80 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {50 * MIB}\ninactive_file {30 * MIB}\n")
    assert real().free_memory == 50 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert real().free_memory > 50 * MIB
    monkeypatch.setattr(machine_module, "MEMINFO", tmp_path / "none")
    blind = machine()
    del vars(blind)["free_memory"]
    check("memory", blind, NOTE, f"not looked at: no {tmp_path}/none")


FAKE_TORCH = """
from types import SimpleNamespace as Bag
__version__ = "2.13.0+cu130"
version = Bag(cuda="13.0")
def zeros(n, device):
    if device == "cuda:1":
        raise RuntimeError("out of memory\\nmore")
    return Bag(add_=lambda one: Bag(cpu=lambda: None))
cuda = Bag(
    device_count=lambda: 2,
    get_arch_list=lambda: ["sm_90"],
    get_device_properties=lambda index: Bag(name=f"GPU{index}", major=9, minor=0, total_memory=1),
    mem_get_info=lambda index: (5, 9),
)
"""


def test_what_torch_says_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "triton.py").write_text("__version__ = '3.7.0'")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    got = real().torch
    first = Gpu("GPU0", (9, 0), 9, 5)
    assert got.gpus == (first, replace(first, name="GPU1", error="RuntimeError: out of memory")), got.gpus
    assert (got.version, got.cuda, got.triton, got.architectures) == ("2.13.0+cu130", "13.0", "3.7.0", ("sm_90",))
    assert got.errors["torchvision"] == "RuntimeError: operator torchvision::nms does not exist"
    assert got.errors.keys() == {"inductor", "torchvision"}, "expected a torch of one file to have no compiler"


# --- the command ----------------------------------------------------------------------------------


def doctor(root: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker.doctor", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=240)


def test_the_whole_command_here(root: Path) -> None:
    done = doctor(root, "--json")
    told = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert list(told) == list(CHECKS) and done.returncode == (0 if json.loads(done.stdout)["ok"] else 1)
    for name in ("python", "dependencies", "config", "torch", "ffmpeg", "model", "tokenizer", "vocoder", "voice"):
        assert told[name]["level"] == "ok", told[name]
    assert not done.stderr, done.stderr


def test_broken_settings_end_with_one(root: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"service": {"compiel": true}}')
    done = doctor(root, "--config", str(tmp_path / "config.json"), "--only", "config", "--only", "python")
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines[0].startswith("problem  config  setting service.compiel: expected "), done
    assert lines[-1] == "1 problem, 0 note, 1 ok", lines


def test_bad_usage_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--only", "pyhton"], ["--jsn"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "pyhton" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "body", "level", "said"),
    [
        ("torch", "raise OSError('libcudart.so.13: cannot open shared object file')", "problem", "libcudart.so.13"),
        ("torch", "import os; os.kill(os.getpid(), 11)", "problem", "the process ended with -11"),
        ("torch", "import sys; sys.exit('gave up')", "problem", "SystemExit: gave up"),
    ],
)
def test_a_torch_that_does_not_load(root: Path, tmp_path: Path, module: str, body: str, level: str, said: str) -> None:
    (tmp_path / f"{module}.py").write_text(body)
    done = doctor(root, "--json", PYTHONPATH=str(tmp_path))
    told = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert told["torch"]["level"] == level and said in told["torch"]["found"], told["torch"]
    assert list(told) == list(CHECKS) and done.returncode == 1
    assert told["model"]["level"] == "ok" and not done.stderr, "expected the other checks to go on"


@pytest.mark.parametrize("module", ["pydantic", "soundfile", "tokenizers", "imageio_ffmpeg"])
def test_dependencies_that_do_not_load(root: Path, tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("raise ImportError('it is broken')")
    names = ("python", "config", "model", "tokenizer", "voice", "ffmpeg", "files")
    done = doctor(root, "--json", *(f"--only={name}" for name in names), PYTHONPATH=str(tmp_path))
    told = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert list(told) == list(names) and told["files"]["found"] and told["python"]["level"] == "ok", done
    lost = {"pydantic": "config", "soundfile": "voice", "tokenizers": "tokenizer"}.get(module)
    assert lost is None or "it is broken" in told[lost]["found"], told


def test_an_older_python_is_told_so(root: Path) -> None:
    code = (
        "import sys; sys.version_info = (3, 9, 1)\n"
        "sys.argv = ['doctor']; exec(compile(open('worker/doctor/__main__.py').read(), 'doctor', 'exec'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout.startswith("problem  python  3.9\n"), done
    ast.parse((root / "worker" / "doctor" / "__main__.py").read_text(), feature_version=(3, 7))


def test_the_document_names_every_check(root: Path) -> None:
    text = (root / "docs" / "doctor.md").read_text(encoding="utf-8")
    got = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert got == list(CHECKS), f"expected {list(CHECKS)}, got {got}"
