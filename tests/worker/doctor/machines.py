"""Machines with given facts for tests of the doctor, and an assertion on a check's finding."""

from pathlib import Path
from typing import Any

from worker.config.compile import CompileConfig
from worker.config.service import Config, default_config
from worker.doctor.__main__ import examine
from worker.doctor.facts import FolderFacts, MediaFacts, ModelFacts, ProgramFacts, Requirement, TorchFacts, TorchGpu
from worker.doctor.findings import GIB, MIB, Level
from worker.doctor.machine import Machine

H200 = TorchGpu("NVIDIA H200", (9, 0), 139 * GIB, 138 * GIB)
ON_GPU = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    architectures=("sm_75", "sm_80", "sm_90", "compute_120"),
    gpus=(H200, H200),
    driver_cuda=(13, 0),
    triton="3.7.0",
    triton_required="3.7.0",
)
ON_CPU = TorchFacts(version="2.13.0+cpu")
REAL_MODEL = ModelFacts(n_files=4, n_bytes=18 * GIB, n_values=9_300_000_000, row_values=73_728)


def settings(**sections: dict[str, Any]) -> Config:
    """The defaults with some of their keys replaced."""
    config = default_config()
    changed = {name: getattr(config, name).model_copy(update=given) for name, given in sections.items()}
    return config.model_copy(update=changed)


def compiling(**settings_: Any) -> dict[str, Any]:
    return {"compile": CompileConfig(enabled=True, **settings_)}


EAGER = {"compile": CompileConfig(enabled=False)}


def machine(config: Config | None = None, environ: dict[str, str] | None = None, **facts: Any) -> Machine:
    """A machine with two GPUs on which every check passes, with these facts replaced."""
    made = Machine(None, environ or {})
    healthy = {
        "_loaded": (config or default_config(), "/root/config.json", None),
        "python": (3, 12, 1),
        "python_headers": Path("/usr/include/Python.h"),
        "requirements": [Requirement("torch", ">=2.10,<2.14", "2.13.0+cu130")],
        "torch": ON_GPU,
        "n_gpus": 2,
        "driver_version": "580.65.06",
        "cpp_compiler": ProgramFacts("/usr/bin/g++", "g++ 12.2.0"),
        "c_compiler": ProgramFacts("/usr/bin/gcc", "gcc 12.2.0"),
        "ffmpeg": ProgramFacts("/usr/bin/ffmpeg", "ffmpeg version 7.1 Copyright (c) 2000-2025"),
        "taken_ports": {},
        "own_ports": frozenset(),
        "cache_folder": FolderFacts(Path("/cache"), True, 100 * GIB, 300, 40 * MIB),
        "data_folder": FolderFacts(Path("/data"), True, 100 * GIB),
        "model": REAL_MODEL,
        "checked_files": (9, ""),
        "tokenizer_error": None,
        "vocoder_files": dict.fromkeys(
            ("flow.yaml", "flow.pt", "hift.pt", "campplus.onnx", "speech_tokenizer_v2_25hz.onnx"), MIB
        ),
        "warmup_video": MediaFacts("frames and sound, 00:00:12.00"),
        "voice": MediaFacts("5.0 s at 16000 Hz"),
        "free_memory": 64 * GIB,
        "max_open_files": 65_536,
        "n_fitting": lambda kv_layout, total: 64,
    }
    vars(made).update({**healthy, **facts})
    return made


def check(name: str, made: Machine, level: Level, *said: str) -> None:
    """Run one check; `said` are parts of its observation, or of its remedy after `->`."""
    [found] = examine(made, [name])
    text = f"{found.found}\n-> {found.remedy}"
    assert found.level is level, f"{name}: expected {level}, got {found}"
    for part in said:
        assert part in text, f"{name}: expected {part!r} in the finding, got {text!r}"
    assert found.remedy or level is not Level.PROBLEM, f"{name}: a problem without a remedy: {found}"


OK, NOTE, PROBLEM = Level.OK, Level.NOTE, Level.PROBLEM
