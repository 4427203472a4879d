"""Attention that reads slots in place, against a softmax in float64, for every use in the model.

All rows that no query sees, including other slots, are NaN. On a CPU the kernels run in Triton's interpreter.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.models.compare import assert_close, assert_same
from tests.models.kernels.interpreter import chained_dot

pytest.importorskip("triton")

from models.kernels.attention import AttentionTiles, attend_tiled, attention_tiles, slot_attention

ON_GPU = torch.cuda.is_available()
cpu_only = pytest.mark.skipif(ON_GPU, reason="kernels are built for the GPU")


class Use(NamedTuple):
    """Sizes of one use; contexts: the newest and the oldest row that the last query of each batch row sees."""

    T: int
    H: int
    KV: int
    D: int
    L: int
    contexts: tuple[tuple[int, int], ...]
    causal: bool = True
    fresh: bool = False  # keys are a permuted slice of the packed product instead of a cache


USES = {
    "decode": Use(1, 8, 2, 32, 300, ((200, -40), (299, 0), (0, 0))),
    "windowed": Use(1, 4, 2, 64, 300, ((290, 140), (130, 129), (128, 128))),
    "prefill": Use(5, 4, 1, 16, 300, ((270, -1), (4, 0), (261, 130))),
    "long prefill": Use(12, 6, 2, 16, 90, ((80, 0), (11, 0), (89, 20))),
    "speech": Use(1, 3, 3, 24, 200, ((150, 0), (40, 2), (199, 0))),
    "audio": Use(17, 1, 1, 8, 280, ((270, 3), (17, 0), (279, 250)), causal=False),
    "vision": Use(33, 2, 2, 72, 33, ((32, 0), (20, 0)), causal=False, fresh=True),
}
BIG_USES = {
    "decode": Use(1, 32, 8, 128, 2048, ((2047, -40), (700, 0), (1100, 0))),
    "prefill": Use(16, 32, 8, 128, 2048, ((2047, -40), (700, 0), (15, 0))),
    "longer prefill": Use(96, 32, 8, 128, 2048, ((2047, -40), (700, 300), (1100, 0))),
    "longest prefill": Use(512, 32, 8, 128, 2048, ((2047, -40), (700, 0), (1100, 0))),
    "speech": Use(1, 12, 12, 64, 512, ((300, 0), (500, 20), (3, 0))),
    "speech prefill": Use(26, 12, 12, 64, 512, ((300, 0), (500, 20), (25, 0))),
    "long speech prefill": Use(258, 12, 12, 64, 512, ((300, 0), (511, 20), (257, 0))),
    "audio": Use(50, 16, 16, 64, 1501, ((1450, 0), (49, 0), (700, 0)), causal=False),
    "vision": Use(1088, 16, 16, 72, 1088, ((1087, 0), (1022, 0), (500, 0)), causal=False, fresh=True),
}


class Call(NamedTuple):
    """Arguments of `slot_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor | None
    first: Tensor | None
    last: Tensor

    def row(self, b: int) -> "Call":
        """Batch row b alone."""
        k, v = (self.k, self.v) if self.slots is not None else (self.k[b : b + 1], self.v[b : b + 1])
        slots, first = (None if x is None else x[b : b + 1] for x in (self.slots, self.first))
        return Call(self.q[b : b + 1], k, v, slots, first, self.last[b : b + 1])


def make(use: Use, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Call:
    B, G = len(use.contexts), use.H // use.KV
    generator = torch.Generator().manual_seed(11)
    qkv = torch.randn(B, use.T, use.KV, G + 2, use.D, generator=generator).to(device, dtype)
    q = qkv[..., 0, :] if G == 1 else qkv[..., :G, :].reshape(B, use.T, use.H, use.D)
    newest, oldest = (torch.tensor(x, device=device) for x in zip(*use.contexts, strict=True))
    if use.causal:
        last = newest[:, None] - torch.arange(use.T - 1, -1, -1, device=device)
    else:
        last = newest
    if use.fresh:
        k, v = (qkv[..., i, :].transpose(1, 2) for i in (G, G + 1))
        slots, first = None, None
    else:
        # One allocation for both, slots in the second dimension: no stride equals that of a contiguous cache.
        cache = torch.randn(use.L, B + 2, use.KV, 2, use.D, generator=generator).to(device, dtype)
        k, v = (cache[..., i, :].permute(1, 2, 0, 3) for i in (0, 1))
        slots, first = torch.tensor([3, 0, 1, 4][:B], device=device), oldest
    row = torch.arange(use.L, device=device)
    seen = torch.zeros(k.shape[0], use.L, dtype=torch.bool, device=device)
    seen[torch.arange(B, device=device) if slots is None else slots] = (row <= newest[:, None]) & (
        row >= (0 if first is None else first[:, None])
    )
    for cache in (k, v):
        cache.masked_fill_(~seen[:, None, :, None], math.nan)
    return Call(q, k, v, slots, first, last)


def plain(call: Call) -> Tensor:
    """In float64: [B, T, H * D]."""
    B, T, H, D = call.q.shape
    KV, L = call.k.shape[1:3]
    slots = torch.arange(B, device=call.q.device) if call.slots is None else call.slots
    last = call.last if call.last.dim() > 1 else call.last[:, None].expand(B, T)
    first = torch.zeros_like(slots) if call.first is None else call.first
    row = torch.arange(L, device=call.q.device)
    seen = ((row <= last[:, :, None]) & (row >= first[:, None, None]))[:, None]  # [B, 1, T, L]
    k, v = (cache[slots].double().nan_to_num().repeat_interleave(H // KV, 1) for cache in (call.k, call.v))
    scores = call.q.double().transpose(1, 2) @ k.transpose(2, 3) / math.sqrt(D)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()  # NaN for queries without a visible key
    return (weights @ v).transpose(1, 2).reshape(B, T, H * D)


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", USES)
def test_every_use_equals_float64_softmax(name: str, dtype: torch.dtype) -> None:
    call = make(USES[name], dtype)
    got = slot_attention(*call, most=USES[name].L)
    assert got.dtype == dtype and got.is_contiguous()
    assert_close(got, plain(call), 2e-6 if dtype == torch.float32 else 2e-3)


@cpu_only
@pytest.mark.parametrize(
    "tiles",
    [
        AttentionTiles(16, 16, 32, 4, 1),
        AttentionTiles(32, 16, 48, 4, 1),
        AttentionTiles(16, 32, 0, 4, 1),
        AttentionTiles(64, 16, 0, 4, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["prefill", "audio", "vision"])
def test_all_tile_sizes_agree(name: str, tiles: AttentionTiles) -> None:
    use = USES[name]
    use = use._replace(L=100, contexts=((99, 0), (40, 33), (64, -5))) if not use.fresh else use
    call = make(use)
    assert_close(attend_tiled(*call, use.L, tiles), plain(call), 2e-6)


def check_rounding(device: str) -> None:
    """Values are almost equal, so their sum only grows: one chain over all keys has an error of 4e-7."""
    use = Use(1, 4, 2, 32, 1024, ((1023, 0), (1000, 0)))
    call = make(use, device=device)
    call.v.mul_(0.1).add_(1)
    off = relative(attend_tiled(*call, use.L, AttentionTiles(16, 32, 0, 8, 2)), plain(call))
    assert off < 2e-7, f"expected an error below 2e-7, got {off:.2g}"


@cpu_only
def test_float32_sums_are_rounded_in_short_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_dot", chained_dot)
    check_rounding("cpu")


@pytest.mark.gpu
def test_float32_sums_are_rounded_in_short_chains_on_the_gpu() -> None:
    check_rounding("cuda")


@cpu_only
def test_more_parts_than_fit_one_combining_tile() -> None:
    use = USES["decode"]
    call = make(use)
    assert_close(attend_tiled(*call, use.L, AttentionTiles(16, 16, 16, 4, 1)), plain(call), 2e-6)


@cpu_only
@pytest.mark.parametrize("tiles", [AttentionTiles(16, 16, 32, 4, 1), AttentionTiles(32, 16, 0, 4, 1)], ids=str)
def test_query_without_visible_keys_returns_zero(tiles: AttentionTiles) -> None:
    """Rows before the window, rows after it, and the first queries of a row whose other queries see keys."""
    call = make(Use(5, 4, 2, 16, 80, ((-1, 0), (40, 41), (42, 40))))
    got = attend_tiled(*call, 80, tiles)
    assert not got[:2].any() and not got[2, :2].any() and got[2, 2:].any()
    assert_close(got, plain(call), 2e-6)


@cpu_only
def test_rows_beyond_the_bound_are_not_read() -> None:
    call = make(USES["decode"]).row(1)
    got = slot_attention(*call._replace(last=call.last + 10**6), most=129)
    assert_close(got, plain(call._replace(last=torch.full_like(call.last, 128))), 2e-6)


def check_alone(use: Use, call: Call, run: Callable[..., Tensor]) -> None:
    together = run(*call, most=use.L)
    for b in range(len(use.contexts)):
        assert_same(run(*call.row(b), most=use.L), together[b : b + 1], f"row {b}")


@cpu_only
@pytest.mark.parametrize("name", ["decode", "windowed", "prefill", "vision"])
def test_batch_changes_no_bit_of_a_row(name: str) -> None:
    check_alone(USES[name], make(USES[name]), slot_attention)


def check_bounds(use: Use, call: Call) -> None:
    """The smallest bound gives short rows a single part, which needs no combining."""
    whole = slot_attention(*call, most=use.L)
    for b, (newest, _) in enumerate(use.contexts):
        row = call.row(b)
        assert_same(slot_attention(*row, most=newest + 1), whole[b : b + 1], f"row {b}")


@cpu_only
@pytest.mark.parametrize("name", ["decode", "windowed", "prefill"])
def test_bound_changes_no_bit(name: str) -> None:
    check_bounds(USES[name], make(USES[name]))


@pytest.mark.parametrize("n_bytes", [2, 4])
def test_part_sizes_are_multiples_of_key_tiles(n_bytes: int) -> None:
    for n_rows in (1, 4, 16, 17, 26, 50, 64, 258, 384, 1024, 1088, 2048, 4096):
        tiles = attention_tiles(n_rows, n_bytes)
        assert tiles.queries >= 16 and tiles.keys >= 16 and tiles.part % tiles.keys == 0, (n_rows, tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIG_USES)
class TestOnGpu:
    def test_every_use_equals_float64_softmax(self, name: str) -> None:
        for dtype, limit in ((torch.bfloat16, 6e-3), (torch.float32, 1e-5)):
            call = make(BIG_USES[name], dtype, "cuda")
            off = relative(slot_attention(*call, most=BIG_USES[name].L), plain(call))
            assert off <= limit, f"{dtype}: expected within {limit} in norm, got {off:.3g}"

    def test_batch_changes_no_bit_of_a_row(self, name: str) -> None:
        call = make(BIG_USES[name], torch.bfloat16, "cuda")
        check_alone(BIG_USES[name], call, slot_attention)
        if not BIG_USES[name].fresh:
            check_bounds(BIG_USES[name], call)

    def test_replays_return_the_same_bits(self, name: str) -> None:
        use = BIG_USES[name]
        call = make(use, torch.bfloat16, "cuda")
        expected = slot_attention(*call, most=use.L)
        last = torch.zeros_like(call.last)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = slot_attention(*call._replace(last=last), most=use.L)
        last.copy_(call.last)
        for _ in range(5):
            graph.replay()
            assert_same(got, expected)


@pytest.mark.gpu
def test_slot_strides_may_exceed_32_bits() -> None:
    use = Use(1, 2, 1, 64, 40, ((39, 0), (20, 0)))
    near = make(use, torch.bfloat16, "cuda")
    memory = torch.empty(4 * 2**30 + 10**6, dtype=torch.bfloat16, device="cuda")
    k, v = (memory[i * 40 * 64 :].as_strided(near.k.shape, (2**30 + 64, 40 * 64, 64, 1)) for i in (0, 1))
    k.copy_(near.k)
    v.copy_(near.v)
    assert_same(slot_attention(*near._replace(k=k, v=v), most=40), slot_attention(*near, most=40))


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=cpu_only), pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("name", "has_windows"),
    [("decode", False), ("prefill", False), ("long prefill", False), ("windowed", True), ("prefill", True)],
)
def test_pages_change_no_bit(name: str, device: str, *, has_windows: bool) -> None:
    """Rows of the pool that no query sees are NaN. With windows, tiles of keys end in another page than they begin."""
    use, page = USES[name], 64
    call = make(use, device=device)
    assert call.slots is not None
    B, n_pages = len(call.slots), -(-use.L // page)
    pages = torch.randperm(n_pages * B, generator=torch.Generator().manual_seed(3)).view(B, n_pages).to(device)
    first = call.first if has_windows else None
    row = torch.arange(n_pages * page, device=device)
    hidden = row > call.last.view(B, -1)[:, -1:]  # [B, rows]
    if first is not None:
        hidden |= row < first[:, None]
    caches, pools = [rows.nan_to_num() for rows in (call.k, call.v)], []
    for cache in caches:
        rows = torch.nn.functional.pad(cache[call.slots], (0, 0, 0, n_pages * page - use.L))
        rows.masked_fill_(hidden[:, None, :, None], math.nan)
        pools.append(rows.new_empty(n_pages * B, use.KV, page, use.D))
        pools[-1][pages] = rows.unflatten(2, (n_pages, page)).transpose(1, 2)
    got = slot_attention(call.q, *pools, None, first, call.last, most=use.L, pages=pages)
    assert_same(got, slot_attention(call.q, *caches, call.slots, first, call.last, most=use.L), name)
