"""Archives of compiled kernels on their way to the nodes of a cluster."""

import sys
from pathlib import Path

import pytest

from launcher.cluster import kernels
from launcher.cluster.kernels import read_archives, write_missing
from launcher.cluster.options import make_plan, parser
from launcher.cluster.program_host import ProgramHost, ProgramSpec
from launcher.plan import RunSecrets
from models.errors import SettingsError
from tests.launcher.processes import wait_until
from worker.compile import cache
from worker.config.service import load_config


def archived(folder: Path, **contents: bytes) -> Path:
    (folder / "manifests").mkdir(parents=True)
    for name, content in contents.items():
        (folder / "manifests" / f"{name}.artifact").write_bytes(content)
    (folder / "manifests" / "a.json").write_text("{}")
    return folder


def test_node_gets_the_archives_that_it_lacks(tmp_path: Path) -> None:
    archives = read_archives(archived(tmp_path / "head", a=b"new", b=b"second"))
    assert archives == {"a.artifact": b"new", "b.artifact": b"second"}
    node = archived(tmp_path / "node", a=b"its own")
    assert write_missing(archives, node) == 1
    assert read_archives(node) == {"a.artifact": b"its own", "b.artifact": b"second"}
    assert write_missing(archives, tmp_path / "new") == 2
    with pytest.raises(SettingsError, match=r"--push-kernels: expected archives of kernels in .*/manifests"):
        read_archives(tmp_path / "none")


def test_names_are_those_of_the_cache(tmp_path: Path) -> None:
    written = cache.CompileCache(tmp_path, {})._artifact_path
    assert (written.parent.name, written.suffix) == (kernels.MANIFESTS, kernels.SUFFIX)


def test_program_host_writes_them_before_its_worker_starts(tmp_path: Path) -> None:
    node, seen = tmp_path / "node", tmp_path / "seen"
    code = f"import os; open({str(seen)!r}, 'w').write(' '.join(os.listdir({str(node / 'manifests')!r})))"
    spec = ProgramSpec("worker", "worker-1", (sys.executable, "-c", code), cache_dir=node)
    host = ProgramHost(spec, "127.0.0.1", "n", tmp_path / "logs", {"a.artifact": b"kernels"})
    wait_until(lambda: bool(host.status().ended), "the end of the program")
    assert seen.read_text() == "a.artifact", f"expected the archive before the start, got {host.status()}"
    (tmp_path / "file").write_text("")
    unwritable = ProgramSpec("worker", "worker-2", (sys.executable, "-c", ""), cache_dir=tmp_path / "file")
    host = ProgramHost(unwritable, "127.0.0.1", "n", tmp_path / "logs", {"a.artifact": b"kernels"})
    wait_until(lambda: bool(host.status().ended), "the end of a program without its archives")


def test_up_reads_them_on_request(tmp_path: Path) -> None:
    config, _ = load_config(None, flags={"service.cache_dir": str(archived(tmp_path, a=b"x"))}, environ={})
    for flags, expected in ((("--push-kernels",), {"a.artifact": b"x"}), ((), {})):
        args = parser().parse_args(["up", *flags])
        plan = make_plan(config, args, RunSecrets.make(config, args))
        assert plan.archives == expected, f"expected {expected}, got {plan.archives}"
        assert plan.groups[0].worker.cache_dir == config.service.cache_dir
