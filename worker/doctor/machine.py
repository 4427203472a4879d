"""Finds facts out: about programs, files, ports, memory, torch and the settings. Each only when it is asked for.

Knows where facts are; judges nothing. What may be missing on a broken machine is imported where it is used.
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
from typing import TYPE_CHECKING

from worker.doctor.checkpoint_facts import checkpoint_facts
from worker.doctor.facts import (
    FolderFacts,
    MediaFacts,
    ModelFacts,
    NotKnown,
    ProgramFacts,
    Requirement,
    TorchFacts,
    TorchGpu,
)

if TYPE_CHECKING:
    from worker.config.service import Config

ROOT = Path(__file__).resolve().parents[2]
TORCH_S = 180  # a cold disk and a sleeping GPU included
PROGRAM_S = 30
MAX_FILES = 100_000  # of a cache folder that are counted
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
DRIVER = Path("/proc/driver/nvidia/version")


class Machine:
    """This machine, with these settings. Every property is found out once; tests set them instead.

    Raises (from a property): NotKnown if a fact cannot be had.
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
        """The dependencies of `pyproject.toml` and what is installed of them."""
        try:
            lines = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
        except (OSError, ValueError, KeyError) as error:
            raise NotKnown(f"pyproject.toml cannot be read: {error}") from None
        return [_requirement(line) for line in lines]

    @cached_property
    def torch(self) -> TorchFacts:
        command = [sys.executable, "-m", "worker.doctor.torch_probe"]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TORCH_S)
        except subprocess.TimeoutExpired:
            return TorchFacts(errors={"torch": f"no answer within {TORCH_S} s"})
        try:
            said = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
            return TorchFacts(errors={"torch": f"the process ended with {done.returncode}: {last}"})
        return _torch_facts(said)

    @cached_property
    def n_gpus(self) -> int | None:
        """GPUs that the driver has, hidden ones included; None if it does not say."""
        if not (program := shutil.which("nvidia-smi")):
            return None
        said = _output([program, "-L"])
        return None if said is None else sum(line.startswith("GPU ") for line in said.splitlines())

    @cached_property
    def driver_version(self) -> str | None:
        """The GPU driver's own number, such as 570.124.06; None if the system does not tell."""
        try:
            found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", DRIVER.read_text().partition("\n")[0])
        except OSError:
            return None
        return found and found[0]

    @cached_property
    def cpp_compiler(self) -> ProgramFacts:
        return _program([self.environ.get("CXX"), "g++", "clang++"])

    @cached_property
    def c_compiler(self) -> ProgramFacts:
        return _program([self.environ.get("CC"), "gcc", "clang"])

    @cached_property
    def ffmpeg(self) -> ProgramFacts:
        """The one on the PATH, else the one that a dependency ships."""
        found = _program(["ffmpeg"], "-version")
        if found.path:
            return found
        try:
            import imageio_ffmpeg

            return _program([imageio_ffmpeg.get_ffmpeg_exe()], "-version")
        except (ImportError, RuntimeError) as error:
            return ProgramFacts(None, error=str(error))

    # --- the settings and what they name ---

    @cached_property
    def _loaded(self) -> "tuple[Config, str, str | None]":
        try:
            from models.errors import ModelError
            from worker.config.service import FILE_NAME, default_config, load_config
        except ImportError as error:
            raise NotKnown(f"the settings need what is not installed: {error}") from None
        path = self._config_path or ROOT / FILE_NAME
        try:
            config, notes = load_config(self._config_path, flags={}, environ=self.environ)
        except ModelError as error:
            return default_config(), str(path), str(error)
        return config, "\n".join([str(path) if path.exists() else "no file, all defaults", *notes]), None

    @property
    def config(self) -> "Config":
        """The settings; where they do not load, the defaults."""
        return self._loaded[0]

    @property
    def config_text(self) -> str:
        """Where the settings come from, and a line for each that does nothing."""
        return self._loaded[1]

    @property
    def config_error(self) -> str | None:
        return self._loaded[2]

    @cached_property
    def taken_ports(self) -> dict[int, str]:
        """Port -> why it cannot be had, of the gateway's and one for each GPU's worker."""
        service = self.config.service
        ports = [service.gateway_port, *(service.worker_base_port + i for i in range(max(1, len(self.torch.gpus))))]
        return {port: why for port in ports if (why := _port_problem(port))}

    @cached_property
    def cache_folder(self) -> FolderFacts:
        return _folder(self.config.service.cache_dir)

    @cached_property
    def _checkpoint(self) -> tuple[Path | None, str | None]:
        """The checkpoint's folder, and what keeps a worker from loading it; both None before a download."""
        try:
            from models.errors import CheckpointError
            from worker.assembly.hub import cached
            from worker.config.hub_id import hub_id
        except ImportError as error:
            raise NotKnown(f"checkpoints need what is not installed: {error}") from None
        path = self.config.model.model_path
        if (name := hub_id(path)) is None:
            return path, None
        try:
            return cached(name), None
        except ImportError as error:
            raise NotKnown(f"model ids need what is not installed: {error}") from None
        except CheckpointError as error:
            return None, str(error)

    @property
    def checkpoint(self) -> Path:
        """The folder of the model; of a model id, its snapshot in the Hugging Face cache.

        Raises: NotKnown for a model id that is not in the cache.
        """
        folder, problem = self._checkpoint
        if folder is None:
            name = self.config.model.model_path
            raise NotKnown(problem or f"{name} is not in the Hugging Face cache; workers download it when they start")
        return folder

    @cached_property
    def model(self) -> ModelFacts:
        _, problem = self._checkpoint
        return ModelFacts(problems=(problem,)) if problem else checkpoint_facts(self.checkpoint)

    @cached_property
    def tokenizer_error(self) -> str | None:
        try:
            from models.inputs.tokens import Tokenizer
        except ImportError as error:
            raise NotKnown(f"tokenizers need what is not installed: {error}") from None
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
        """File -> bytes, of the vocoder's folder; empty if there is none."""
        folder = self.vocoder_folder
        return {file.name: file.stat().st_size for file in folder.iterdir()} if folder.is_dir() else {}

    @cached_property
    def warmup_video(self) -> MediaFacts:
        return _video(self.config.service.warmup_video, self.ffmpeg)

    @cached_property
    def voice(self) -> MediaFacts | None:
        """The default reference voice; None if none is asked for."""
        path = self.config.audio.ref_audio_path
        return None if path is None else _sound(path)

    # --- room ---

    @cached_property
    def free_memory(self) -> int:
        """Bytes that can be had, within the limit of the container if there is one."""
        try:
            free = 1024 * _counts(MEMINFO)["MemAvailable"]
        except (OSError, KeyError):
            raise NotKnown(f"no {MEMINFO}") from None
        try:
            limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
            # Files that were read count as used until somebody needs the room.
            return min(free, limit - used + _counts(CGROUP / "memory.stat")["inactive_file"])
        except (OSError, ValueError, KeyError):  # no container, or one without a limit
            return free

    @property
    def on_gpu(self) -> bool:
        """Whether the settings make a worker run on a GPU, as far as there is one."""
        device = self.config.model.device
        return device.startswith("cuda") or (device == "auto" and bool(self.torch.gpus))

    @property
    def compiles(self) -> bool:
        """Whether a worker with these settings compiles on the device that it will use."""
        return self.config.compile.enabled_on("cuda" if self.on_gpu else "cpu")

    @property
    def least_model_bytes(self) -> int:
        """Bytes of the model's weights and one session's context, as wide as they will be."""
        width = {"float32": 4, "bfloat16": 2, "auto": 2 if self.on_gpu else 4}[self.config.model.dtype]
        return width * (self.model.n_values + self.model.row_values * self.config.duplex.context_rows)

    @cached_property
    def most_open_files(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _counts(path: Path) -> dict[str, int]:
    """Name -> number, of a file with one pair a line."""
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


def _torch_facts(said: dict) -> TorchFacts:
    gpus = tuple(TorchGpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in said.pop("gpus", ()))
    driver = said.pop("driver", None)
    architectures = tuple(said.pop("architectures", ()))
    return TorchFacts(gpus=gpus, driver=driver and tuple(driver), architectures=architectures, **said)


def _program(names: Sequence[str | None], flag: str = "--version") -> ProgramFacts:
    for name in filter(None, names):
        if not (path := shutil.which(name.split()[0])):  # CXX may carry flags
            continue
        said = _output([path, flag])
        if not said:
            return ProgramFacts(path, error=f"{path} {flag} does not run")
        return ProgramFacts(path, said.splitlines()[0])
    return ProgramFacts(None)


def _output(command: Sequence[str]) -> str | None:
    """What a program says; None if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PROGRAM_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _port_problem(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port left lately is free
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
    sizes = [_size(file) for file in islice(path.rglob("*"), MAX_FILES)] if path.is_dir() else []
    files = [size for size in sizes if size is not None]
    runs_code = not disk.f_flag & os.ST_NOEXEC
    free = disk.f_bavail * disk.f_frsize
    return FolderFacts(path, path.is_dir(), free, len(files), sum(files), problem, runs_code)


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:  # gone meanwhile, or not ours to see
        return None


def _sound(path: Path) -> MediaFacts:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise NotKnown(f"sound files need what is not installed: {error}") from None
    try:
        info = soundfile.info(str(path))
    except Exception as error:
        return MediaFacts(error="no such file" if not path.is_file() else str(error))
    if not 0.5 <= info.duration <= 30:
        return MediaFacts(error=f"expected 0.5 to 30 s of sound, got {info.duration:.2f} s")
    return MediaFacts(f"{info.duration:.1f} s at {info.samplerate} Hz")


def _video(path: Path, ffmpeg: ProgramFacts) -> MediaFacts:
    if not path.is_file():
        return MediaFacts(error="no such file")
    if not ffmpeg.path:
        raise NotKnown("without ffmpeg videos cannot be looked at")
    command = [ffmpeg.path, "-nostdin", "-hide_banner", "-i", str(path), "-t", "1", "-f", "null", "-"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PROGRAM_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return MediaFacts(error=f"ffmpeg: {error}")
    said = done.stderr.strip().splitlines()
    if done.returncode:
        return MediaFacts(error=f"ffmpeg: {said[-1] if said else done.returncode}")
    kinds = [kind for kind in ("Video", "Audio") if any("Stream #0" in line and f" {kind}: " in line for line in said)]
    if len(kinds) < 2:
        return MediaFacts(error=f"expected pictures and sound, got {kinds[0] + ' only' if kinds else 'neither'}")
    length = next((line.split()[1].rstrip(",") for line in said if line.strip().startswith("Duration:")), "unknown")
    return MediaFacts(f"pictures and sound, {length}")
