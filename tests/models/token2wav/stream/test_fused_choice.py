"""Whether flow and HiFT run by kernels: device, sizes and exactness, asked in one way for both."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.errors import SettingsError
from models.token2wav.flow.flow_state import solve
from models.token2wav.stream import fused_choice as choice
from models.token2wav.stream.fused_choice import FusedFlow, fused_flow, fused_hift
from models.token2wav.stream.vocoder import Chunk
from tests.models.compare import assert_same
from tests.models.token2wav.stream.vocoders import make_codes, make_vocoder, make_voice

ROOM = "models.token2wav"


def flow_of(dtype: torch.dtype, encoder: int = 64, estimator: int = 64) -> Any:
    """A flow with heads so wide."""
    config = SimpleNamespace(estimator=SimpleNamespace(head_dim=estimator))
    encoder = SimpleNamespace(head_dim=encoder)
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, encoder=encoder, config=config)


def hift_of(dtype: torch.dtype) -> Any:
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    return SimpleNamespace(conv_pre=SimpleNamespace(weight=weight))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were Triton and a GPU: kernels are their names."""
    monkeypatch.setattr(choice, "supports_kernels", lambda device: device.type == "cuda")
    for module, name in (("flow.conformer", "Layers"), ("flow.dit", "Solver"), ("hift.hift", "Hift")):
        stub = SimpleNamespace(**{f"Fused{name}": lambda part, name=name: name})
        monkeypatch.setitem(sys.modules, f"{ROOM}.{module}_fused", stub)


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
def test_who_runs_by_kernels(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, dtype: torch.dtype, tf32: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        flow, hift = fused_flow(flow_of(dtype), kernels), fused_hift(hift_of(dtype), kernels)
    finally:
        torch.set_float32_matmul_precision(before)
    assert (flow, hift) == ((("Layers", "Solver"), "Hift") if expected else (None, None))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("heads", [{"encoder": 8}, {"estimator": 48}])
def test_a_flow_with_other_heads_is_plain_as_a_whole(heads: dict[str, int]) -> None:
    flow = flow_of(torch.bfloat16, **heads)
    assert fused_flow(flow, "auto") is None
    with pytest.raises(SettingsError, match=rf"fused kernels.*heads of .*{next(iter(heads.values()))}"):
        fused_flow(flow, "fused")


def test_what_cannot_be_had_is_refused() -> None:
    parts = make_vocoder().parts
    for part, fused in ((parts.flow, fused_flow), (parts.hift, fused_hift)):
        assert fused(part, "auto") is None
        with pytest.raises(SettingsError, match="fused kernels: expected a CUDA device with Triton"):
            fused(part, "fused")


def test_a_vocoder_changes_over_in_the_middle_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Voices and sessions go on as they would have; kernels are asked no more."""
    asked = [0]

    def fused(flow: Any, kernels: str) -> FusedFlow | None:
        def solver(*given: Any, **more: Any) -> torch.Tensor:
            asked[0] += 1
            return solve(flow, *given, **more)

        return FusedFlow(None, solver) if kernels == "auto" else None

    monkeypatch.setattr(f"{ROOM}.stream.vocoder.fused_flow", fused)
    changed, plain = make_vocoder(), make_vocoder(kernels="plain")
    assert (changed.regions.kernels, plain.regions.kernels) == ({"flow"}, set())
    sounds = []
    for vocoder in (changed, plain):
        session = vocoder.open(make_voice())
        sounds.append(vocoder.speak([Chunk(session, make_codes(1, 13))]))
        if vocoder is changed:
            before, n_asked = vocoder.regions, asked[0]
            vocoder.use_plain()
            assert vocoder.regions is not before and not vocoder.regions.kernels and n_asked
        sounds[-1] += vocoder.speak([Chunk(session, make_codes(2, 10), last=True)])
        vocoder.open(make_voice(1))
    assert asked[0] == n_asked, "expected the plain solve from then on"
    for got, expected in zip(*sounds, strict=True):
        assert_same(got, expected, "sound")
