"""Triton attention that reads keys and values in place: from slots of a cache, or the new keys of an encoder.

Query heads that share keys are rows of one tile: row m of a batch row is query m // G of head m % G in the group. A
context is split into parts of a fixed number of rows, each computed by its own program, and a second kernel combines
the parts. The split depends on the number of queries of a row alone, not on the batch, the context length or the
cache's bucket: other rows of the batch change no bit of a row, unless they change its padding. Requires Triton.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.checkpoint.precision import Kind
from models.kernels.launch import launch_options
from models.kernels.paired_rows import GROUP, PairedRows, empty_pairs, paired_rows, store_pairs
from models.kernels.tile_ops import add_dot

PARTS_PER_TILE = 16  # parts that one tile of the combining kernel holds
MAX_KEY_TILE = 64  # of `attention_tiles`: rows of a page are a multiple of it
LOWEST = tl.constexpr(-1e30)  # the maximum of no scores; finite, because inf - inf is NaN


class AttentionInputs(NamedTuple):
    """Queries, the keys and values of all slots, and which rows are visible, as `slot_attention` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor | None
    first: Tensor | None
    last: Tensor


class AttentionTiles(NamedTuple):
    """Tile sizes of one launch."""

    queries: int  # rows of queries per tile, at least 16
    keys: int  # rows of keys per tile, at least 16
    part: int  # rows of keys per program, a multiple of `keys`; 0 = all
    warps: int
    stages: int


def attention_tiles(n_rows: int, n_bytes: int) -> AttentionTiles:
    """Tile sizes for `n_rows` rows of queries (T times the heads of a group) and keys of `n_bytes` per number.

    They depend on the number of queries alone: sizes chosen by batch or context length would let the bits of a session
    depend on other sessions. Measured on one H200 at the released sizes.
    """
    if n_bytes > 2:
        return AttentionTiles(16, 32, 128 if n_rows <= 128 else 1024, 8, 2)
    if n_rows <= 32:
        return AttentionTiles(16, 64, 256, 4, 3)
    if n_rows <= 128:
        return AttentionTiles(64, 64, 256, 4, 3)
    if n_rows <= 1024:
        return AttentionTiles(64, 64, 512, 4, 3)
    return AttentionTiles(64, 64, 0, 4, 3)


@triton.jit
def _attend_block(
    q, q_tail, acc, acc_tail, top, total, keys, values, pages, k_page, v_page, start, end, newest,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    FACTOR: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, FIRST: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys from `start` on, none at or beyond `end`. WHOLE: all of them are visible to each query.

    PAGE: rows of a page, a multiple of BN; 0 = the rows are consecutive. FIRST: `start` may be no multiple of BN, so
    that the tile may end in the next page.
    """
    row = start + tl.arange(0, BN)
    within = (row < end)[:, None]
    place = row
    if PAGE > 0:
        page = tl.load(pages + start // PAGE)
        if FIRST:
            next_page = tl.load(pages + (tl.minimum(start + BN, end) - 1) // PAGE)
            page = tl.where(row // PAGE == start // PAGE, page, next_page)[:, None]
        keys += page * k_page
        values += page * v_page
        place = row % PAGE
    k_rows = keys + place.to(tl.int64)[:, None] * K_ROW
    v_rows = values + place.to(tl.int64)[:, None] * V_ROW
    d = tl.arange(0, MAIN)[None, :]
    inside = within & (d < D) if MAIN > D else within
    k = tl.load(k_rows + d, mask=inside, other=0.0)
    v = tl.load(v_rows + d, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if TAIL > 0:
        d_tail = MAIN + tl.arange(0, TAIL)[None, :]
        inside_tail = within & (d_tail < D) if MAIN + TAIL > D else within
        k_tail = tl.load(k_rows + d_tail, mask=inside_tail, other=0.0)
        v_tail = tl.load(v_rows + d_tail, mask=inside_tail, other=0.0)
        scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)
    scores *= FACTOR
    if not WHOLE:
        scores = tl.where(row[None, :] <= newest[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(v.dtype)
    acc = add_dot(weights, v, acc * shrink[:, None], PRECISION)
    if TAIL > 0:
        acc_tail = add_dot(weights, v_tail, acc_tail * shrink[:, None], PRECISION)
    return acc, acc_tail, new_top, total


@triton.jit(do_not_specialize=["n_rows", "n_tiles", "n_parts", "most", "last_batch", "pages_batch"])
def _attend_kernel(
    q, k, v, slots, first, last, out, sums, weighed, n_rows, n_tiles, n_parts, most,
    q_batch, k_slot, v_slot, last_batch, pages_batch,
    LAST_ROW: tl.constexpr, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, K_ROW: tl.constexpr,
    V_HEAD: tl.constexpr, V_ROW: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, FACTOR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr, PAGE: tl.constexpr,
    SLOTS: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, part = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    b, head = tl.program_id(1) // KV, tl.program_id(1) % KV
    m = tile * BM + tl.arange(0, BM)
    t, g = m // G, m % G
    is_query = m < n_rows
    newest = tl.load(last + b * last_batch + t * LAST_ROW, mask=is_query, other=-1)
    newest = tl.minimum(newest, most - 1).to(tl.int32)
    start = tl.maximum(tl.load(first + b), 0).to(tl.int32) if FIRST else 0
    end = tl.max(newest, 0) + 1
    if PART > 0:
        start = tl.maximum(start, part * PART)
        end = tl.minimum(end, part * PART + PART)
        if start >= end:
            return
    newest = tl.minimum(newest, end - 1)

    pages = slots
    keys = k + head * K_HEAD
    values = v + head * V_HEAD
    if PAGE > 0:
        pages += b * pages_batch
    else:
        slot = tl.load(slots + b) if SLOTS else b.to(tl.int64)
        keys += slot * k_slot
        values += slot * v_slot
    q_rows = q + b.to(tl.int64) * q_batch + (t * Q_ROW + (head * G + g) * Q_HEAD)[:, None]
    d = tl.arange(0, MAIN)[None, :]
    inside = is_query[:, None] & (d < D)
    queries = tl.load(q_rows + d, mask=inside, other=0.0)
    acc = tl.zeros((BM, MAIN), tl.float32)
    top = tl.full((BM,), LOWEST, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    q_tail, acc_tail = queries, acc
    if TAIL > 0:
        d_tail = MAIN + tl.arange(0, TAIL)[None, :]
        inside_tail = is_query[:, None] & (d_tail < D)
        q_tail = tl.load(q_rows + d_tail, mask=inside_tail, other=0.0)
        acc_tail = tl.zeros((BM, TAIL), tl.float32)

    masked = start
    if BM > 16:
        seen_by_all = tl.min(tl.where(is_query, newest + 1, end), 0)
        masked += tl.maximum(seen_by_all - start, 0) // BN * BN
        for at in range(start, masked, BN):
            acc, acc_tail, top, total = _attend_block(
                queries, q_tail, acc, acc_tail, top, total, keys, values, pages, k_slot, v_slot, at, end, newest,
                K_ROW, V_ROW, D, MAIN, TAIL, FACTOR, BN, PAGE, FIRST, True, PRECISION,
            )  # fmt: skip
    for at in range(masked, end, BN):
        acc, acc_tail, top, total = _attend_block(
            queries, q_tail, acc, acc_tail, top, total, keys, values, pages, k_slot, v_slot, at, end, newest,
            K_ROW, V_ROW, D, MAIN, TAIL, FACTOR, BN, PAGE, FIRST, False, PRECISION,
        )  # fmt: skip

    if PART > 0:
        place = (tl.program_id(1).to(tl.int64) * n_parts + part) * n_rows + m
        tl.store(weighed + place * 2, top, mask=is_query)
        tl.store(weighed + place * 2 + 1, total, mask=is_query)
        to = sums + place[:, None] * D
    else:
        # A query without a visible key stays zero.
        divisor = tl.where(total == 0.0, 1.0, total)[:, None]
        acc /= divisor
        acc_tail /= divisor
        to = out + b.to(tl.int64) * n_rows * KV * D + (t * KV * G * D + (head * G + g) * D)[:, None]
    tl.store(to + d, acc.to(to.dtype.element_ty), mask=inside)
    if TAIL > 0:
        tl.store(to + d_tail, acc_tail.to(to.dtype.element_ty), mask=inside_tail)


@triton.jit(do_not_specialize=["n_rows", "n_parts", "most", "last_batch"])
def _combine_kernel(
    sums, weighed, first, last, out, steps, pair_sums, n_rows, n_parts, most, last_batch,
    LAST_ROW: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr, BP: tl.constexpr, TILES: tl.constexpr, FIRST: tl.constexpr, PAIRED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one query of one head, oldest first. PAIRED: it is stored as pairs of bfloat16; D = 128."""
    # The next kernel starts when this one ends. Otherwise programs of many layers would wait on the multiprocessors and
    # leave kernels of other streams no room: first windows of the vocoder took 14.7 ms with it, 9.6 to 9.8 without.
    if PDL:
        tl.extra.cuda.gdc_wait()
    b, t, h = tl.program_id(1), tl.program_id(0) // (KV * G), tl.program_id(0) % (KV * G)
    newest = tl.minimum(tl.load(last + b * last_batch + t * LAST_ROW), most - 1).to(tl.int32)
    oldest = tl.maximum(tl.load(first + b), 0).to(tl.int32) if FIRST else 0
    begin = oldest // PART
    end = tl.where(newest >= oldest, newest // PART + 1, 0)
    places = (b * KV + h // G).to(tl.int64) * n_parts * n_rows + t * G + h % G
    d = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    top = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    # A constant number of tiles, so that their loads are issued at once; absent parts change no bit.
    for i in range(0, TILES):
        part = begin + i * BP + tl.arange(0, BP)
        exists = part < end
        place = places + part.to(tl.int64) * n_rows
        part_top = tl.load(weighed + place * 2, mask=exists, other=LOWEST)
        part_total = tl.load(weighed + place * 2 + 1, mask=exists, other=0.0)
        inside = exists[:, None] & (d < D)[None, :]
        part_acc = tl.load(sums + place[:, None] * D + d[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(part_top, 0))
        weights = tl.exp2(part_top - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(part_total * weights, 0)
        acc = acc * shrink + tl.sum(part_acc * weights[:, None], 0)
        top = new_top
    acc /= tl.where(total == 0.0, 1.0, total)
    row = b * (n_rows // G) + t
    if PAIRED:
        FP8: tl.constexpr = out.dtype.element_ty != tl.int8
        n_queries = tl.num_programs(1) * (n_rows // G)
        number = acc.to(tl.bfloat16).to(tl.float32)
        exists = tl.arange(0, 1) < 1
        store_pairs(number, out, steps, pair_sums, row, h * D, n_queries, KV * G * D, exists, FP8, 1)
    else:
        tl.store(out + row.to(tl.int64) * KV * G * D + h * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def _widths(D: int) -> tuple[int, int]:
    """Widths of two tiles, powers of two and at least 16, that hold D columns; the second is 0 if one is enough."""
    main = max(16, 1 << (D.bit_length() - 1))
    return main, max(16, triton.next_power_of_2(D - main)) if main < D else 0


def slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor | None,
    first: Tensor | None,
    last: Tensor,
    *,
    most: int,
    pages: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention to consecutive rows, read in place; softmax in float32.

    Args:
        q: [B, T, H, D] with a contiguous last dimension and any other strides.
        k, v: [S, KV, L, D] in q's dtype, strides as q; H a multiple of KV. Only rows that are visible to some query of
            the batch row are read, and these must be finite.
        slots: [B] int64 contiguous, index into the first dimension of `k` and `v`; None = row b reads b.
        first: [B] int64 contiguous, oldest visible row; None or negative = from the start.
        last: [B] for all queries of a batch row, or [B, T], int64: newest visible row.
        most: at least every `last` + 1 and at most the rows that a batch row can have, L without pages; static. It
            sizes the launch and changes no bit of the result.
        pages: [B, n] int64, index into the first dimension of `k` and `v`: row r of batch row b is row r % L of page
            `pages[b, r // L]`, with L a multiple of `MAX_KEY_TILE`. `slots` is not read then. Pages change no bit of
            the result.
    Returns: [B, T, H * D] contiguous; zeros for a query without a visible row.
    """
    tiles = attention_tiles(q.shape[1] * q.shape[2] // k.shape[1], k.element_size())
    return attend_tiled(q, k, v, slots, first, last, most, tiles, pages)


def attend_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor | None,
    first: Tensor | None,
    last: Tensor,
    most: int,
    tiles: AttentionTiles,
    pages: Tensor | None = None,
) -> Tensor:
    """`slot_attention` with given tile sizes."""
    out = q.new_empty((*q.shape[:2], q.shape[2] * q.shape[3]))
    _attend(AttentionInputs(q, k, v, slots, first, last), most, tiles, pages, out)
    return out


def slot_attention_pairs(inputs: AttentionInputs, kind: Kind, *, most: int, pages: Tensor | None = None) -> PairedRows:
    """`slot_attention` of bfloat16 as pairs for a weight of `kind`; H * D a multiple of 128."""
    (B, T, H, D), k = inputs.q.shape, inputs.k
    tiles = attention_tiles(T * H // k.shape[1], k.element_size())
    if D != GROUP or _n_parts(most, tiles) == 1:
        return paired_rows(attend_tiled(*inputs, most, tiles, pages), kind)
    pairs = empty_pairs((B, T, H * D), kind, k.device)
    _attend(inputs, most, tiles, pages, pairs)
    return pairs


def _n_parts(most: int, tiles: AttentionTiles) -> int:
    return triton.cdiv(most, tiles.part) if tiles.part else 1


def _attend(
    inputs: AttentionInputs, most: int, tiles: AttentionTiles, pages: Tensor | None, out: Tensor | PairedRows
) -> None:
    """Write the result to `out`; pairs only of a context that is split."""
    q, k, v, slots, first, last = inputs
    (B, T, H, D), KV = q.shape, k.shape[1]
    assert q.stride(3) == k.stride(3) == v.stride(3) == 1, "q, k, v: expected a contiguous last dimension"
    most_rows, page = (k.shape[2], 0) if pages is None else (k.shape[2] * pages.shape[1], k.shape[2])
    assert most <= most_rows, f"most: expected at most {most_rows} rows, got {most}"
    assert page % tiles.keys == 0, f"rows of a page: expected a multiple of {tiles.keys}, got {page}"
    if pages is not None:
        slots = pages
    n_rows = T * H // KV
    n_tiles, n_parts = triton.cdiv(n_rows, tiles.queries), _n_parts(most, tiles)
    split = n_parts > 1
    assert isinstance(out, Tensor) or (split and D == GROUP), "out: expected a tensor for a context that is not split"
    whole = out if isinstance(out, Tensor) else q  # in the types of `q`; not written if the context is split
    sums, weighed = whole, whole
    if split:
        sums = q.new_empty((B * KV, n_parts, n_rows, D), dtype=torch.float32)
        weighed = q.new_empty((B * KV, n_parts, n_rows, 2), dtype=torch.float32)
    launch, last_row = launch_options(q.device), last.stride(1) if last.dim() > 1 else 0
    main, tail = _widths(D)
    wide = torch.backends.cuda.matmul.allow_tf32 or k.dtype != torch.float32
    _attend_kernel[(n_tiles * n_parts, B * KV)](
        q, k, v, slots, first, last, whole, sums, weighed, n_rows, n_tiles, n_parts, most,
        q.stride(0), k.stride(0), v.stride(0), last.stride(0), 0 if pages is None else pages.stride(0),
        LAST_ROW=last_row, Q_ROW=q.stride(1), Q_HEAD=q.stride(2), K_HEAD=k.stride(1), K_ROW=k.stride(2),
        V_HEAD=v.stride(1), V_ROW=v.stride(2), KV=KV, G=H // KV, D=D, MAIN=main, TAIL=tail,
        FACTOR=D**-0.5 * math.log2(math.e), BM=tiles.queries, BN=tiles.keys,
        PART=tiles.part if split else 0, PAGE=page, SLOTS=slots is not None, FIRST=first is not None,
        PRECISION="tf32" if wide else "ieee", num_warps=tiles.warps,
        num_stages=tiles.stages + (2 if page else 0), **launch,  # page numbers have buffers of their own
    )  # fmt: skip
    if split:
        target = (out, None, None) if isinstance(out, Tensor) else out
        _combine_kernel[(T * H, B)](
            sums, weighed, first, last, *target, n_rows, n_parts, most, last.stride(0),
            LAST_ROW=last_row, KV=KV, G=H // KV, D=D, PART=tiles.part,
            BLOCK=triton.next_power_of_2(D), BP=PARTS_PER_TILE, TILES=triton.cdiv(n_parts, PARTS_PER_TILE),
            FIRST=first is not None, PAIRED=isinstance(out, PairedRows), num_warps=4, **launch,
        )  # fmt: skip
