"""The U-Net estimator and its solve against a plain implementation, with padding and as one traced graph."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.errors import CheckpointError
from models.layers.weights import on_meta
from models.token2wav.flow.solver import time_grid
from models.token2wav.s3gen import unet
from models.token2wav.s3gen.unet import UNetConditions, UNetEstimator, config_of, solve
from models.token2wav.settings import UNetConfig
from tests.models.compare import assert_close
from tests.models.token2wav.s3gen import unet_reference as plain_unet

SMALL = {"in_channels": 22, "out_channels": 6, "channels": 8, "heads": 2, "head_dim": 6, "blocks": 2, "mid_blocks": 2}
N_MELS, N_SPEAKER = 6, 4
RELEASED = (910, 71_302_480)  # tensors and parameters of the released estimator


def make(seed: int = 0, **changes: int | bool) -> UNetEstimator:
    estimator = UNetEstimator(UNetConfig(**(SMALL | changes))).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in estimator.state_dict().items():
        scale = 0.1 if tensor.ndim == 1 else 1.5 / math.sqrt(math.prod(tensor.shape[1:]))
        tensor.normal_(0.0, scale, generator=generator)
        if tensor.ndim == 1 and not name.endswith("bias"):
            tensor.add_(1)
    estimator.derive("cpu", torch.float32)
    return estimator


GUIDED, MEANFLOW = make(), make(meanflow=True)


def inputs(lengths: list[int], T: int, seed: int = 0) -> dict[str, Tensor]:
    """A batch padded to T frames with non-zero values."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    B = len(lengths)
    return {
        "x": draw(B, N_MELS, T),
        "mask": torch.arange(T) < torch.tensor(lengths)[:, None],
        "mu": draw(B, N_MELS, T),
        "t": torch.rand(B, generator=generator),
        "spks": draw(B, N_SPEAKER),
        "cond": draw(B, N_MELS, T),
        "r": torch.rand(B, generator=generator),
    }


def conditions_of(given_: dict[str, Tensor]) -> UNetConditions:
    return UNetConditions(given_["mask"], given_["mu"], given_["spks"], given_["cond"])


def call(estimator: UNetEstimator, given_: dict[str, Tensor]) -> Tensor:
    return estimator(
        given_["x"], conditions_of(given_), given_["t"], given_["r"] if estimator.config.meanflow else None
    )


def plain_row(estimator: UNetEstimator, given_: dict[str, Tensor], row: int, n: int) -> Tensor:
    x, mu, cond = (given_[name][row, :, :n] for name in ("x", "mu", "cond"))
    r = given_["r"][row].item() if estimator.config.meanflow else None
    weights = estimator.state_dict()
    heads = estimator.config.heads
    return plain_unet.velocity(weights, heads, x, mu, given_["t"][row].item(), given_["spks"][row], cond, r)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    padding=st.integers(0, 9),
    meanflow=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_row_equals_the_plain_estimator_on_its_valid_frames(
    lengths: list[int], padding: int, meanflow: bool, seed: int
) -> None:
    estimator = MEANFLOW if meanflow else GUIDED
    batch = inputs(lengths, max(lengths) + padding, seed)
    got = call(estimator, batch)
    for row, n in enumerate(lengths):
        assert_close(got[row, :, :n], plain_row(estimator, batch, row, n), 1e-4, f"row {row} of {lengths}")
        assert_close(got[row, :, n:], torch.zeros(N_MELS, got.shape[2] - n), 0.0, f"padding of row {row}")


@pytest.mark.parametrize("sizes", [{"heads": 3, "head_dim": 4}, {"channels": 10, "blocks": 1}, {"mid_blocks": 1}])
def test_other_sizes_equal_the_plain_estimator(sizes: dict[str, int]) -> None:
    estimator, batch = make(**sizes), inputs([11, 7], 12)
    got = call(estimator, batch)
    for row, n in enumerate((11, 7)):
        assert_close(got[row, :, :n], plain_row(estimator, batch, row, n), 1e-4, f"row {row}")


def test_valid_frames_do_not_depend_on_the_bucket() -> None:
    exact = inputs([37], 37)
    padded = inputs([37], 64, seed=1)
    for name in ("x", "mu", "cond"):
        padded[name][..., :37] = exact[name]
    padded |= {name: exact[name] for name in ("t", "r", "spks")}
    assert_close(call(GUIDED, padded)[..., :37], call(GUIDED, exact), 1e-5, "valid frames")


@pytest.mark.parametrize("estimator", [GUIDED, MEANFLOW], ids=["guided", "mean flow"])
def test_row_without_frames_is_zero_and_does_not_change_others(estimator: UNetEstimator) -> None:
    batch = inputs([9, 0], 12)
    got = call(estimator, batch)
    assert_close(got[1], torch.zeros(N_MELS, 12), 0.0, "row without frames")
    assert_close(got[0, :, :9], plain_row(estimator, batch, 0, 9), 1e-4, "the other row")


@settings(max_examples=6)
@given(n_steps=st.integers(1, 4), cfg_rate=st.sampled_from([0.0, 0.7, 1.5]), meanflow=st.booleans())
def test_solve_equals_plain_euler_steps(n_steps: int, cfg_rate: float, meanflow: bool) -> None:
    estimator, lengths = (MEANFLOW if meanflow else GUIDED), [13, 5]
    batch = inputs(lengths, 16)
    grid = time_grid(n_steps, "linear" if meanflow else "cosine")
    spks, parts = batch["spks"], ("x", "mu", "cond")
    got = solve(estimator, batch["x"], conditions_of(batch), grid, cfg_rate)
    weights = estimator.state_dict()
    for row, n in enumerate(lengths):
        z, mu, cond = (batch[name][row, :, :n] for name in parts)
        expected = plain_unet.solve(weights, estimator.config.heads, z, mu, spks[row], cond, grid.tolist(), cfg_rate)
        assert_close(got[row, :, :n], expected, 1e-3 * (1 + expected.abs().max().item()), f"row {row}")
        assert_close(got[row, :, n:], torch.zeros(N_MELS, 16 - n), 0.0, f"padding of row {row}")


@pytest.mark.parametrize("estimator", [GUIDED, MEANFLOW], ids=["guided", "mean flow"])
def test_solve_traces_into_one_graph_and_once(estimator: UNetEstimator) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    traced = torch.compile(solve, backend=count, fullgraph=True, dynamic=False)
    grid = time_grid(2, "linear" if estimator.config.meanflow else "cosine")
    for lengths in ([12, 5], [0, 9]):
        batch = inputs(lengths, 12)
        arguments = estimator, batch["x"], conditions_of(batch), grid, 0.7
        assert_close(traced(*arguments), solve(*arguments), 1e-5, f"lengths {lengths}")
    assert len(graphs) == 1, f"expected one graph for all lengths, got {len(graphs)}"


def test_row_without_frames_attends_to_the_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of attention without keys depends on the backend; here it is NaN."""

    def strict(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q.transpose(1, 2) @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        out = scores.masked_fill(~mask[:, None], -math.inf).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)

    inner, batch = [], inputs([9, 0], 12)
    expected = call(GUIDED, batch)
    monkeypatch.setattr(unet, "attend", strict)
    hook = GUIDED.final_proj.register_forward_hook(lambda _, __, out: inner.append(out))
    assert_close(call(GUIDED, batch), expected, 1e-5, "velocity")
    hook.remove()
    assert inner[0].isfinite().all(), f"expected finite frames everywhere, got {inner[0][1]}"


def test_half_precision_keeps_the_solve_in_float32() -> None:
    estimator = make().to(torch.bfloat16)
    estimator.derive("cpu", torch.bfloat16)
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs([12], 12).items()}
    got = solve(estimator, batch["x"], conditions_of(batch), time_grid(4), 0.7)
    assert got.dtype == torch.float32, f"expected float32, got {got.dtype}"
    assert estimator.frequencies.dtype == torch.float32, f"expected float32, got {estimator.frequencies.dtype}"
    x = batch["x"].float()
    for t, width in zip(time_grid(4)[:-1], time_grid(4).diff(), strict=True):
        given_ = batch | {"x": x.bfloat16(), "t": t[None]}
        free = given_ | {name: torch.zeros_like(batch[name]) for name in ("mu", "spks", "cond")}
        guided, unguided = (call(estimator, each).float() for each in (given_, free))
        x = x + width.float() * (1.7 * guided - 0.7 * unguided)
    assert_close(got, x, 1e-4, "mel")


@pytest.mark.parametrize("meanflow", [False, True])
def test_sizes_are_read_from_shapes(meanflow: bool) -> None:
    expected = UNetConfig(**SMALL, meanflow=meanflow)
    with on_meta():
        got = config_of(UNetEstimator(expected).state_dict(), head_dim=6)
    assert got == expected


def test_released_sizes_are_the_defaults() -> None:
    with on_meta():
        tensors = UNetEstimator(UNetConfig()).state_dict()
    assert config_of(tensors) == UNetConfig()
    got = len(tensors), sum(tensor.numel() for tensor in tensors.values())
    assert got == RELEASED, f"expected {RELEASED} tensors and parameters, got {got}"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("final_proj.weight", None),
        ("time_mlp.linear_1.weight", (4,)),
        ("time_mlp.linear_1.weight", (32, 18)),  # no channel left for the speaker
        ("down_blocks.0.1.0.attn1.to_q.weight", (13, 8)),
    ],
)
def test_refuses_shapes_that_do_not_determine_sizes(name: str, shape: tuple[int, ...] | None) -> None:
    tensors = dict(GUIDED.state_dict())
    del tensors[name]
    if shape is not None:
        tensors[name] = torch.empty(shape)
    with pytest.raises(CheckpointError, match=r"U-Net estimator: expected .* that fit each other and heads of 6"):
        config_of(tensors, head_dim=6)
