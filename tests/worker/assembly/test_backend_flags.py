"""Backend flags: set and reported on a GPU, unchanged on a CPU."""

from collections.abc import Iterator

import pytest
import torch

from worker.assembly.backend_flags import apply_backend_flags, resolve_compile, uses_kernels
from worker.assembly.parts import device_type, pick_device
from worker.config.compile import CompileConfig
from worker.config.session import EngineConfig

GPU, CPU = torch.device("cuda"), torch.device("cpu")
KERNELS = ("flash", "mem_efficient", "cudnn", "math")


def switches() -> tuple[object, ...]:
    cudnn = torch.backends.cudnn
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark, *kernels()


def kernels() -> tuple[bool, ...]:
    return tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in KERNELS)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    precision, tf32, benchmark, *enabled = switches()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, benchmark
    for name, is_on in zip(KERNELS, enabled, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_on)


def test_flags_are_unchanged_on_a_cpu() -> None:
    before = switches()
    in_force = apply_backend_flags(CompileConfig(tf32=True, cudnn_benchmark=True, attention="eager"), CPU)
    assert switches() == before and set(in_force.values()) == {"not on a CPU"}


@pytest.mark.parametrize("is_on", [True, False])
def test_tf32_and_cudnn(is_on: bool) -> None:
    in_force = apply_backend_flags(CompileConfig(tf32=is_on, cudnn_benchmark=is_on), GPU)
    assert switches()[:3] == ("high" if is_on else "highest", is_on, is_on)
    assert (in_force["tf32"], in_force["cudnn_benchmark"]) == (is_on, is_on)


def test_an_eager_model_has_the_flags_that_are_given() -> None:
    before = switches()
    apply_backend_flags(CompileConfig(enabled=False), GPU)
    assert switches() == before
    in_force = apply_backend_flags(CompileConfig(enabled=False, cudnn_benchmark=True, attention="eager"), GPU)
    assert switches() == (*before[:2], True, False, False, False, True)
    assert in_force == {"tf32": before[0] != "highest", "cudnn_benchmark": True, "attention": "eager (math)"}
    apply_backend_flags(CompileConfig(enabled=False, tf32=True), GPU)
    assert switches()[:2] == ("high", True)


@pytest.mark.parametrize(
    ("attention", "expected", "words"),
    [
        ("flash", (True, False, False, True), "flash (flash, math)"),
        ("sdpa", (True, True, True, True), "sdpa (flash, memory-efficient, cudnn, math)"),
        ("eager", (False, False, False, True), "eager (math)"),
    ],
)
def test_attention(attention: str, expected: tuple[bool, ...], words: str) -> None:
    before = kernels()
    assert apply_backend_flags(CompileConfig(), GPU)["attention"].startswith("auto (") and kernels() == before
    assert apply_backend_flags(CompileConfig(attention=attention), GPU)["attention"] == words
    assert kernels() == expected


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("cpu", False)])
def test_auto_compiles_on_a_gpu_only(device: str, expected: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = EngineConfig(model_path="m", compile=CompileConfig(mode="max-autotune"))
    resolved = resolve_compile(config, device)
    assert (resolved.compile.enabled, resolved.compile.mode) == (expected, "max-autotune")
    assert caplog.messages == [f"service.compile auto: {'on' if expected else 'off'} on {device}"]
    assert resolve_compile(resolved, "cpu") is resolved and len(caplog.messages) == 1, "expected one log line"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_explicit_compile_setting_holds_on_every_device(device: str, enabled: bool) -> None:
    config = EngineConfig(model_path="m", compile=CompileConfig(enabled=enabled))
    assert resolve_compile(config, device).compile.enabled is enabled


def test_auto_device_is_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert device_type("auto") == pick_device("auto").type == ("cuda" if has_gpu else "cpu")
        assert (device_type("cuda:3"), device_type("cpu")) == ("cuda", "cpu")


def test_auto_wants_no_kernels_on_a_cpu() -> None:
    assert not uses_kernels(CompileConfig(), CPU)
