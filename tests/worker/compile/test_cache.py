"""The compile cache: validation, tolerance of unusable folders, and hits in other processes."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from models.omni import OmniModel
from tests.worker.loop.engines import SmallEngine
from worker.compile import cache as compile_cache
from worker.compile.cache import MANIFESTS, CacheReport, CacheState, CompileCache, cache_facts
from worker.config.compile import CompileConfig

FACTS = {"device": "card 9.0", "torch": "2.13.0", "model": "m", "settings": "s"}
KERNELS = {"fxgraph/aa/one": b"graph" * 50, "bb/two.so": b"\x7fELF" * 90}
# Compiles matrix products, which need no C++ compiler, in a process for each line of folder and artifact; prints hits,
# misses, state and problems. The compiler is imported once, and each process is forked before anything is compiled.
PROGRAM = """
import json, os, sys, torch
import torch._inductor.compile_fx
from pathlib import Path
from torch._dynamo.utils import counters
from worker.compile.cache import CompileCache

def compile_in(folder, artifact):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    facts = {"device": "here", "torch": torch.__version__}
    cache = CompileCache.open(Path(folder), facts, artifact=Path(artifact) if artifact else None)
    compiled = torch.compile(lambda x: x @ x @ x, dynamic=True)
    with torch.no_grad():
        out = compiled(torch.eye(8) * 3)
    inductor = counters["inductor"]
    report = cache.record(inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"], 1.0)
    print(json.dumps([report.hits, report.misses, report.state, report.problems, float(out.sum())]), flush=True)

for line in sys.stdin:
    child = os.fork()
    if not child:
        compile_in(*json.loads(line))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("expected exit status 0")
"""


@pytest.fixture(autouse=True)
def no_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the compiler, and ignore artifacts of this test process."""
    import torch._inductor

    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"everything", None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: data)


def fill(folder: Path) -> None:
    for name, data in KERNELS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def recorded(folder: Path, **facts: str) -> CompileCache:
    """A cache with the record of a complete start."""
    cache = CompileCache.open(folder, FACTS | facts)
    fill(folder)
    cache.record(0, 5, 81.0)
    return cache


def reopened(folder: Path, **facts: str) -> CacheReport:
    return CompileCache.open(folder, FACTS | facts).report


def test_state_is_new_then_warm(tmp_path: Path) -> None:
    report = recorded(tmp_path / "cache").report
    assert (report.state, report.problems, report.cold_s) == (CacheState.NEW, [], 81.0)
    again = CompileCache.open(tmp_path / "cache", FACTS)
    assert (again.report.state, again.report.problems) == (CacheState.WARM, [])
    assert str(again.record(5, 0, 12.34)) == "compile cache: 5 hits, 0 misses, 12.3 s (cold 81.0 s)"
    assert reopened(tmp_path / "cache").cold_s == 81.0, "expected the cold start to stay known"


def has_everything(folder: Path, **facts: str) -> bool:
    return CompileCache.open(folder, FACTS | facts).has_everything


def test_is_complete_after_a_start_without_failures(tmp_path: Path) -> None:
    cache = CompileCache.open(tmp_path, FACTS)
    fill(tmp_path)
    assert not cache.has_everything and not has_everything(tmp_path), "expected half a start not to count"
    fill(tmp_path)
    cache.record(0, 5, 81.0, is_whole=False)
    assert reopened(tmp_path).state is CacheState.WARM and not has_everything(tmp_path)
    recorded(tmp_path)
    assert has_everything(tmp_path) and not has_everything(tmp_path, torch="2.11.0")
    (tmp_path / "bb/two.so").write_bytes(b"damaged")
    assert not has_everything(tmp_path)


def test_is_incomplete_after_sources_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, cache = tmp_path / "sources", tmp_path / "cache"
    (sources / "kernels").mkdir(parents=True)
    monkeypatch.setattr(compile_cache, "SOURCES", sources)
    source = sources / "kernels" / "product.py"
    for text, expected in (("x = 1", True), ("x = 2", False)):
        source.write_text(text)
        if expected:
            recorded(cache)
        assert has_everything(cache) is expected and reopened(cache).state is CacheState.WARM


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"torch": "2.11.0"}, CacheState.STALE),
        ({"model": "n"}, CacheState.STALE),
        ({"device": "other 8.0"}, CacheState.FOREIGN),
    ],
)
def test_state_is_stale_or_foreign_for_other_facts(tmp_path: Path, other: dict[str, str], expected: CacheState) -> None:
    recorded(tmp_path, **other)
    report = reopened(tmp_path)
    assert (report.state, report.problems, report.cold_s) == (expected, [], None)
    assert str(expected) in str(report)


def test_workers_share_the_folder(tmp_path: Path) -> None:
    recorded(tmp_path)
    recorded(tmp_path, device="other 8.0")
    assert reopened(tmp_path).state is reopened(tmp_path, device="other 8.0").state is CacheState.WARM
    assert len(list((tmp_path / MANIFESTS).glob("*.json"))) == 2


@pytest.mark.parametrize("damage", [b"", b"graph", b"grapX" * 50])
def test_damaged_files_are_removed_and_named(tmp_path: Path, damage: bytes) -> None:
    recorded(tmp_path)
    bad = tmp_path / "fxgraph/aa/one"
    bad.write_bytes(damage)
    report = reopened(tmp_path)
    assert report.state is CacheState.REPAIRED and "fxgraph/aa/one" in report.problems[0], report
    assert not bad.exists() and (tmp_path / "bb/two.so").exists()
    recorded(tmp_path)
    assert reopened(tmp_path).state is CacheState.WARM


def test_names_missing_files(tmp_path: Path) -> None:
    recorded(tmp_path)
    (tmp_path / "bb/two.so").unlink()
    report = reopened(tmp_path)
    assert report.state is CacheState.REPAIRED and "1 files are missing: bb/two.so" in report.problems, report


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"facts": {}, "cold_seconds": 1, "files": {}}',
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({"facts": FACTS, "cold_seconds": "x", "files": {}}).encode(),
        json.dumps({"facts": FACTS, "cold_seconds": 1, "files": {"../outside": [1, "x"]}}).encode(),
        json.dumps({"facts": FACTS, "cold_seconds": 1, "files": {"a": 5}}).encode(),
    ],
)
def test_a_damaged_manifest_is_removed(tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "cache"
    (tmp_path / "outside").write_bytes(b"foreign")
    cache = recorded(folder)
    manifest = folder / MANIFESTS / f"{cache.key}.json"
    manifest.write_bytes(damage)
    report = reopened(folder)
    assert report.state is CacheState.REPAIRED and "manifest was damaged" in report.problems[0], report
    assert not manifest.exists() and (tmp_path / "outside").read_bytes() == b"foreign"


def test_does_not_load_a_damaged_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: loaded.append(data) or data)
    cache = recorded(tmp_path)
    artifact = tmp_path / MANIFESTS / f"{cache.key}.artifact"
    good = artifact.read_bytes()
    elsewhere = tmp_path / "elsewhere"
    assert CompileCache.open(elsewhere, FACTS, artifact=artifact).report.problems == [] and loaded == [b"everything"]
    other = CompileCache.open(elsewhere, FACTS | {"torch": "2.11.0"}, artifact=artifact).report
    assert "for another torch" in other.problems[0] and len(loaded) == 1
    for bad in (good[:-1], good[:-30] + bytes([good[-30] ^ 1]) + good[-29:], b"", b"garbage\n"):
        artifact.write_bytes(bad)
        assert "is damaged" in CompileCache.open(elsewhere, FACTS, artifact=artifact).report.problems[0]
    assert len(loaded) == 1, "expected nothing damaged to be loaded"
    missing = CompileCache.open(elsewhere, FACTS, artifact=tmp_path / "none").report
    assert "expected a file, got none" in missing.problems[0]


def test_reports_an_impossible_folder_without_raising(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = tmp_path / "file"
    taken.write_text("in the way")
    with caplog.at_level(logging.WARNING, "worker.compile.cache"):
        cache = CompileCache.open(taken, FACTS)
        report = cache.record(0, 3, 5.0)
    assert len(report.problems) == 2 and "folder" in report.problems[0] and "no manifest written" in report.problems[1]
    assert caplog.text.count("compile cache:") == 2 and taken.read_text() == "in the way"


def test_reports_a_full_disk_without_raising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    cache = CompileCache.open(tmp_path, FACTS)
    monkeypatch.setattr(compile_cache, "write_atomically", full)
    assert "No space left on device" in cache.record(0, 3, 5.0).problems[0]


def test_voices_locks_and_pending_files_are_not_kernels(tmp_path: Path) -> None:
    for name in ("voices/a", "locks/b", "cc/d.lock", f"cc/.e{compile_cache.PENDING}"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    cache = recorded(tmp_path)
    manifest = json.loads((tmp_path / MANIFESTS / f"{cache.key}.json").read_text())
    assert manifest["files"].keys() == KERNELS.keys()


def marked(folder: Path, number: int) -> Path:
    """A folder as a killed start leaves it."""
    recorded(folder)
    (folder / "cc").mkdir()
    half = folder / "cc" / "half.so"
    half.write_bytes(b"\x7fEL")
    (folder / MANIFESTS / f"another.{number}{compile_cache.COMPILING}").write_text(str(number))
    return half


def test_removes_unlisted_files_of_a_killed_start(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    half = marked(tmp_path, ended.pid)
    report = reopened(tmp_path)
    assert not half.exists(), "expected the doubtful file removed"
    assert [(tmp_path / name).read_bytes() for name in KERNELS] == list(KERNELS.values()), "expected the others left"
    assert any("interrupted" in one for one in report.problems), report.problems
    assert not list((tmp_path / MANIFESTS).glob(f"another*{compile_cache.COMPILING}"))


def test_keeps_files_of_a_running_start(tmp_path: Path) -> None:
    half = marked(tmp_path, os.getppid())
    assert not reopened(tmp_path).problems and half.exists()


def test_failed_start_sets_no_cold_seconds(tmp_path: Path) -> None:
    report = CompileCache.open(tmp_path, FACTS).record(0, 5, 26.5, is_whole=False)
    assert report.cold_s is None and recorded(tmp_path).report.cold_s == 81.0


def test_key_depends_on_model_and_settings() -> None:
    engine, config = SmallEngine(), CompileConfig(enabled=True)
    facts = cache_facts(engine.parts, config)
    assert facts == cache_facts(SmallEngine().parts, config)
    assert all(facts.values()) and facts["device"].split()[0] in ("x86_64", "aarch64", "arm64", "AMD64")
    other = cache_facts(engine.parts, CompileConfig(enabled=True, mode="max-autotune"))
    assert {name for name in facts if facts[name] != other[name]} == {"settings"}
    with mock.patch.object(OmniModel, "has_decode_copy", True):
        assert {name for name in facts if facts[name] != cache_facts(engine.parts, config)[name]} == {"model"}
    engine.parts.unit_steps.regions.shapes = engine.parts.vocoder.shapes
    assert {name for name in facts if facts[name] != cache_facts(engine.parts, config)[name]} == {"model"}


class Elsewhere:
    """Compiles in other processes."""

    def __init__(self, root: Path):
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def compile(self, folder: Path, artifact: Path | None = None) -> list[Any]:
        """Hits, misses, state, problems and the result's sum of a new process."""
        self.process.stdin.write(json.dumps([str(folder), str(artifact or "")]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"expected a line, got exit status {self.process.wait(60)}"
        return json.loads(line)


@pytest.fixture
def elsewhere(root: Path) -> Iterator[Elsewhere]:
    programs = Elsewhere(root)
    with programs.process:
        yield programs


@pytest.mark.slow
def test_hits_in_another_process_and_from_an_artifact(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """Cold, warm, with a damaged graph, and an empty folder with the artifact of another one."""
    folder, empty = tmp_path / "cache", tmp_path / "empty"
    cold = elsewhere.compile(folder)
    assert cold[:4] == [0, 1, "new", []], cold
    warm = elsewhere.compile(folder)
    assert warm[:4] == [1, 0, "warm", []] and warm[4] == cold[4], warm
    [artifact] = (folder / MANIFESTS).glob("*.artifact")
    moved = elsewhere.compile(empty, artifact)
    assert moved[:4] == [1, 0, "new", []] and moved[4] == cold[4], moved
    for path in folder.rglob("*"):
        if path.is_file() and "fxgraph" in path.parts:
            path.write_bytes(path.read_bytes()[:100])
    artifact.unlink()
    repaired = elsewhere.compile(folder)
    assert repaired[0] == 0 < repaired[1] and repaired[2] == "repaired" and repaired[4] == cold[4], repaired
