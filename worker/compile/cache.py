"""The folder of compiled kernels: whether what lies in it fits this worker, is whole, and what it saved.

torch keeps its kernels and graphs there and finds them by their content. Beside them each worker keeps one manifest and
one portable artifact of its own, named by a key of everything that compiled code depends on; several workers share the
folder without locks, since nobody writes another's files and all are put in place at once. Nothing in the folder is
trusted before its digest is checked, and a bad cache never stops a worker: what is bad is removed and compiled again.

Knows files and digests. Does not know what is compiled, what an artifact holds (`kernel_archive`), nor the environment:
whoever starts the process points torch at the folder before it is imported.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch

from models.atomic_file import PENDING, write_atomically
from models.graphs.kernel_support import LoadedKernels
from worker.assembly.parts import EngineParts
from worker.compile.kernel_archive import pack, unpack
from worker.config.compile import CompileConfig
from worker.version import VERSION

LOG = logging.getLogger(__name__)

OURS = "manifests"
SOURCES = Path(__file__).resolve().parents[2] / "models"  # of everything that is compiled, kernels of our own among it
ARTIFACT_MAGIC = b"duologue compile artifact 2\n"
DIGEST_BYTES = 16
MAX_SHOWN = 5  # problems of one kind that are told one by one
REPORTS = "reports"
NOT_KERNELS = {OURS, REPORTS, "locks", "voices"}  # what else lies in the folder
NOT_FILES = (".lock", PENDING)
COMPILING = ".compiling"
DRIVER = Path("/proc/driver/nvidia/version")


class CacheState(StrEnum):
    NEW = "new"  # nothing of any worker
    WARM = "warm"  # this worker's, and whole
    STALE = "stale"  # of this device, but of another model, other settings or other versions
    FOREIGN = "foreign"  # of other devices only
    REPAIRED = "repaired"  # this worker's, less what was damaged


@dataclass
class CacheReport:
    """What the folder was worth. problems: in words. cold_s: seconds without it, if known. this_s: seconds with it."""

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


def facts_of(parts: EngineParts, config: CompileConfig) -> dict[str, str]:
    """Everything that decides whether compiled code fits, by name."""
    device = parts.model.device
    tables = [parts.duplex.runner.regions, *([parts.vocoder.regions] if parts.vocoder is not None else [])]
    shapes: list[Any] = [asdict(table.shapes) for table in tables]
    shapes += [(name, list(p.shape), str(p.dtype)) for table in tables for name, p in table.root.named_parameters()]
    return {
        "device": device_name(device),
        "driver": _driver() if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "duologue": VERSION,
        "model": digest(json.dumps([parts.n_slots, *shapes]).encode()),
        "settings": digest(config.model_dump_json().encode()),
        # A CPU's kernels are written for a number of threads.
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "any",
    }


def device_name(device: torch.device) -> str:
    """GPU and its capability, or the CPU's instructions."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} {major}.{minor}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


class CompileCache:
    """One worker's view of the folder. `open` before compiling, `record` behind it; neither ever raises.

    has_everything: these very sources had a start of this key in which nothing failed, and all that it left is there.
    """

    def __init__(self, folder: Path, facts: dict[str, str]):
        self._folder, self._facts = folder, facts
        self._ours = folder / OURS
        self.key = digest(json.dumps(facts, sort_keys=True).encode())
        self.report = CacheReport(str(folder), self.key, CacheState.NEW)
        self.has_everything = False

    @classmethod
    def open(cls, folder: Path, facts: dict[str, str], *, artifact: Path | None = None) -> Self:
        """Check what is there, remove what is damaged, and hand torch the portable artifact if files are missing.

        Args: facts: of this worker, as `facts_of` gives them. artifact: one from elsewhere, used before the folder's.
        """
        cache = cls(folder, facts)
        try:
            cache._ours.mkdir(parents=True, exist_ok=True)
            cache._clear_unfinished()
            is_whole = cache._check()
            cache._pending_path.write_text(str(os.getpid()))
            if artifact is not None or not is_whole:
                cache._load(artifact or cache._artifact_path)
        except Exception as error:  # whatever lies there, the worker compiles
            cache._problem(f"folder {folder}: {_told(error)}")
        return cache

    def record(self, hits: int, misses: int, seconds: float, *, is_whole: bool = True) -> CacheReport:
        """Say what compiling took with this cache, and write down what the folder holds now. is_whole: nothing failed,
        so that the seconds say what all of it takes, and the next start need not look for what is left to be made.
        """
        report = self.report
        report.hits, report.misses, report.this_s = hits, misses, seconds
        if report.cold_s is None and misses > hits and is_whole:
            report.cold_s = seconds
        try:
            self._ours.mkdir(parents=True, exist_ok=True)
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
            self._problem(f"not written down: {_told(error)}")
        LOG.info("%s", report)
        return report

    @property
    def _manifest_path(self) -> Path:
        return self._ours / f"{self.key}.json"

    @property
    def _pending_path(self) -> Path:
        """There while this process compiles."""
        return self._ours / f"{self.key}.{os.getpid()}{COMPILING}"

    @property
    def _artifact_path(self) -> Path:
        return self._ours / f"{self.key}.artifact"

    def _problem(self, text: str) -> None:
        self.report.problems.append(text)
        LOG.warning("compile cache: %s", text)

    # --- checking ------------------------------------------------------------------------------

    def _clear_unfinished(self) -> None:
        """A process that was killed while it compiled may have left half a file, which the compiler takes for a whole
        one: nothing stays of it that no manifest vouches for.
        """
        marks = list(self._ours.glob(f"*{COMPILING}"))
        if not marks or any(map(_is_running, marks)):  # what somebody is writing now is not doubtful
            return
        known: set[str] = set()
        for path in self._ours.glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                known |= set(json.loads(path.read_bytes())["files"])
        doubtful = [name for name in self._kernels() if name not in known]
        for name in doubtful:
            (self._folder / name).unlink(missing_ok=True)
        for path in marks:
            path.unlink(missing_ok=True)
        if doubtful:
            self._problem(f"a start was interrupted; {len(doubtful)} files that it may have left unfinished removed")

    def _check(self) -> bool:
        """Set the state, and remove what is not as it was. Returns: whether everything that was there still is."""
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
            self._problem(f"{len(missing)} files are gone: {_some(missing)}")
        self.report.state = CacheState.REPAIRED if damaged or missing else CacheState.WARM
        self.has_everything = self.report.state is CacheState.WARM and manifest.get("sources") == _sources()
        return not damaged and not missing

    def _read(self) -> dict[str, Any] | None:
        """The manifest; None if it is not one, or not this worker's."""
        try:
            manifest = json.loads(self._manifest_path.read_bytes())
            cold, files = manifest["cold_seconds"], manifest["files"]
            is_sound = manifest["facts"] == self._facts and (cold is None or isinstance(cold, int | float))
            for name, (size, known) in files.items():
                is_sound &= isinstance(size, int) and isinstance(known, str) and self._is_inside(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return manifest if is_sound else None

    def _is_inside(self, name: str) -> bool:
        path = Path(name)
        return not path.is_absolute() and ".." not in path.parts and path.parts[:1] != (OURS,)

    def _others(self) -> CacheState:
        """What the manifests of others say of the folder."""
        devices = []
        for path in self._ours.glob("*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                devices.append(json.loads(path.read_bytes())["facts"]["device"])
        if not devices:
            return CacheState.NEW
        return CacheState.STALE if self._facts["device"] in devices else CacheState.FOREIGN

    def _kernels(self) -> list[str]:
        """torch's files, relative to the folder."""
        found = []
        for path in self._folder.rglob("*"):
            name = path.relative_to(self._folder)
            if name.parts[0] not in NOT_KERNELS and not path.name.endswith(NOT_FILES) and path.is_file():
                found.append(name.as_posix())
        return sorted(found)

    # --- the portable artifact -----------------------------------------------------------------

    def _save(self) -> None:
        """As one file that another folder can be filled from."""
        ours = [name for name in self._kernels() if Path(name).parent.name in LoadedKernels.folders]
        data = pack(self._folder, ours)
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
            told = json.loads(head) if content.startswith(ARTIFACT_MAGIC) else {}
            is_whole = told["digest"] == digest(data)
        except (ValueError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            self._problem(f"artifact {path.name} is damaged; not used")
            if path == self._artifact_path:
                path.unlink(missing_ok=True)
        elif told.get("facts") != self._facts:
            other = sorted(name for name in self._facts if told.get("facts", {}).get(name) != self._facts[name])
            self._problem(f"artifact {path.name} is for another {', '.join(other)}; not used")
        elif not unpack(data, self._folder):
            self._problem(f"artifact {path.name}: torch does not take it")


def _sources() -> str:
    """Digest of all that is compiled: a release keeps its version while it is worked on."""
    files = sorted(SOURCES.rglob("*.py"))
    return digest(b"".join(str(file.relative_to(SOURCES)).encode() + file.read_bytes() for file in files))


def _entry(path: Path) -> list[Any]:
    """Size and digest."""
    data = path.read_bytes()
    return [len(data), digest(data)]


def _is_running(path: Path) -> bool:
    """Whether the process that left this mark still runs. Our own number is that of one that ended before us."""
    try:
        number = int(path.read_text())
        os.kill(number, 0)
    except (OSError, ValueError):
        return False
    return number != os.getpid()


def _some(names: list[str]) -> str:
    return ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _driver() -> str:
    with suppress(OSError, IndexError):
        return DRIVER.read_text().splitlines()[0].strip()
    return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
