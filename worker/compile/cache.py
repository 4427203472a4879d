"""The folder of compiled kernels: whether it fits this worker and is complete, and the time that it saved.

torch stores kernels and graphs there and finds them by their content. Beside them each worker writes one manifest and
one portable artifact, named by a key of everything that compiled code depends on. Several workers share the folder
without locks, because each writes its own files only, and atomically. No file is trusted before its digest is checked.
A bad cache never stops a worker: bad files are removed and compiled again.

Contains files and digests; the artifact's contents are in `kernel_archive`. The main module of a program sets torch's
folder in the environment before it imports torch.
"""

import hashlib
import json
import logging
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, cast

import torch

from models.atomic_file import PENDING, write_atomically
from models.graphs.kernel_support import LoadedKernels
from worker.assembly.parts import EngineParts
from worker.compile.kernel_archive import pack, unpack
from worker.config.compile import CompileConfig
from worker.log import first_line
from worker.version import VERSION, driver_version, package_version

LOG = logging.getLogger(__name__)

MANIFESTS = "manifests"
SOURCES = Path(__file__).resolve().parents[2] / "models"  # everything that is compiled, the project's kernels included
ARTIFACT_MAGIC = b"duologue compile artifact 2\n"
DIGEST_BYTES = 16
MAX_SHOWN = 5  # file names in one message
REPORTS = "reports"
NOT_KERNELS = {MANIFESTS, REPORTS, "locks", "voices"}  # other subfolders
NOT_FILES = (".lock", PENDING)
COMPILING = ".compiling"


class CacheState(StrEnum):
    NEW = "new"  # no manifest
    WARM = "warm"  # this worker's, complete
    STALE = "stale"  # of this device, for another model, other settings or other versions
    FOREIGN = "foreign"  # of other devices only
    REPAIRED = "repaired"  # this worker's, without files that were damaged


@dataclass
class CacheReport:
    """The state of the folder, and the result of using it.

    Attributes:
        problems: a sentence each.
        cold_s: seconds of compiling without the cache, if known.
        this_s: seconds of compiling at this start.
    """

    folder: str
    key: str
    state: CacheState
    problems: list[str] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    cold_s: float | None = None
    this_s: float | None = None

    def __str__(self) -> str:
        line = f"compile cache: {self.hits} hits, {self.misses} misses"
        if self.this_s is not None:
            line += f", {self.this_s:.1f} s"
        if self.cold_s is not None:
            line += f" (cold {self.cold_s:.1f} s)"
        return "; ".join([line, *([] if self.state is CacheState.WARM else [str(self.state)]), *self.problems])


def cache_facts(parts: EngineParts, config: CompileConfig) -> dict[str, str]:
    """Name -> value of everything that compiled code depends on."""
    device = parts.model.device
    tables = [parts.unit_steps.regions, *([parts.vocoder.regions] if parts.vocoder is not None else [])]
    shapes: list[Any] = [asdict(table.shapes) for table in tables]
    shapes += [(name, list(p.shape), str(p.dtype)) for table in tables for name, p in table.root.named_parameters()]
    if parts.kv_layout == "pages":
        shapes.append("pages")
    if parts.model.has_decode_copy:
        shapes.append("decode copy")
    return {
        "device": device_name(device),
        "driver": (driver_version() or "unknown") if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "triton": package_version("triton") or "none",
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "duologue": VERSION,
        "model": digest(json.dumps([parts.n_slots, *shapes]).encode()),
        "settings": digest(config.model_dump_json().encode()),
        # Kernels for a CPU are generated for a number of threads.
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "any",
    }


def device_name(device: torch.device) -> str:
    """The GPU's name and capability, or the CPU's architecture and instruction set."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} {major}.{minor}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


class CompileCache:
    """One worker's view of the folder. Call `open` before compiling and `record` after it; neither raises.

    has_everything: a start with this key and these sources compiled without failure, and all of its files exist.
    """

    def __init__(self, folder: Path, facts: dict[str, str]):
        self._folder, self._facts = folder, facts
        self._manifests = folder / MANIFESTS
        self.key = digest(json.dumps(facts, sort_keys=True).encode())
        self.report = CacheReport(str(folder), self.key, CacheState.NEW)
        self.has_everything = False

    @classmethod
    def open(cls, folder: Path, facts: dict[str, str], *, artifact: Path | None = None) -> Self:
        """Check the files, remove damaged ones, and load the portable artifact into torch if files are missing.

        Args:
            facts: of this worker, from `cache_facts`.
            artifact: one from another folder, in place of this folder's.
        """
        cache = cls(folder, facts)
        try:
            cache._manifests.mkdir(parents=True, exist_ok=True)
            cache._clear_unfinished()
            is_whole = cache._check()
            cache._pending_path.write_text(str(os.getpid()))
            if artifact is not None or not is_whole:
                cache._load(artifact or cache._artifact_path)
        except Exception as error:  # a bad cache must not stop the worker
            cache._problem(f"folder {folder}: {first_line(error)}")
        return cache

    def record(self, hits: int, misses: int, seconds: float, *, is_whole: bool = True) -> CacheReport:
        """Report the time of compiling, and write the manifest of the folder's files.

        Args:
            hits, misses: of compiled graphs and kernels.
            seconds: of compiling.
            is_whole: nothing failed, so that `seconds` covers everything and the next start builds no kernels ahead.
        """
        report = self.report
        report.hits, report.misses, report.this_s = hits, misses, seconds
        if report.cold_s is None and misses > hits and is_whole:
            report.cold_s = seconds
        try:
            self._manifests.mkdir(parents=True, exist_ok=True)
            if misses or not self._artifact_path.is_file():
                self._save()
            manifest = {
                "facts": self._facts,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "cold_seconds": report.cold_s,
                "sources": _sources() if is_whole else None,
                "files": {name: _entry(self._folder / name) for name in self._kernels()},
            }
            write_atomically(self._manifest_path, json.dumps(manifest, indent=1).encode())
            self._pending_path.unlink(missing_ok=True)
        except Exception as error:
            self._problem(f"no manifest written: {first_line(error)}")
        LOG.info("%s", report)
        return report

    @property
    def _manifest_path(self) -> Path:
        return self._manifests / f"{self.key}.json"

    @property
    def _pending_path(self) -> Path:
        """Exists while this process compiles."""
        return self._manifests / f"{self.key}.{os.getpid()}{COMPILING}"

    @property
    def _artifact_path(self) -> Path:
        return self._manifests / f"{self.key}.artifact"

    def _problem(self, text: str) -> None:
        self.report.problems.append(text)
        LOG.warning("compile cache: %s", text)

    # --- checking ------------------------------------------------------------------------------

    def _clear_unfinished(self) -> None:
        """Remove files that no manifest lists, after a process was killed while it compiled.

        Such a process may leave incomplete files, and the compiler does not detect them.
        """
        marks = list(self._manifests.glob(f"*{COMPILING}"))
        if not marks or any(map(_is_running, marks)):  # files of a running process are not suspect
            return
        known: set[str] = set()
        for path in self._manifests.glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                known |= set(json.loads(path.read_bytes())["files"])
        unlisted = [name for name in self._kernels() if name not in known]
        for name in unlisted:
            (self._folder / name).unlink(missing_ok=True)
        for path in marks:
            path.unlink(missing_ok=True)
        if unlisted:
            self._problem(f"a start was interrupted; {len(unlisted)} possibly incomplete files removed")

    def _check(self) -> bool:
        """Set the state and remove damaged files. Returns: whether all files of the manifest exist undamaged."""
        if not self._manifest_path.exists():
            self.report.state = self._others()
            return False
        manifest = self._read()
        if manifest is None:
            self.report.state = CacheState.REPAIRED
            self._problem("the manifest was damaged; removed")
            self._manifest_path.unlink(missing_ok=True)
            return False
        self.report.cold_s = manifest["cold_seconds"]
        damaged, missing = [], []
        for name, expected in manifest["files"].items():
            path = self._folder / name
            if not path.is_file():
                missing.append(name)
            elif _entry(path) != expected:
                damaged.append(name)
                path.unlink(missing_ok=True)
        if damaged:
            self._problem(f"{len(damaged)} damaged files removed: {_some(damaged)}")
        if missing:
            self._problem(f"{len(missing)} files are missing: {_some(missing)}")
        self.report.state = CacheState.REPAIRED if damaged or missing else CacheState.WARM
        self.has_everything = self.report.state is CacheState.WARM and manifest.get("sources") == _sources()
        return not damaged and not missing

    def _read(self) -> dict[str, Any] | None:
        """The manifest; None if it is damaged or of another worker."""
        try:
            manifest = json.loads(self._manifest_path.read_bytes())
            cold, files = manifest["cold_seconds"], manifest["files"]
            is_sound = manifest["facts"] == self._facts and (cold is None or isinstance(cold, int | float))
            for name, (size, known) in files.items():
                is_sound &= isinstance(size, int) and isinstance(known, str) and self._is_inside(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return cast(dict[str, Any], manifest) if is_sound else None

    def _is_inside(self, name: str) -> bool:
        path = Path(name)
        return not path.is_absolute() and ".." not in path.parts and path.parts[:1] != (MANIFESTS,)

    def _others(self) -> CacheState:
        """The folder's state according to other workers' manifests."""
        devices = []
        for path in self._manifests.glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                devices.append(json.loads(path.read_bytes())["facts"]["device"])
        if not devices:
            return CacheState.NEW
        return CacheState.STALE if self._facts["device"] in devices else CacheState.FOREIGN

    def _kernels(self) -> list[str]:
        """Names of torch's files, relative to the folder."""
        found = []
        for path in self._folder.rglob("*"):
            name = path.relative_to(self._folder)
            if name.parts[0] not in NOT_KERNELS and not path.name.endswith(NOT_FILES) and path.is_file():
                found.append(name.as_posix())
        return sorted(found)

    # --- the portable artifact -----------------------------------------------------------------

    def _save(self) -> None:
        """Write the portable artifact, from which another folder can be filled."""
        kernels = [name for name in self._kernels() if Path(name).parent.name in LoadedKernels.folders]
        data = pack(self._folder, kernels)
        if data is None:
            return
        head = json.dumps({"facts": self._facts, "digest": digest(data)}).encode()
        write_atomically(self._artifact_path, ARTIFACT_MAGIC + head + b"\n" + data)

    def _load(self, path: Path) -> None:
        if not path.is_file():
            if path != self._artifact_path:
                self._problem(f"artifact {path}: expected a file, got none")
            return
        content = path.read_bytes()
        head, _, data = content.removeprefix(ARTIFACT_MAGIC).partition(b"\n")
        try:
            header = json.loads(head) if content.startswith(ARTIFACT_MAGIC) else {}
            is_whole = header["digest"] == digest(data)
        except (ValueError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            self._problem(f"artifact {path.name} is damaged; not used")
            if path == self._artifact_path:
                path.unlink(missing_ok=True)
        elif header.get("facts") != self._facts:
            other = sorted(name for name in self._facts if header.get("facts", {}).get(name) != self._facts[name])
            self._problem(f"artifact {path.name} is for another {', '.join(other)}; not used")
        elif not unpack(data, self._folder):
            self._problem(f"artifact {path.name}: torch does not accept it")


def _sources() -> str:
    """Digest of all compiled sources; the version alone does not change between commits."""
    files = sorted(SOURCES.rglob("*.py"))
    return digest(b"".join(str(file.relative_to(SOURCES)).encode() + file.read_bytes() for file in files))


def _entry(path: Path) -> list[Any]:
    """A file's size and digest."""
    data = path.read_bytes()
    return [len(data), digest(data)]


def _is_running(path: Path) -> bool:
    """Whether the process that wrote this mark runs. A mark with our own pid is from an earlier process."""
    try:
        number = int(path.read_text())
        os.kill(number, 0)
    except (OSError, ValueError):
        return False
    return number != os.getpid()


def _some(names: list[str]) -> str:
    return ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")
