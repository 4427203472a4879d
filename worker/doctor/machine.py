"""Collects facts about programs, files, ports, memory, torch and the settings, each at its first use.

The checks judge the facts. Packages that may be missing on a broken machine are imported where they are used.
"""

import importlib.metadata
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.checkpoint.checksums import ALL
from worker.doctor.checkpoint_facts import checkpoint_facts, compared_files, file_bytes
from worker.doctor.facts import (
    FolderFacts,
    MediaFacts,
    ModelFacts,
    ProgramFacts,
    Requirement,
    TorchFacts,
    TorchGpu,
    UnknownFact,
)
from worker.doctor.media_facts import sound_facts, video_facts
from worker.doctor.own_server import is_ours
from worker.doctor.speech_facts import speech_facts
from worker.version import driver_version

if TYPE_CHECKING:
    from worker.assembly.hub import HubError
    from worker.config.service import Config

ROOT = Path(__file__).resolve().parents[2]
TORCH_S = 180  # includes a cold disk and a GPU that initializes
PROGRAM_S = 30
MAX_FILES = 100_000  # counted in a cache folder
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


class Machine:
    """Facts about this machine with these settings. Each property is computed once; tests assign values instead.

    Raises: UnknownFact, from a property whose fact cannot be collected.
    """

    def __init__(self, config_path: Path | None, environ: Mapping[str, str]):
        self.environ = environ
        self._config_path = config_path

    # --- programs ---

    @cached_property
    def python(self) -> tuple[int, ...]:
        return tuple(sys.version_info[:3])

    @cached_property
    def python_headers(self) -> Path | None:
        """`Python.h`, which compiled kernels include."""
        header = Path(sysconfig.get_paths()["include"]) / "Python.h"
        return header if header.is_file() else None

    @cached_property
    def requirements(self) -> list[Requirement]:
        """The dependencies of `pyproject.toml`, with their installed versions."""
        try:
            lines = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
        except (OSError, ValueError, KeyError) as error:
            raise UnknownFact(f"pyproject.toml cannot be read: {error}") from None
        return [_requirement(line) for line in lines]

    @cached_property
    def torch(self) -> TorchFacts:
        command = [sys.executable, "-m", "worker.doctor.torch_probe"]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TORCH_S)
        except subprocess.TimeoutExpired:
            return TorchFacts(errors={"torch": f"no answer within {TORCH_S} s"})
        try:
            facts = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return TorchFacts(errors={"torch": f"the process exited with {done.returncode}: {last}"})
        return _torch_facts(facts)

    @cached_property
    def n_gpus(self) -> int | None:
        """Number of GPUs that the driver lists, hidden ones included; None if nvidia-smi does not run."""
        if not (program := shutil.which("nvidia-smi")):
            return None
        listing = _output([program, "-L"])
        return None if listing is None else sum(line.startswith("GPU ") for line in listing.splitlines())

    @cached_property
    def driver_version(self) -> str | None:
        return driver_version()

    @cached_property
    def cpp_compiler(self) -> ProgramFacts:
        return _program([self.environ.get("CXX"), "g++", "clang++"])

    @cached_property
    def c_compiler(self) -> ProgramFacts:
        return _program([self.environ.get("CC"), "gcc", "clang"])

    @cached_property
    def ffmpeg(self) -> ProgramFacts:
        """The ffmpeg on the PATH, else that of imageio-ffmpeg."""
        found = _program(["ffmpeg"], "-version")
        if found.path:
            return found
        try:
            import imageio_ffmpeg

            return _program([imageio_ffmpeg.get_ffmpeg_exe()], "-version")
        except (ImportError, RuntimeError) as error:
            return ProgramFacts(None, error=str(error))

    # --- settings, and the files that they name ---

    @cached_property
    def _loaded(self) -> "tuple[Config, str, str | None]":
        try:
            from models.errors import ModelError
            from worker.config.service import FILE_NAME, default_config, load_config
        except ImportError as error:
            raise UnknownFact(f"reading settings needs a package that is not installed: {error}") from None
        path = self._config_path or ROOT / FILE_NAME
        try:
            config, notes = load_config(self._config_path, flags={}, environ=self.environ)
        except ModelError as error:
            return default_config(), str(path), str(error)
        return config, "\n".join([str(path) if path.exists() else "no file, all defaults", *notes]), None

    @property
    def config(self) -> "Config":
        """The settings; the defaults if they do not load."""
        return self._loaded[0]

    @property
    def config_text(self) -> str:
        """The source of the settings, and a line for each key without effect."""
        return self._loaded[1]

    @property
    def config_error(self) -> str | None:
        return self._loaded[2]

    @cached_property
    def taken_ports(self) -> dict[int, str]:
        """Port -> why it cannot be bound, of the gateway's port and the workers' ports, one for each GPU."""
        service = self.config.service
        ports = [service.gateway_port, *(service.worker_base_port + i for i in range(max(1, len(self.torch.gpus))))]
        return {port: why for port in ports if (why := _port_problem(port))}

    @cached_property
    def own_ports(self) -> frozenset[int]:
        """The taken ports at which a gateway or a worker of this program answers."""
        secure = self.config.service.ssl_certfile is not None
        return frozenset(port for port in self.taken_ports if is_ours(port, secure=secure))

    @cached_property
    def cache_folder(self) -> FolderFacts:
        return _folder(self.config.service.cache_dir)

    @cached_property
    def data_folder(self) -> FolderFacts:
        return _folder(self.config.service.data_dir)

    @cached_property
    def _checkpoint(self) -> tuple[Path | None, "HubError | None"]:
        """The checkpoint's folder, and what keeps a worker from loading it; both None before a download."""
        try:
            from worker.assembly.hub import HubError, cached
            from worker.config.hub_id import hub_id
        except ImportError as error:
            raise UnknownFact(f"checkpoints need a package that is not installed: {error}") from None
        path = self.config.model.model_path
        if (name := hub_id(path)) is None:
            return path, None
        try:
            return cached(name), None
        except ImportError as error:
            raise UnknownFact(f"model ids need a package that is not installed: {error}") from None
        except HubError as error:
            return None, error

    @property
    def checkpoint(self) -> Path:
        """The folder of the model; of a model id, its snapshot in the Hugging Face cache.

        Raises: UnknownFact for a model id that is not in the cache.
        """
        folder, error = self._checkpoint
        if folder is None:
            waits = (
                f"{self.config.model.model_path} is not in the Hugging Face cache; workers download it when they start"
            )
            raise UnknownFact(str(error or waits))
        return folder

    @cached_property
    def model(self) -> ModelFacts:
        _, error = self._checkpoint
        if error is not None:
            return ModelFacts(problems=(error.problem,), remedy=error.remedy)
        return checkpoint_facts(self.checkpoint)

    @cached_property
    def checked_files(self) -> tuple[int, str]:
        """As `compared_files`, of the model's folder; of a model id, of the files that are downloaded. Reads all."""
        folder = self.checkpoint
        from worker.assembly.hub import FILES
        from worker.config.hub_id import hub_id

        return compared_files(folder, ALL if hub_id(self.config.model.model_path) is None else FILES)

    @cached_property
    def speech(self) -> ModelFacts | None:
        """The speech model; None if the settings name none. Raises: as `speech_facts`."""
        path = self.config.model.speech_path
        return None if path is None else speech_facts(path)

    @cached_property
    def tokenizer_error(self) -> str | None:
        try:
            from models.inputs.tokens import Tokenizer
        except ImportError as error:
            raise UnknownFact(f"tokenizers need a package that is not installed: {error}") from None
        folder = self.checkpoint
        try:
            Tokenizer.load(folder)
        except Exception as error:
            return str(error)
        return None

    @cached_property
    def vocoder_folder(self) -> Path:
        """Where the vocoder's files are expected."""
        path = self.config.model.token2wav_path
        return path or self.config.engine().model_copy(update={"model_path": self.checkpoint}).token2wav_folder

    @cached_property
    def vocoder_files(self) -> dict[str, int]:
        """File name -> bytes, in the vocoder's folder; empty if the folder does not exist."""
        folder = self.vocoder_folder
        return {file.name: file.stat().st_size for file in folder.iterdir()} if folder.is_dir() else {}

    @cached_property
    def warmup_video(self) -> MediaFacts:
        return video_facts(self.config.service.warmup_video, self.ffmpeg)

    @cached_property
    def voice(self) -> MediaFacts | None:
        """The default reference voice; None if the settings name none."""
        path = self.config.audio.ref_audio_path
        return None if path is None else sound_facts(path)

    # --- memory and devices ---

    @cached_property
    def free_memory(self) -> int:
        """Bytes of available memory, within the container's limit if there is one."""
        try:
            free = 1024 * _counts(MEMINFO)["MemAvailable"]
        except (OSError, KeyError):
            raise UnknownFact(f"no {MEMINFO}") from None
        try:
            limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
            # The page cache counts as used, although the kernel reclaims it on demand.
            return min(free, limit - used + _counts(CGROUP / "memory.stat")["inactive_file"])
        except (OSError, ValueError, KeyError):  # no container, or no limit
            return free

    @property
    def on_gpu(self) -> bool:
        """Whether a worker with these settings runs on a GPU."""
        device = self.config.model.device
        return device.startswith("cuda") or (device == "auto" and bool(self.torch.gpus))

    @property
    def compiles(self) -> bool:
        """Whether a worker with these settings compiles on the device that it will use."""
        return self.config.compile.enabled_on("cuda" if self.on_gpu else "cpu")

    def n_fitting(self, kv_layout: str, total: int) -> int:
        """Slots that the planner computes for a GPU of `total` bytes and these settings with this layout.

        Raises: UnknownFact for a checkpoint that is not there, or that the planner cannot read.
        """
        command = [sys.executable, "-m", "worker.plan", "--json", "--gpu", f"{total / 2**30}GB"]
        command += ["--kv-layout", kv_layout, "--model-path", str(self.checkpoint)]
        command += [] if self._config_path is None else ["--config", str(self._config_path)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env={**self.environ}, capture_output=True, text=True, timeout=TORCH_S
            )
            return int(json.loads(done.stdout)["n_slots"])
        except subprocess.TimeoutExpired:
            raise UnknownFact(f"worker.plan: no answer within {TORCH_S} s") from None
        except (ValueError, KeyError):
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UnknownFact(f"worker.plan exited with {done.returncode}: {last}") from None

    @cached_property
    def max_open_files(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _counts(path: Path) -> dict[str, int]:
    """Name -> number, from a file with one pair in each line."""
    pairs = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs}


def _requirement(line: str) -> Requirement:
    found = re.match(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)", line)
    assert found, line
    name, bounds = found[1], found[2].strip()
    try:
        return Requirement(name, bounds, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Requirement(name, bounds, None)


def _torch_facts(values: dict[str, Any]) -> TorchFacts:
    """Facts from the JSON values of `torch_probe`."""
    gpus = tuple(TorchGpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in values.pop("gpus", ()))
    driver_cuda = values.pop("driver_cuda", None)
    architectures = tuple(values.pop("architectures", ()))
    return TorchFacts(gpus=gpus, driver_cuda=driver_cuda and tuple(driver_cuda), architectures=architectures, **values)


def _program(names: Sequence[str | None], flag: str = "--version") -> ProgramFacts:
    for name in filter(None, names):
        if not (path := shutil.which(name.split()[0])):  # CXX may contain flags
            continue
        output = _output([path, flag])
        if not output:
            return ProgramFacts(path, error=f"{path} {flag} does not run")
        return ProgramFacts(path, output.splitlines()[0])
    return ProgramFacts(None)


def _output(command: Sequence[str]) -> str | None:
    """Stdout of a program; None if it fails or exceeds the time limit."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PROGRAM_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _port_problem(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port in TIME_WAIT is free
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return None


def _folder(path: Path) -> FolderFacts:
    near = next(folder for folder in (path, *path.parents) if folder.exists())
    problem = None
    try:
        with tempfile.TemporaryFile(dir=near):
            pass
    except OSError as error:
        problem = f"{near}: {error.strerror}"
    disk = os.statvfs(near)
    sizes = [file_bytes(file) for file in islice(path.rglob("*"), MAX_FILES)] if path.is_dir() else []
    files = [size for size in sizes if size is not None]
    runs_code = not disk.f_flag & os.ST_NOEXEC
    free = disk.f_bavail * disk.f_frsize
    return FolderFacts(path, path.is_dir(), free, len(files), sum(files), problem, runs_code)
