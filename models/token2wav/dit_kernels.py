"""Triton kernels of the estimator: everything between its matrix products, with what lies in slots read in place.

Knows pointers, rows and tiles. Does not know steps or weights (`dit_fused`). Import only where Triton is.

M = 2 B T rows: frame t of batch row b in half c (0 with condition, 1 without) is row (c B + b) T + t.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NORM_WARPS = 4
SMALL_GRID = 264  # programs, two for each multiprocessor of an H200


@triton.jit
def _put_windows(
    value, windows, tails, new_tails, slots, n_frames, row, B, T, depth, layer, D, columns, inside, CONV: tl.constexpr
):
    """Put a frame into each of the three windows that see it, those before the chunk likewise, and keep the tail."""
    batch_row, t = row // T, row % T
    half, b = batch_row // B, batch_row % B
    first = windows + (row - t).to(tl.int64) * 3 * D + columns
    tl.store(first + t * 3 * D + 2 * D, value, mask=inside)
    tl.store(first + (t + 1) * 3 * D + D, value, mask=inside & (t + 1 < T))
    tl.store(first + (t + 2) * 3 * D, value, mask=inside & (t + 2 < T))
    n = tl.load(n_frames + b)
    slot = tl.load(slots + b)
    place = (((layer * 2 + half) * 2 + CONV) * 2) * D + columns
    new = new_tails + b.to(tl.int64) * depth * 8 * D + place
    tl.store(new, value, mask=inside & (t == n - 2))
    tl.store(new + D, value, mask=inside & (t == n - 1))
    if t == 0:
        old = tails + slot * depth * 8 * D + place
        before_last = tl.load(old, mask=inside)
        last = tl.load(old + D, mask=inside)
        tl.store(first, before_last, mask=inside)
        tl.store(first + D, last, mask=inside)
        tl.store(first + 3 * D, last, mask=inside & (T > 1))
        # A chunk of less than two frames leaves some of the old tail.
        tl.store(new, tl.where(n == 0, before_last, last), mask=inside & (n < 2))
        tl.store(new + D, last, mask=inside & (n == 0))


@triton.jit
def _normalized(x, inside, D, eps):
    mean = tl.sum(x, 0) / D
    centred = tl.where(inside, x - mean, 0.0)
    return centred * tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)


@triton.jit
def _residual_norm_kernel(
    stream, added, gate, stream_out, shift, scale, out, tails, new_tails, slots, n_frames,
    B, T, depth, layer, D, n_added,
    GATED: tl.constexpr, WINDOWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    y = tl.load(added + (row % n_added).to(tl.int64) * D + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        y *= tl.load(gate + columns, mask=inside, other=0.0)
    x = tl.load(stream + row.to(tl.int64) * D + columns, mask=inside, other=0.0) + y
    tl.store(stream_out + row.to(tl.int64) * D + columns, x, mask=inside)
    factor = 1.0 + tl.load(scale + columns, mask=inside, other=0.0)
    x = _normalized(x, inside, D, 1e-6) * factor + tl.load(shift + columns, mask=inside, other=0.0)
    value = x.to(out.dtype.element_ty)
    if WINDOWS:
        _put_windows(value, out, tails, new_tails, slots, n_frames, row, B, T, depth, layer, D, columns, inside, 0)
    else:
        tl.store(out + row.to(tl.int64) * D + columns, value, mask=inside)


@triton.jit
def _norm_mish_kernel(
    x, weight, bias, out, tails, new_tails, slots, n_frames, B, T, depth, layer, D, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    value = tl.load(x + row.to(tl.int64) * D + columns, mask=inside, other=0.0).to(tl.float32)
    value = _normalized(value, inside, D, 1e-5) * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    # tanh(softplus(x)) = (e^2 + 2e) / (e^2 + 2e + 2) with e = exp(x); beyond 20 it is 1.
    e = tl.exp(tl.minimum(value, 20.0))
    ratio = e * (e + 2.0)
    value = (value * ratio / (ratio + 2.0)).to(out.dtype.element_ty)
    _put_windows(value, out, tails, new_tails, slots, n_frames, row, B, T, depth, layer, D, columns, inside, 1)


@triton.jit
def _store_rows_kernel(
    qkv, weight, bias, fresh, pool, B, T, layer, n_rows,
    H: tl.constexpr, HD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    batch_row, t = row // T, row % T
    half, b = batch_row // B, batch_row % B
    head = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HD)[None, :]
    inside = head < H
    place = head * HD + d
    source = qkv + row.to(tl.int64) * 3 * H * HD + place
    k = tl.load(source + H * HD, mask=inside, other=0.0).to(tl.float32)
    k -= (tl.sum(k, 1) / HD)[:, None]
    k *= tl.rsqrt(tl.sum(k * k, 1) / HD + 1e-5)[:, None]
    k = k * tl.load(weight + d).to(tl.float32) + tl.load(bias + d).to(tl.float32)
    v = tl.load(source + 2 * H * HD, mask=inside, other=0.0)
    pool_row = tl.load(fresh + b * T + t)
    keys = pool + ((layer * 4 + half).to(tl.int64) * n_rows + pool_row) * H * HD + place
    tl.store(keys, k.to(pool.dtype.element_ty), mask=inside)
    tl.store(keys + 2 * n_rows.to(tl.int64) * H * HD, v, mask=inside)


@triton.jit
def _attend_block(
    q, acc, top, total, rows, count, start, keys, values, SCALE: tl.constexpr, STRIDE: tl.constexpr,
    HD: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: rows[start : start + BN], `count` of all of them valid."""
    column = start + tl.arange(0, BN)
    valid = column < count
    row = tl.load(rows + column, mask=valid, other=0)
    d = tl.arange(0, HD)
    k = tl.load(keys + row[None, :] * STRIDE + d[:, None], mask=valid[None, :], other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION) * SCALE
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp(scores - new_top[:, None])
    shrink = tl.exp(top - new_top)
    v = tl.load(values + row[:, None] * STRIDE + d[None, :], mask=valid[:, None], other=0.0)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return acc, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def _attend_kernel(
    qkv, weight, bias, cached, n_cached, fresh, n_new, pool, out, B, T, width, layer, n_rows,
    SCALE: tl.constexpr, H: tl.constexpr, HD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    batch_row, head = tl.program_id(1) // H, tl.program_id(1) % H
    half, b = batch_row // B, batch_row % B
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, HD)
    at = (batch_row * T + t).to(tl.int64)[:, None]
    within = (t < T)[:, None]
    q = tl.load(qkv + at * 3 * H * HD + head * HD + d[None, :], mask=within, other=0.0).to(tl.float32)
    q -= (tl.sum(q, 1) / HD)[:, None]
    q *= tl.rsqrt(tl.sum(q * q, 1) / HD + 1e-5)[:, None]
    q = q * tl.load(weight + d).to(tl.float32)[None, :] + tl.load(bias + d).to(tl.float32)[None, :]
    q = q.to(pool.dtype.element_ty)

    keys = pool + (layer * 4 + half).to(tl.int64) * n_rows * H * HD + head * HD
    values = keys + 2 * n_rows.to(tl.int64) * H * HD
    acc = tl.zeros((BM, HD), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    count = tl.load(n_cached + b)
    for start in range(0, count, BN):
        acc, top, total = _attend_block(
            q, acc, top, total, cached + b * width, count, start, keys, values, SCALE, H * HD, HD, BN, PRECISION
        )
    count = tl.load(n_new + b)
    for start in range(0, count, BN):
        acc, top, total = _attend_block(
            q, acc, top, total, fresh + b * T, count, start, keys, values, SCALE, H * HD, HD, BN, PRECISION
        )
    # A row of padding sees nothing and stays zero.
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at * H * HD + head * HD + d[None, :], acc.to(out.dtype.element_ty), mask=within)


@triton.jit
def _euler_kernel(x, out, width, entering, n, RATE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    conditional = tl.load(out + at, mask=inside).to(tl.float32)
    unconditional = tl.load(out + n + at, mask=inside).to(tl.float32)
    moved = tl.load(x + at, mask=inside) + tl.load(width) * ((1.0 + RATE) * conditional - RATE * unconditional)
    tl.store(x + at, moved, mask=inside)
    tl.store(entering + at, moved.to(entering.dtype.element_ty), mask=inside)


def attend_tiles(n_queries: int, n_groups: int, n_bytes: int) -> tuple[int, int, int, int]:
    """Queries and keys in a tile, warps and stages, for keys of `n_bytes` a number.

    Measured on one H200 at 450 keys: small tiles spread a few sessions over the chip, large ones read keys once.
    """
    small = n_groups * triton.cdiv(n_queries, 16) <= SMALL_GRID
    if n_bytes <= 2:
        return (16 if small else 64), 128, 4, 3
    return (16, 128, 4, 2) if small else (64, 64, 4, 3)


class StepKernels:
    """What all kernels of one Euler step are told about the batch: sizes, slots, tails and the pool of rows."""

    def __init__(
        self, slots: Tensor, cached: Tensor, n_cached: Tensor, fresh: Tensor, n_new: Tensor, pool: Tensor, tails: Tensor
    ):
        """
        Args:
            slots, n_cached, n_new: [B] int64. cached: [B, width], fresh: [B, T] int64 rows; all contiguous.
            pool: [depth, 2 (k, v), 2 halves, n_rows, H, hd]. tails: [n_slots, depth, 2, 2, 2, D]; only read.
        """
        self.slots, self.cached, self.n_cached, self.fresh, self.n_new = slots, cached, n_cached, fresh, n_new
        self.pool, self.tails = pool, tails
        self.B, self.T = fresh.shape
        self.depth, _, _, self.n_rows, self.heads, self.head_dim = pool.shape
        self.width = tails.shape[-1]
        self.M = 2 * self.B * self.T
        self.new_tails = tails.new_empty((self.B, *tails.shape[1:]))
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
        """Add `added`, gated, to the stream and modulate its norm into `out`.

        Args:
            stream: [M, D] float32; updated in place, unless there is no gate, when it is left alone.
            added: [M, D], or [M / 2, D] for both halves. gate, shift, scale: [D] float32.
            out: [M, D], or [M, 3 D] windows of the first convolution of block `layer`.
        Returns: the stream.
        """
        stream_out = torch.empty_like(stream) if gate is None else stream
        D = self.width
        _residual_norm_kernel[(self.M,)](
            stream, added, shift if gate is None else gate, stream_out, shift, scale, out, self.tails, self.new_tails,
            self.slots, self.n_new, self.B, self.T, self.depth, layer, D, len(added),
            GATED=gate is not None, WINDOWS=layer >= 0, BLOCK=triton.next_power_of_2(D), num_warps=NORM_WARPS,
        )  # fmt: skip
        return stream_out

    def norm_mish(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, layer: int) -> None:
        """Norm, mish, and the windows [M, 3 D] of the second convolution of block `layer`; x: [M, D]."""
        D = self.width
        _norm_mish_kernel[(self.M,)](
            x, weight, bias, out, self.tails, self.new_tails, self.slots, self.n_new,
            self.B, self.T, self.depth, layer, D, BLOCK=triton.next_power_of_2(D), num_warps=NORM_WARPS,
        )  # fmt: skip

    def store_rows(self, qkv: Tensor, weight: Tensor, bias: Tensor, layer: int) -> None:
        """Norm the new keys of qkv [M, 3 H hd] and put keys and values into the pool, in place."""
        _store_rows_kernel[(self.M,)](
            qkv, weight, bias, self.fresh, self.pool, self.B, self.T, layer, self.n_rows,
            H=self.heads, HD=self.head_dim, HEADS=triton.next_power_of_2(self.heads), num_warps=NORM_WARPS,
        )  # fmt: skip

    def attend(self, qkv: Tensor, weight: Tensor, bias: Tensor, out: Tensor, layer: int) -> None:
        """Norm the queries of qkv and attend to the valid rows, cached and new; out: [M, H hd]."""
        tile, keys, warps, stages = attend_tiles(self.T, 2 * self.B * self.heads, self.pool.element_size())
        grid = (triton.cdiv(self.T, tile), 2 * self.B * self.heads)
        _attend_kernel[grid](
            qkv, weight, bias, self.cached, self.n_cached, self.fresh, self.n_new, self.pool, out,
            self.B, self.T, self.cached.shape[1], layer, self.n_rows,
            SCALE=self.head_dim**-0.5, H=self.heads, HD=self.head_dim, BM=tile, BN=keys,
            PRECISION=self.precision, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def euler(self, x: Tensor, out: Tensor, width: Tensor, entering: Tensor, rate: float) -> None:
        """x [B T, n_mels] float32 one step along the guided velocity, in place and rounded into `entering`."""
        n = x.numel()
        _euler_kernel[(triton.cdiv(n, 1024),)](x, out, width, entering, n, RATE=rate, BLOCK=1024)
