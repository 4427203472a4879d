"""Slot attention compared with masked SDPA on a gathered copy, and with compiled flex_attention.

Contains every attention shape of the model. flex_attention reads the cache in place too, with slots in order; its cases
come last, because each compiles for seconds.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.timing import Case, Figures, Meter, gb_per_s, relative_error
from models.kernels.attention import MAX_KEY_TILE, slot_attention
from models.layers.kv_cache import joined
from models.layers.transformer import attend

POOL = 2**32  # elements of the pool; all keys and values are views of it
PAGE_ROWS = 128  # as in a worker
CHECKED = 2  # batch rows whose result is compared


class AttentionShape(NamedTuple):
    """T query rows of H heads over a cache of L rows with KV heads.

    is_fresh: keys and values are outputs of the same packed linear; there is no cache.
    """

    name: str
    T: int
    H: int
    KV: int
    D: int
    L: int
    is_causal: bool = True
    is_fresh: bool = False


def _llm(name: str, T: int) -> AttentionShape:
    return AttentionShape(name, T, H=32, KV=8, D=128, L=8192)


DECODE, SPEECH = _llm("decode", 1), AttentionShape("speech", 1, H=12, KV=12, D=64, L=4096)
AUDIO = AttentionShape("audio", 50, H=16, KV=16, D=64, L=1501, is_causal=False)
VISION = AttentionShape("vision", 1088, H=16, KV=16, D=72, L=1088, is_causal=False, is_fresh=True)
# Shape, batch, context rows, rows that the launch is sized for.
DECODES = tuple((DECODE, batch, context, context) for batch in (1, 8, 32, 64) for context in (512, 2048, 8192))
SHAPES = (
    *DECODES,
    *((_llm("prefill", T), batch, 2048, 2048) for T, batch in ((16, 1), (96, 1), (96, 8), (512, 1))),
    *((SPEECH, batch, 300, 512) for batch in (1, 8, 32)),
    *((AUDIO, batch, 1450, 1501) for batch in (1, 8)),
    *((VISION, batch, 1088, 1088) for batch in (1, 4)),
)
FLEX_SHAPES = (*DECODES, (_llm("prefill", 96), 1, 2048, 2048), (VISION, 1, 1088, 1088))
TINY_SHAPES = (
    (AttentionShape("decode", 1, H=4, KV=2, D=16, L=64), 2, 40, 48),
    (AttentionShape("audio", 3, 2, 2, 16, 40, False), 1, 30, 40),
)


class Operands:
    """Inputs of one shape: enough sets of keys and values to exceed the L2 cache."""

    def __init__(self, meter: Meter, pool: Tensor, shape: AttentionShape, batch: int, context: int, most: int):
        self.meter, self.shape, self.most = meter, shape, most
        self.n_bytes = 2 * batch * context * shape.KV * shape.D * pool.element_size()
        n_copies = meter.n_copies(self.n_bytes)
        if shape.is_fresh:
            layers = _views(pool, n_copies, batch, shape.T, 3, shape.H, shape.D)
            self.q = [layer[:, :, 0] for layer in layers]
            self.kv = [(layer[:, :, 1].transpose(1, 2), layer[:, :, 2].transpose(1, 2)) for layer in layers]
            self.slots = self.first = None
        else:
            caches = _views(pool, n_copies, 2, batch + 1, shape.KV, shape.L, shape.D)
            self.q = [meter.randn(batch, shape.T, shape.H, shape.D)] * len(caches)
            self.kv = [tuple(cache) for cache in caches]
            self.slots = torch.arange(batch, device=meter.device).flip(0).contiguous()
            self.first = torch.zeros_like(self.slots)
        self.pages = None if shape.is_fresh or shape.L % MAX_KEY_TILE else self._pages(batch)
        newest = torch.full((batch,), context - 1, device=meter.device)
        rows = torch.arange(shape.T - 1, -1, -1, device=meter.device)
        self.last = newest[:, None] - rows if shape.is_causal else newest
        self.last_row = self.last if shape.is_causal else newest[:, None].expand(batch, shape.T).contiguous()
        columns = torch.arange(most, device=meter.device)
        self.mask = columns <= (self.last if shape.is_causal else newest[:, None])[:, :, None]

    def ours(self, i: int) -> Tensor:
        return slot_attention(self.q[i], *self.kv[i], self.slots, self.first, self.last, most=self.most)

    def _pages(self, batch: int) -> Tensor:
        """Pages [B, n] of the same memory, in no order."""
        self.page = min(PAGE_ROWS, self.shape.L)
        n, n_pages = -(-self.most // self.page), (batch + 1) * self.shape.L // self.page
        order = torch.randperm(n_pages, device=self.meter.device)[: batch * n]
        return order.view(batch, n)

    def _paged_kv(self, i: int) -> list[Tensor]:
        return [rows.reshape(-1, self.shape.KV, self.page, self.shape.D) for rows in self.kv[i]]

    def paged(self, i: int) -> Tensor:
        return slot_attention(self.q[i], *self._paged_kv(i), None, None, self.last, most=self.most, pages=self.pages)

    def paged_exact(self, pages: Tensor) -> Tensor:
        """As `exact`, for pages."""
        k, v = (joined(rows, pages[:CHECKED])[:, :, : self.most].float() for rows in self._paged_kv(0))
        return attend(self.q[0][:CHECKED].float().contiguous(), k, v, self.mask[:CHECKED])

    def gathered(self, i: int) -> Tensor:
        """SDPA on a gathered copy, as in `CacheView.read` and `attend`."""
        k, v = self.kv[i]
        if self.slots is not None:
            k, v = (rows.narrow(2, 0, self.most).index_select(0, self.slots) for rows in (k, v))
        return attend(self.q[i].contiguous(), k, v, self.mask)

    def exact(self, slots: Tensor | None) -> Tensor:
        """Float32 result of the first batch rows. slots: slots of their keys; None = row b reads slot b."""
        k, v = self.kv[0]
        if slots is None:
            n = len(self.mask[:CHECKED])  # the cache has more slots than the batch has rows
            k, v = k[:n], v[:n]
        else:
            k, v = (rows.index_select(0, slots[:CHECKED]) for rows in (k, v))
        k, v = (rows.narrow(2, 0, self.most).float() for rows in (k, v))
        return attend(self.q[0][:CHECKED].float().contiguous(), k, v, self.mask[:CHECKED])

    def flex(self) -> Callable[[int], Tensor]:
        """flex_attention with a block mask; row b reads slot b. Returns: function from set index to [B, H, T, D]."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        shape, last_row = self.shape, self.last_row

        def is_visible(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return column <= last_row[b, row]

        torch.compiler.reset()  # above the recompile limit a shape would silently run uncompiled
        batch = len(last_row)
        blocks = create_block_mask(is_visible, batch, None, shape.T, self.most, device=self.meter.device)
        run = torch.compile(flex_attention, dynamic=False)

        def call(i: int) -> Tensor:
            k, v = (rows[:batch, :, : self.most] for rows in self.kv[i])
            return run(self.q[i].transpose(1, 2), k, v, block_mask=blocks, enable_gqa=shape.H != shape.KV)

        return call


def cases(meter: Meter) -> Iterator[Case]:
    """All shapes, then flex_attention for some of them."""
    pool = meter.randn(2**16 if meter.is_tiny else POOL)
    for shape, *sizes in TINY_SHAPES if meter.is_tiny else SHAPES:
        yield Case(shape.name, _sizes(shape, *sizes), partial(_measure, meter, pool, shape, *sizes))
    for shape, *sizes in () if meter.is_tiny else FLEX_SHAPES:
        yield Case(f"{shape.name}, flex", _sizes(shape, *sizes), partial(_measure_flex, meter, pool, shape, *sizes))


def _sizes(shape: AttentionShape, batch: int, context: int, most: int) -> dict[str, int]:
    return {"batch": batch, "rows": shape.T, "context": context}


def _measure(meter: Meter, pool: Tensor, *shape: object) -> Figures:
    operands = Operands(meter, pool, *shape)
    n = len(operands.kv)
    error = relative_error(operands.ours(0)[:CHECKED], operands.exact(operands.slots))
    ours, gathered = meter.time_us(operands.ours, n), meter.time_us(operands.gathered, min(n, 16))
    found = {"ours_us": ours, "sdpa_us": gathered, "gb_per_s": gb_per_s(operands.n_bytes, ours), "error": error}
    if operands.pages is not None:
        found["pages_us"] = meter.time_us(operands.paged, n)
        found["pages_error"] = relative_error(operands.paged(0)[:CHECKED], operands.paged_exact(operands.pages))
    return found


def _measure_flex(meter: Meter, pool: Tensor, *shape: object) -> Figures:
    operands = Operands(meter, pool, *shape)
    call = operands.flex()
    error = relative_error(call(0)[:CHECKED].transpose(1, 2).flatten(2), operands.exact(None))
    us = meter.time_us(call, len(operands.kv))
    return {"flex_us": us, "gb_per_s": gb_per_s(operands.n_bytes, us), "error": error}


def _views(pool: Tensor, n: int, *shape: int) -> list[Tensor]:
    """Up to n consecutive views of the pool."""
    size = torch.Size(shape).numel()
    n = min(n, pool.numel() // size)
    assert n, f"pool: expected at least {size} elements, got {pool.numel()}"
    return [pool[i * size : (i + 1) * size].view(shape) for i in range(n)]
