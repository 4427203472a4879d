"""The choice of backends for flow and HiFT: device, sizes and exactness."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.errors import SettingsError
from models.token2wav import backends
from models.token2wav.backends import flow_backend, hift_backend
from models.token2wav.flow.flow_backend import FlowBackend, PlainFlow
from models.token2wav.flow.flow_state import ChunkSlots, FlowState, SolveInputs
from models.token2wav.stream.vocoder import Chunk
from tests.models.compare import assert_same
from tests.models.token2wav.stream.vocoders import make_tokens, make_vocoder, make_voice

PACKAGE = "models.token2wav"


def flow_of(dtype: torch.dtype, encoder: int = 64, estimator: int = 64) -> Any:
    """A stub of a flow with these head widths."""
    config = SimpleNamespace(estimator=SimpleNamespace(head_dim=estimator))
    encoder = SimpleNamespace(head_dim=encoder)
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, encoder=encoder, config=config)


def hift_of(dtype: torch.dtype) -> Any:
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    return SimpleNamespace(conv_pre=SimpleNamespace(weight=weight))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates Triton and a GPU; the fused backends are replaced by their names."""
    monkeypatch.setattr(backends, "supports_kernels", lambda device: device.type == "cuda")
    for module, name in (("flow.flow_fused", "FusedFlow"), ("hift.hift_fused", "FusedHift")):
        stub = SimpleNamespace(**{name: lambda part, name=name: name})
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{module}", stub)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("kernels", "dtype", "tf32", "expected"),
    [
        ("auto", torch.bfloat16, False, True),
        ("auto", torch.float32, True, True),
        ("auto", torch.float32, False, False),
        ("plain", torch.bfloat16, True, False),
        ("fused", torch.float32, False, True),
    ],
)
def test_chooses_fused_backends_with_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, dtype: torch.dtype, tf32: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    plain = hift_of(dtype)
    try:
        flow, hift = flow_backend(flow_of(dtype), kernels), hift_backend(plain, kernels)
    finally:
        torch.set_float32_matmul_precision(before)
    if expected:
        assert (flow, hift) == ("FusedFlow", "FusedHift")
    else:
        assert isinstance(flow, PlainFlow) and hift is plain


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("heads", [{"encoder": 8}, {"estimator": 48}])
def test_flow_with_unsupported_heads_is_plain(heads: dict[str, int]) -> None:
    flow = flow_of(torch.bfloat16, **heads)
    assert isinstance(flow_backend(flow, "auto"), PlainFlow)
    with pytest.raises(SettingsError, match=rf"fused kernels.*heads of .*{next(iter(heads.values()))}"):
        flow_backend(flow, "fused")


def test_refuses_fused_backends_on_a_cpu() -> None:
    parts = make_vocoder().parts
    for part, choose in ((parts.flow, flow_backend), (parts.hift, hift_backend)):
        assert not choose(part, "auto").is_fused
        with pytest.raises(SettingsError, match="fused kernels: expected a CUDA device with Triton"):
            choose(part, "fused")


def test_switches_to_plain_backends_in_the_middle_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Voices and sessions continue unchanged, and the fused backend is not called again."""
    n_calls = [0]

    class StubbedFused(PlainFlow):
        is_fused = True

        def solve(self, state: FlowState, slots: ChunkSlots, inputs: SolveInputs) -> torch.Tensor:
            n_calls[0] += 1
            return super().solve(state, slots, inputs)

    def choose(flow: Any, kernels: str) -> FlowBackend:
        return StubbedFused(flow) if kernels == "auto" else PlainFlow(flow)

    monkeypatch.setattr(f"{PACKAGE}.stream.vocoder.flow_backend", choose)
    changed, plain = make_vocoder(), make_vocoder(kernels="plain")
    assert (changed.regions.kernels, plain.regions.kernels) == ({"flow"}, set())
    sounds = []
    for vocoder in (changed, plain):
        session = vocoder.open(make_voice())
        sounds.append(vocoder.speak([Chunk(session, make_tokens(1, 13))]))
        if vocoder is changed:
            before, n_before = vocoder.regions, n_calls[0]
            vocoder.use_plain()
            assert vocoder.regions is not before and not vocoder.regions.kernels and n_before
        sounds[-1] += vocoder.speak([Chunk(session, make_tokens(2, 10), last=True)])
        vocoder.open(make_voice(1))
    assert n_calls[0] == n_before, "expected the plain solve after the switch"
    for got, expected in zip(*sounds, strict=True):
        assert_same(got, expected, "sound")
