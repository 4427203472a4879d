"""The compile prefetch: parallel targets, and one folder for the kernels of torch and of Triton."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from worker.compile import prefetch as head_start
from worker.compile.prefetch import build_kernels, prefetch_compiler, prefetch_triton, set_triton_folder
from worker.config.compile import CompileConfig

GPU = torch.device("cuda", 1)


def test_targets_run_in_parallel_and_fail_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "empty_cache", "Stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda given: nullcontext())
    both_there, done = threading.Barrier(2, timeout=10), []

    def fail() -> None:
        both_there.wait()
        raise RuntimeError("no such instruction")

    def go_on() -> None:
        both_there.wait()
        done.append(threading.current_thread().name)

    build_kernels(
        GPU, {"vpm": [fail, lambda: done.append("never")], "llm.model": [go_on, lambda: done.append("after")]}
    )
    assert done[1:] == ["after"] and done[0].startswith("kernels"), done


def test_triton_stores_kernels_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(head_start.TRITON_VARIABLE, raising=False)
    with mock.patch.dict(os.environ):
        assert set_triton_folder(GPU), "expected True for an empty folder"
        folder = Path(os.environ[head_start.TRITON_VARIABLE])
        assert folder == tmp_path / "triton" / "1"
        (folder / "abc").mkdir(parents=True)
        (folder / "abc" / "product.cubin").touch()
        assert not set_triton_folder(GPU)
    monkeypatch.setenv(head_start.TRITON_VARIABLE, str(tmp_path / "elsewhere"))
    assert set_triton_folder(GPU) and os.environ[head_start.TRITON_VARIABLE] == str(tmp_path / "elsewhere")


@pytest.mark.parametrize("wanted", [True, False])
def test_prefetches_triton_if_kernels_run(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, done = [], threading.Event()

    def load(name: str) -> None:
        loaded.append((name, threading.current_thread() is threading.main_thread()))
        done.set()
        raise ImportError(name)

    monkeypatch.setattr(head_start, "uses_kernels", lambda config, device: wanted)
    monkeypatch.setattr(head_start, "import_module", load)
    prefetch_triton(CompileConfig(enabled=True), GPU)
    assert not wanted or done.wait(10)
    assert loaded == [("triton", False)] * wanted


def test_ignores_a_compiler_that_does_not_start() -> None:
    with mock.patch("torch._inductor.async_compile.maybe_warm_pool", side_effect=OSError("no processes")) as started:
        prefetch_compiler(CompileConfig(enabled=True), torch.device("cpu"))
    assert started.called


@pytest.mark.parametrize(
    ("config", "kernels", "expected"),
    [
        (CompileConfig(enabled=False), False, False),
        (CompileConfig(enabled=True, targets=("resampler",)), True, False),
        (CompileConfig(enabled=True, targets=("resampler",)), False, True),
    ],
)
def test_prefetches_the_compiler_if_something_compiles(
    config: CompileConfig, kernels: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_start, "uses_kernels", lambda config, device: kernels)
    with mock.patch("torch._inductor.async_compile.maybe_warm_pool") as started:
        prefetch_compiler(config, GPU)
    assert started.called == expected
