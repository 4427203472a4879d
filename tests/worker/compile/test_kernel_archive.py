"""The kernel archive: pack the kernels of a folder, and unpack them into another folder, where Triton finds them."""

import json
import sys
import time
import zipfile
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest
import torch

from models.graphs.kernel_support import LoadedKernels
from worker.compile.kernel_archive import pack, unpack

with suppress(ImportError):
    from triton import language as tl


@pytest.fixture(autouse=True)
def torch_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)


def fill(folder: Path) -> list[str]:
    """A folder with a kernel in Triton's layout and a file of torch."""
    kernel = folder / "triton/0/KEY"
    kernel.mkdir(parents=True)
    (kernel / "step.cubin").write_bytes(b"code")
    (kernel / "step.json").write_text("{}")
    paths = {name: str(kernel / name) for name in ("step.cubin", "step.json")}
    (kernel / "__grp__step.json").write_text(json.dumps({"child_paths": paths}))
    (folder / "ab").mkdir()
    (folder / "ab/graph.py").write_text("pass")
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_lists_have_paths_of_the_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = fill(tmp_path / "old")
    data = pack(tmp_path / "old", names)
    monkeypatch.setattr(time, "time", lambda: 1_000_000_000.0)
    assert data is not None and pack(tmp_path / "old", names) == data, "expected the same bytes twice"
    assert unpack(data, tmp_path / "new")
    kernel = tmp_path / "new/triton/0/KEY"
    assert sorted(path.name for path in kernel.iterdir()) == ["__grp__step.json", "step.cubin", "step.json"]
    assert not (tmp_path / "new/ab").exists(), "torch packs its own"
    paths = json.loads((kernel / "__grp__step.json").read_text())["child_paths"]
    assert paths == {name: str(kernel / name) for name in ("step.cubin", "step.json")}
    assert (kernel / "step.cubin").read_bytes() == b"code"


def test_keeps_existing_files(tmp_path: Path) -> None:
    data = pack(tmp_path / "old", fill(tmp_path / "old"))
    there = tmp_path / "new/triton/0/KEY/step.cubin"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"newer")
    assert unpack(data, tmp_path / "new") and there.read_bytes() == b"newer"


def test_includes_torchs_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor  # `pack` calls torch only if this module is loaded

    loaded: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"graphs", None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: loaded.append(data) or (data or None))
    data = pack(tmp_path, [])
    assert unpack(data, tmp_path / "new") and loaded == [b"graphs"]
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: None)
    assert not unpack(data, tmp_path / "new"), "expected False if torch refuses the artifact"
    monkeypatch.delitem(sys.modules, "torch._inductor")
    assert pack(tmp_path, ["ab/graph.py"]) is None


def archive(compression: int = zipfile.ZIP_STORED, **contents: str) -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        for name, content in contents.items():
            made.writestr(name, content)
    return file.getvalue()


def damaged(data: bytes) -> bytes:
    """Offset of the compressed data, after a name of eight letters."""
    return data[:38] + b"\xff" * 8 + data[46:]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        damaged(archive(zipfile.ZIP_DEFLATED, **{"triton/a": "x" * 99})),
        archive(**{"triton/0/KEY/a.cubin": "x", "../outside": "x"}),
        archive(**{"triton/../../outside": "x"}),
        archive(**{"/outside": "x"}),
        archive(**{"triton/0/KEY/a.cubin": "x", "triton/0/KEY/__grp__a.json": "[]"}),
        archive(**{"triton/0/KEY/a.cubin": "x", "triton/0/KEY/__grp__a.json": "{}"}),
    ],
)
def test_refuses_foreign_archives(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError, match="expected an archive of kernels"):
        unpack(data, tmp_path / "new")
    assert list(tmp_path.rglob("*")) == []


def doubles(source, target, BLOCK):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, 2 * tl.load(source + at))


def test_triton_finds_kernels_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles without a GPU: the kernel compiled in one folder is a cache hit in the other."""
    triton = pytest.importorskip("triton")
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    if "nvidia" not in backends:
        pytest.skip("this Triton does not compile for NVIDIA's GPUs")
    hits: list[bool] = []

    def listener(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)

    def made_in(folder: Path) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton/0"))
        signature = {"source": "*fp32", "target": "*fp32", "BLOCK": "constexpr"}
        source = ASTSource(JITFunction(doubles), signature, {(2,): 64})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))

    old, new = tmp_path / "old", tmp_path / "new"
    made_in(old)
    names = sorted(path.relative_to(old).as_posix() for path in old.rglob("*") if path.is_file())
    assert unpack(pack(old, names), new)
    for path in old.rglob("*"):
        if path.is_file():
            path.unlink()
    made_in(new)
    assert hits == [False, True], f"expected a miss, then a hit, got {hits}"


def test_counts_built_and_cached_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from models.kernels import launch

    monkeypatch.setattr(LoadedKernels, "n", 5)
    monkeypatch.setattr(LoadedKernels, "n_cached", 1)
    monkeypatch.setattr(LoadedKernels, "folders", set())
    for hit, folder in ((True, "ONE"), (False, "TWO"), (True, "ONE")):
        launch._remember(metadata_group={"a.json": f"/kernels/{folder}/a.json"}, cache_hit=hit, src=None)
        launch._count()
    assert (LoadedKernels.n, LoadedKernels.n_cached, LoadedKernels.folders) == (8, 3, {"ONE", "TWO"})
