"""What kernels of the flow read before their wait: nothing that the kernel ahead of them writes.

Such tensors are NaN until the wait, in Triton's interpreter. The kernels run as one program, which waits once.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.compare import assert_close

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are built for the GPU", allow_module_level=True)

import triton.language as tl

from models.token2wav.flow import dit_kernels, fused_linear
from models.token2wav.flow.block_table import SlotMapping
from models.token2wav.flow.dit_kernels import AttendTiles, StepKernels, attend_tiles
from models.token2wav.flow.fused_linear import Epilogue, LinearTiles, LinearWeights, product

HEAD_DIM, T, N_CACHED = 16, 4, 20
Late = Callable[[Tensor], Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """A function that makes a tensor NaN until a kernel waits."""
    written: list[tuple[Tensor, Tensor]] = []

    def write(*_: object, **__: object) -> None:
        for tensor, values in written:
            tensor.copy_(values)
        written.clear()

    def withhold(tensor: Tensor) -> Tensor:
        written.append((tensor, tensor.clone()))
        return tensor.fill_(float("nan"))

    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", write)
    monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda *_, **__: None)
    for module, fetch in ((fused_linear, "_fetch"), (dit_kernels, "_fetch_rows")):
        monkeypatch.setattr(module, "launch_options", lambda *_: {"PDL": True})
        monkeypatch.setattr(module, fetch, lambda *_: None)
    return withhold


@pytest.mark.parametrize("inner", [128, 32, 16], ids=["one-tile", "three-at-once", "loop"])
def test_product_reads_rows_and_base_after_its_wait(late: Late, inner: int) -> None:
    a, weight, bias, gate, base = drawn(10, 84), drawn(10, 84) / 9, drawn(10), drawn(10), drawn(10, 10)
    expected = base + gate * F.linear(a, weight, bias)
    late(a)
    late(base)
    tiles, epilogue = LinearTiles(16, 16, inner, 1, 4, 2), Epilogue("", base, gate)
    got = product(a, LinearWeights(weight, bias), torch.empty_like(base), epilogue=epilogue, tiles=tiles)
    assert_close(got, expected, 1e-5)


def one_session(pool: Tensor) -> StepKernels:
    """Kernels of a batch of one, with cached rows of two tiles."""
    zero, rows = torch.zeros(1, dtype=torch.int64), torch.arange(2, 2 + N_CACHED + T)
    mapping = SlotMapping(
        zero, rows[None, :N_CACHED], torch.tensor([N_CACHED]), rows[None, N_CACHED:].contiguous(), torch.tensor([T])
    )
    return StepKernels(mapping, zero, pool, drawn(1, 1, 2, 2, 2, HEAD_DIM), torch.zeros(1, 1, 2, 2, 2, HEAD_DIM))


@pytest.mark.parametrize("is_ahead", [True, False])
def test_attention_reads_new_rows_after_its_wait(late: Late, is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached keys, which no kernel in flight writes, may be read before it."""
    monkeypatch.setattr(dit_kernels, "attend_tiles", lambda *_, **__: AttendTiles(16, 16, 4, 2, is_ahead))
    qkv, norm, outs = drawn(2 * T, 3 * HEAD_DIM), (drawn(HEAD_DIM), drawn(HEAD_DIM)), []
    for withheld in (False, True):
        outs.append(torch.zeros(2 * T, HEAD_DIM))
        kernels = one_session(drawn(1, 2, 2, 2 + N_CACHED + T, 1, HEAD_DIM))
        kernels.attend(late(qkv) if withheld else qkv, norm, norm, outs[-1], 0)
    assert_close(outs[1], outs[0], 0.0)


def test_norms_read_the_stream_after_their_wait(late: Late) -> None:
    shift, scale, gate, results = drawn(HEAD_DIM), drawn(HEAD_DIM), drawn(HEAD_DIM), []
    stream, added = drawn(1, HEAD_DIM), drawn(1, HEAD_DIM)
    for withheld in (False, True):
        kernels = one_session(drawn(1, 2, 2, 2 + N_CACHED + T, 1, HEAD_DIM))
        kernels.M = kernels.T = 1  # one program
        h, out, windows = stream.clone(), torch.empty(1, HEAD_DIM), torch.zeros(1, 3 * HEAD_DIM)
        x = stream.clone()
        if withheld:
            late(h)
            late(added)
        kernels.residual_norm(h, added, gate, shift, scale, out)
        if withheld:
            late(x)
        kernels.norm_mish(x, shift, scale, windows, 0)
        results.append(torch.cat((h, out, windows), dim=1))
    assert_close(results[1], results[0], 0.0)


def test_attention_reads_ahead_where_a_program_has_room() -> None:
    assert attend_tiles(64, 16, 2, is_large=False).is_ahead is False
    for n_queries, n_groups, n_bytes, expected in [
        (64, 16, 2, True),
        (65, 16, 2, False),
        (64, 16, 4, False),
        (64, 64, 2, False),
    ]:
        got = attend_tiles(n_queries, n_groups, n_bytes, is_large=True).is_ahead
        assert got is expected, f"{n_queries} queries, {n_groups} groups: expected {expected}, got {got}"
