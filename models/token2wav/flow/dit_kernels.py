"""Triton kernels of the estimator: the operations between its matrix products, with slot state read in place.

Contains kernels and tile sizes. Does not contain Euler steps or weights (`dit_fused`). Requires Triton.

M = 2 B T rows: frame t of batch row b in half c (0 conditional, 1 unconditional) is row (c B + b) T + t.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import has_large_tiles, launch_options
from models.token2wav.flow.block_table import SlotMapping

NORM_WARPS = 4
SMALL_GRID = 264  # programs: two per multiprocessor of an H200
NEW_ROWS = 64  # new keys per tile


@triton.jit
def _all_if(condition, columns, D):
    """Mask of the columns of one row: all of them if `condition`, else none."""
    return columns < tl.where(condition, D, 0)


@triton.jit
def _tail_at(slots, n_frames, row, B, T, layer, D, columns, CONV: tl.constexpr):
    """Returns: the batch row's valid frames, its slot, and the offset of a convolution's tail in a slot's tails."""
    batch_row = row // T
    half, b = batch_row // B, batch_row % B
    place = (((layer * 2 + half) * 2 + CONV) * 2) * D + columns
    return tl.load(n_frames + b), tl.load(slots + b), place


@triton.jit
def _old_tail(tails, slot, place, row, T, depth, D, columns):
    """The two frames of the previous chunk's tail; zeros for all but the first frame."""
    old = tails + slot * depth * 8 * D + place
    is_first = _all_if(row % T == 0, columns, D)
    return tl.load(old, mask=is_first, other=0.0), tl.load(old + D, mask=is_first, other=0.0)


@triton.jit
def _put_windows(value, windows, new_tails, places, n, place, before_last, last, row, B, T, depth, D, columns, inside):
    """Store a frame in the three windows that contain it and in the next tail; the first frame also stores the tail
    of the previous chunk in the windows that contain it.
    """
    b, t = row // T % B, row % T
    first = windows + (row - t).to(tl.int64) * 3 * D + columns
    tl.store(first + t * 3 * D + 2 * D, value, mask=inside)
    tl.store(first + (t + 1) * 3 * D + D, value, mask=_all_if(t + 1 < T, columns, D))
    tl.store(first + (t + 2) * 3 * D, value, mask=_all_if(t + 2 < T, columns, D))
    new = new_tails + tl.load(places + b) * depth * 8 * D + place
    tl.store(new, value, mask=_all_if(t == n - 2, columns, D))
    tl.store(new + D, value, mask=_all_if(t == n - 1, columns, D))
    if t == 0:
        tl.store(first, before_last, mask=inside)
        tl.store(first + D, last, mask=inside)
        tl.store(first + 3 * D, last, mask=_all_if(T > 1, columns, D))
        # A chunk of fewer than two frames keeps a part of the old tail.
        tl.store(new, tl.where(n == 0, before_last, last), mask=_all_if(n < 2, columns, D))
        tl.store(new + D, last, mask=_all_if(n == 0, columns, D))


@triton.jit
def _normalized(x, inside, D, eps):
    mean = tl.sum(x, 0) / D
    centred = tl.where(inside, x - mean, 0.0)
    return centred * tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)


# The kernels are not specialized for numbers that differ between layers and buckets. What was written before the solve
# began is read before the wait.
@triton.jit(do_not_specialize=["B", "T", "layer", "n_added"])
def _residual_norm_kernel(
    stream, added, gate, stream_out, shift, scale, out, tails, new_tails, slots, places, n_frames,
    B, T, depth, layer, D, n_added,
    GATED: tl.constexpr, WINDOWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    factor = 1.0 + tl.load(scale + columns, mask=inside, other=0.0)
    term = tl.load(shift + columns, mask=inside, other=0.0)
    if GATED:
        by = tl.load(gate + columns, mask=inside, other=0.0)
    if WINDOWS:
        n, slot, place = _tail_at(slots, n_frames, row, B, T, layer, D, columns, 0)
        before_last, last = _old_tail(tails, slot, place, row, T, depth, D, columns)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.load(added + (row % n_added).to(tl.int64) * D + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        y *= by
    x = tl.load(stream + row.to(tl.int64) * D + columns, mask=inside, other=0.0) + y
    tl.store(stream_out + row.to(tl.int64) * D + columns, x, mask=inside)
    value = (_normalized(x, inside, D, 1e-6) * factor + term).to(out.dtype.element_ty)
    if WINDOWS:
        _put_windows(value, out, new_tails, places, n, place, before_last, last, row, B, T, depth, D, columns, inside)
    else:
        tl.store(out + row.to(tl.int64) * D + columns, value, mask=inside)


@triton.jit(do_not_specialize=["B", "T", "layer"])
def _norm_mish_kernel(
    x, weight, bias, out, tails, new_tails, slots, places, n_frames, B, T, depth, layer, D,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    term = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    n, slot, place = _tail_at(slots, n_frames, row, B, T, layer, D, columns, 1)
    before_last, last = _old_tail(tails, slot, place, row, T, depth, D, columns)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row.to(tl.int64) * D + columns, mask=inside, other=0.0).to(tl.float32)
    value = _normalized(value, inside, D, 1e-5) * factor + term
    # tanh(softplus(x)) = (e^2 + 2e) / (e^2 + 2e + 2) with e = exp(x); above 20 it is 1.
    e = tl.exp(tl.minimum(value, 20.0))
    ratio = e * (e + 2.0)
    value = (value * ratio / (ratio + 2.0)).to(out.dtype.element_ty)
    _put_windows(value, out, new_tails, places, n, place, before_last, last, row, B, T, depth, D, columns, inside)


@triton.jit
def _head_norm(x, weight, bias, AXIS: tl.constexpr, HD: tl.constexpr):
    """Layer norm over one head along AXIS; weight and bias vary along the same axis."""
    x -= tl.expand_dims(tl.sum(x, AXIS) / HD, AXIS)
    return x * tl.expand_dims(tl.rsqrt(tl.sum(x * x, AXIS) / HD + 1e-5), AXIS) * weight + bias


@triton.jit
def _attend_tile(q, k, v, valid, acc, top, total, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of keys [HD, BN] and values [BN, HD]."""
    scores = tl.dot(q, k, input_precision=PRECISION) * SCALE
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp(scores - new_top[:, None])
    shrink = tl.exp(top - new_top)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return acc, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def _fetch_rows(rows, begin, count, keys, values, row_stride, BN: tl.constexpr):
    """Prefetch the first cache line of the key and the value of each row from `begin` on into the L2 cache."""
    ask: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    for start in range(begin, count, BN):
        column = start + tl.arange(0, BN)
        row = tl.load(rows + column, mask=column < count, other=0)
        for base in tl.static_range(2):
            at = ((keys if base == 0 else values) + row * row_stride).to(tl.int64)
            tl.inline_asm_elementwise(ask, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _cached_tile(rows, start, count, keys, values, d, row_stride, BN: tl.constexpr):
    """Keys [HD, BN] and values [BN, HD] of the cached rows from `start` on, and which of them are valid."""
    column = start + tl.arange(0, BN)
    valid = column < count
    row = tl.load(rows + column, mask=valid, other=0)
    k = tl.load(keys + row[None, :] * row_stride + d[:, None], mask=valid[None, :], other=0.0)
    v = tl.load(values + row[:, None] * row_stride + d[None, :], mask=valid[:, None], other=0.0)
    return k, v, valid


@triton.jit
def _own_tile(own, start, count, d, H: tl.constexpr, HD: tl.constexpr, BF: tl.constexpr):
    """Keys [HD, BF] before their norm and values [BF, HD] of the new rows from `start` on, and which are valid."""
    column = start + tl.arange(0, BF)
    valid = column < count
    source = own + column * 3 * H * HD
    k = tl.load(source[None, :] + H * HD + d[:, None], mask=valid[None, :], other=0.0)
    v = tl.load(source[:, None] + 2 * H * HD + d[None, :], mask=valid[:, None], other=0.0)
    return k, v, valid


@triton.jit(do_not_specialize=["B", "T", "layer", "width"])
def _attend_kernel(
    qkv, q_weight, q_bias, k_weight, k_bias, cached, n_cached, fresh, n_new, pool, out, B, T, width, layer,
    plane_stride, row_stride,
    SCALE: tl.constexpr, H: tl.constexpr, HD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
    AHEAD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head. AHEAD: the first BN cached rows are read before the wait."""
    batch_row, head = tl.program_id(1) // H, tl.program_id(1) % H
    half, b = batch_row // B, batch_row % B
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, HD)
    within = (t < T)[:, None]
    # Row numbers are 64-bit integers, and so are their products with the stride: a pool has more than 2**31 elements.
    keys = pool + (layer * 4 + half).to(tl.int64) * plane_stride + head * HD
    values = keys + 2 * plane_stride.to(tl.int64)
    rows = cached + b * width
    # Row addresses and cached rows were written before the solve began, so they can be read before the wait: every
    # kernel of the solve releases the next kernel only after its own wait.
    count, n_own = tl.load(n_cached + b), tl.load(n_new + b)
    weight, bias = tl.load(q_weight + d).to(tl.float32), tl.load(q_bias + d).to(tl.float32)
    k_factor, k_term = tl.load(k_weight + d).to(tl.float32), tl.load(k_bias + d).to(tl.float32)
    if AHEAD:
        k_first, v_first, is_first = _cached_tile(rows, 0, count, keys, values, d, row_stride, BN)
    if PDL:
        if tl.program_id(0) == 0:
            _fetch_rows(rows, BN if AHEAD else 0, count, keys, values, row_stride, BN)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = qkv + batch_row.to(tl.int64) * T * 3 * H * HD + head * HD
    q = tl.load(own + t[:, None] * 3 * H * HD + d[None, :], mask=within, other=0.0).to(tl.float32)
    if AHEAD:
        k_own, v_own, is_own = _own_tile(own, 0, n_own, d, H, HD, BF)
    q = _head_norm(q, weight[None, :], bias[None, :], 1, HD).to(pool.dtype.element_ty)

    acc = tl.zeros((BM, HD), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    begin = 0
    if AHEAD:
        begin = BN
        if count > 0:
            acc, top, total = _attend_tile(q, k_first, v_first, is_first, acc, top, total, SCALE, PRECISION)
    for start in range(begin, count, BN):
        k, v, valid = _cached_tile(rows, start, count, keys, values, d, row_stride, BN)
        acc, top, total = _attend_tile(q, k, v, valid, acc, top, total, SCALE, PRECISION)
    # The new keys are in qkv. The program of the first queries also stores them in the pool for later chunks.
    for start in range(0, n_own, BF):
        if AHEAD:  # all new rows are one tile
            k, v, valid = k_own, v_own, is_own
        else:
            k, v, valid = _own_tile(own, start, n_own, d, H, HD, BF)
        k = _head_norm(k.to(tl.float32), k_factor[:, None], k_term[:, None], 0, HD).to(pool.dtype.element_ty)
        v = v.to(pool.dtype.element_ty)
        if tl.program_id(0) == 0:
            column = start + tl.arange(0, BF)
            row = tl.load(fresh + b * T + column, mask=valid, other=0)
            tl.store(keys + row[None, :] * row_stride + d[:, None], k, mask=valid[None, :])
            tl.store(values + row[:, None] * row_stride + d[None, :], v, mask=valid[:, None])
        acc, top, total = _attend_tile(q, k, v, valid, acc, top, total, SCALE, PRECISION)
    # A row of padding attends to no key and stays zero.
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    at = (batch_row * T + t).to(tl.int64)[:, None]
    tl.store(out + at * H * HD + head * HD + d[None, :], acc.to(out.dtype.element_ty), mask=within)


@triton.jit
def _euler_kernel(x, out, width, entering, n, RATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    conditional = tl.load(out + at, mask=inside).to(tl.float32)
    unconditional = tl.load(out + n + at, mask=inside).to(tl.float32)
    moved = tl.load(x + at, mask=inside) + tl.load(width) * ((1.0 + RATE) * conditional - RATE * unconditional)
    tl.store(x + at, moved, mask=inside)
    tl.store(entering + at, moved.to(entering.dtype.element_ty), mask=inside)


class AttendTiles(NamedTuple):
    """Tile sizes of the attention."""

    queries: int
    keys: int
    warps: int
    stages: int
    is_ahead: bool = False  # the first tile of cached keys is read before the wait; all new rows are one tile


def attend_tiles(n_queries: int, n_groups: int, n_bytes: int, *, is_large: bool) -> AttendTiles:
    """Tile sizes of the attention.

    Measured on one H200 at 450 keys: small tiles spread a few sessions over the GPU, large tiles read each key once.

    Args:
        n_queries: queries of one batch row.
        n_groups: batch rows times heads.
        n_bytes: size of one key element.
        is_large: programs may hold large tiles, see `has_large_tiles`.
    """
    n_programs = n_groups * triton.cdiv(n_queries, 16)
    small = n_programs <= SMALL_GRID
    if n_bytes > 2:
        return AttendTiles(16, 128, 4, 2) if small else AttendTiles(64, 64, 4, 3)
    # A multiprocessor has room for one program that reads ahead.
    if is_large and 2 * n_programs <= SMALL_GRID and n_queries <= NEW_ROWS:
        return AttendTiles(16, 256, 8, 2, is_ahead=True)
    return AttendTiles(16 if small else 64, 128, 4, 3)


class StepKernels:
    """The kernels of one Euler step, with the arguments that they share: sizes, slots, tails and the pool of rows."""

    def __init__(self, mapping: SlotMapping, places: Tensor, pool: Tensor, tails: Tensor, new_tails: Tensor):
        """
        Args:
            mapping: contiguous row addresses.
            places: [B] entries of `new_tails` to write.
            pool: [depth, 2 (k, v), 2 halves, n_rows, H, hd], contiguous or with the rows outermost in memory: planes
                [H, hd] of one row or planes [n_rows, H, hd] follow each other at equal distances.
            tails: [n_slots, depth, 2, 2, 2, D]; read at the slots of `mapping`.
            new_tails: as `tails` with any number of entries. May be `tails` itself if `places` are other slots than
                those of `mapping`.
        """
        self.slots, self.cached, self.n_cached, self.fresh, self.n_new = mapping
        self.pool, self.tails, self.new_tails, self.places = pool, tails, new_tails, places
        self.B, self.T = self.fresh.shape
        self.depth, _, _, _, self.heads, self.head_dim = pool.shape
        *_, self.plane_stride, self.row_stride, _, _ = pool.stride()
        planes = tuple(n * self.plane_stride for n in (4, 2, 1))
        assert pool.stride() == (*planes, self.row_stride, self.head_dim, 1), pool.stride()
        self.width = tails.shape[-1]
        self.M = 2 * self.B * self.T
        self.launch = launch_options(pool.device)
        allow_tf32 = torch.backends.cuda.matmul.allow_tf32
        self.precision = "tf32" if allow_tf32 or pool.dtype != torch.float32 else "ieee"

    def residual_norm(
        self,
        stream: Tensor,
        added: Tensor,
        gate: Tensor | None,
        shift: Tensor,
        scale: Tensor,
        out: Tensor,
        layer: int = -1,
    ) -> Tensor:
        """The residual stream plus gate * added; writes its modulated norm to `out`.

        Args:
            stream: [M, D] float32; updated in place if there is a gate, else unchanged.
            added: [M, D], or [M / 2, D] for both halves.
            gate: [D] float32; None = 1.
            shift: [D] float32.
            scale: [D] float32.
            out: [M, D], or with `layer` the windows [M, 3 D] of that block's first convolution.
            layer: block; -1 = `out` holds no windows.
        Returns: [M, D] float32.
        """
        stream_out = torch.empty_like(stream) if gate is None else stream
        D = self.width
        _residual_norm_kernel[(self.M,)](
            stream, added, shift if gate is None else gate, stream_out, shift, scale, out, self.tails, self.new_tails,
            self.slots, self.places, self.n_new, self.B, self.T, self.depth, layer, D, len(added),
            GATED=gate is not None, WINDOWS=layer >= 0, BLOCK=triton.next_power_of_2(D),
            num_warps=NORM_WARPS, **self.launch,
        )  # fmt: skip
        return stream_out

    def norm_mish(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, layer: int) -> None:
        """Write mish(norm(x)) of x [M, D] to the windows `out` [M, 3 D] of the second convolution of block `layer`."""
        D = self.width
        _norm_mish_kernel[(self.M,)](
            x, weight, bias, out, self.tails, self.new_tails, self.slots, self.places, self.n_new,
            self.B, self.T, self.depth, layer, D, BLOCK=triton.next_power_of_2(D),
            num_warps=NORM_WARPS, **self.launch,
        )  # fmt: skip

    def attend(
        self, qkv: Tensor, q_norm: tuple[Tensor, Tensor], k_norm: tuple[Tensor, Tensor], out: Tensor, layer: int
    ) -> None:
        """Attention of block `layer` over the valid cached and new rows; stores the new keys and values in the pool.

        Args:
            qkv: [M, 3 H hd] before the norms of queries and keys.
            q_norm: weight and bias [hd].
            k_norm: weight and bias [hd].
            out: [M, H hd].
            layer: block.
        """
        is_large = has_large_tiles(self.pool.device)
        tiles = attend_tiles(self.T, 2 * self.B * self.heads, self.pool.element_size(), is_large=is_large)
        assert not tiles.is_ahead or self.T <= NEW_ROWS, f"queries: expected at most {NEW_ROWS}, got {self.T}"
        grid = (triton.cdiv(self.T, tiles.queries), 2 * self.B * self.heads)
        _attend_kernel[grid](
            qkv, *q_norm, *k_norm, self.cached, self.n_cached, self.fresh, self.n_new, self.pool, out,
            self.B, self.T, self.cached.shape[1], layer, self.plane_stride, self.row_stride,
            SCALE=self.head_dim**-0.5, H=self.heads, HD=self.head_dim, BM=tiles.queries, BN=tiles.keys, BF=NEW_ROWS,
            AHEAD=tiles.is_ahead, PRECISION=self.precision, num_warps=tiles.warps, num_stages=tiles.stages,
            **self.launch,
        )  # fmt: skip

    def euler(self, x: Tensor, out: Tensor, width: Tensor, entering: Tensor, rate: float) -> None:
        """Advance x by one Euler step along the guided velocity.

        Args:
            x: [B T, n_mels] float32; updated in place.
            out: [2 B T, n_mels] velocity of both halves.
            width: [] float32 width of the step.
            entering: [B T, n_mels] receives x, rounded to the model's type.
            rate: weight of the guidance.
        """
        n = x.numel()
        _euler_kernel[(triton.cdiv(n, 256),)](x, out, width, entering, n, RATE=rate, BLOCK=256, **self.launch)
