"""Attention over slots against a gathered copy with masked SDPA, and against compiled flex_attention.

Knows the sizes of every use that the model has of it. flex_attention reads rows where they lie too, of slots in their
order; its cases come last, since each compiles for seconds.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.timing import Case, Figures, Meter, error_of, rate
from models.kernels.attention import slot_attention
from models.layers.transformer import attend

POOL = 2**32  # numbers that all keys and values are views of
CHECKED = 2  # batch rows that are compared


class Use(NamedTuple):
    """T new rows of H heads over a cache of L rows. fresh: keys and values of the call's own product, no cache."""

    name: str
    T: int
    H: int
    KV: int
    D: int
    L: int
    is_causal: bool = True
    is_fresh: bool = False


def _llm(name: str, T: int) -> Use:
    return Use(name, T, H=32, KV=8, D=128, L=8192)


DECODE, SPEECH = _llm("decode", 1), Use("speech", 1, H=12, KV=12, D=64, L=4096)
AUDIO = Use("audio", 50, H=16, KV=16, D=64, L=1501, is_causal=False)
VISION = Use("vision", 1088, H=16, KV=16, D=72, L=1088, is_causal=False, is_fresh=True)
# Use, batch, rows of context, rows that the launch is sized for.
DECODES = tuple((DECODE, batch, context, context) for batch in (1, 8, 32, 64) for context in (512, 2048, 8192))
USES = (
    *DECODES,
    *((_llm("prefill", T), batch, 2048, 2048) for T, batch in ((16, 1), (96, 1), (96, 8), (512, 1))),
    *((SPEECH, batch, 300, 512) for batch in (1, 8, 32)),
    *((AUDIO, batch, 1450, 1501) for batch in (1, 8)),
    *((VISION, batch, 1088, 1088) for batch in (1, 4)),
)
FLEX_USES = (*DECODES, (_llm("prefill", 96), 1, 2048, 2048), (VISION, 1, 1088, 1088))
TINY_USES = ((Use("decode", 1, H=4, KV=2, D=16, L=64), 2, 40, 48), (Use("audio", 3, 2, 2, 16, 40, False), 1, 30, 40))


class Setting:
    """Operands of one use: as many sets of keys and values as it takes to leave the L2 cache."""

    def __init__(self, meter: Meter, pool: Tensor, use: Use, batch: int, context: int, most: int):
        self.meter, self.use, self.most = meter, use, most
        self.n_bytes = 2 * batch * context * use.KV * use.D * pool.element_size()
        n_copies = meter.copies(self.n_bytes)
        if use.is_fresh:
            layers = _views(pool, n_copies, batch, use.T, 3, use.H, use.D)
            self.q = [layer[:, :, 0] for layer in layers]
            self.kv = [(layer[:, :, 1].transpose(1, 2), layer[:, :, 2].transpose(1, 2)) for layer in layers]
            self.slots = self.first = None
        else:
            caches = _views(pool, n_copies, 2, batch + 1, use.KV, use.L, use.D)
            self.q = [meter.noise(batch, use.T, use.H, use.D)] * len(caches)
            self.kv = [tuple(cache) for cache in caches]
            self.slots = torch.arange(batch, device=meter.device).flip(0).contiguous()
            self.first = torch.zeros_like(self.slots)
        newest = torch.full((batch,), context - 1, device=meter.device)
        rows = torch.arange(use.T - 1, -1, -1, device=meter.device)
        self.last = newest[:, None] - rows if use.is_causal else newest
        self.each = self.last if use.is_causal else newest[:, None].expand(batch, use.T).contiguous()
        columns = torch.arange(most, device=meter.device)
        self.mask = columns <= (self.last if use.is_causal else newest[:, None])[:, :, None]

    def ours(self, i: int) -> Tensor:
        return slot_attention(self.q[i], *self.kv[i], self.slots, self.first, self.last, most=self.most)

    def gathered(self, i: int) -> Tensor:
        """As `CacheView.read` and `attend` have it."""
        k, v = self.kv[i]
        if self.slots is not None:
            k, v = (rows.narrow(2, 0, self.most).index_select(0, self.slots) for rows in (k, v))
        return attend(self.q[i].contiguous(), k, v, self.mask)

    def exact(self, slots: Tensor | None) -> Tensor:
        """The first batch rows in float32; slots: where their keys lie, None = row b reads b."""
        k, v = self.kv[0]
        if slots is None:
            n = len(self.mask[:CHECKED])  # there are more slots than rows
            k, v = k[:n], v[:n]
        else:
            k, v = (rows.index_select(0, slots[:CHECKED]) for rows in (k, v))
        k, v = (rows.narrow(2, 0, self.most).float() for rows in (k, v))
        return attend(self.q[0][:CHECKED].float().contiguous(), k, v, self.mask[:CHECKED])

    def flex(self) -> Callable[[int], Tensor]:
        """flex_attention with a block mask, row b reading slot b. Returns: of a set of operands [B, H, T, D]."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        use, each = self.use, self.each

        def sees(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return column <= each[b, row]

        torch.compiler.reset()  # each use compiles anew, and beyond a limit of them would silently run uncompiled
        batch = len(each)
        blocks = create_block_mask(sees, batch, None, use.T, self.most, device=self.meter.device)
        run = torch.compile(flex_attention, dynamic=False)

        def call(i: int) -> Tensor:
            k, v = (rows[:batch, :, : self.most] for rows in self.kv[i])
            return run(self.q[i].transpose(1, 2), k, v, block_mask=blocks, enable_gqa=use.H != use.KV)

        return call


def cases(meter: Meter) -> Iterator[Case]:
    """All uses, then flex_attention for some of them."""
    pool = meter.noise(2**16 if meter.is_tiny else POOL)
    for use, *sizes in TINY_USES if meter.is_tiny else USES:
        yield Case(use.name, _sizes(use, *sizes), partial(_measured, meter, pool, use, *sizes))
    for use, *sizes in () if meter.is_tiny else FLEX_USES:
        yield Case(f"{use.name}, flex", _sizes(use, *sizes), partial(_flexed, meter, pool, use, *sizes))


def _sizes(use: Use, batch: int, context: int, most: int) -> dict[str, int]:
    return {"batch": batch, "rows": use.T, "context": context}


def _measured(meter: Meter, pool: Tensor, *use: object) -> Figures:
    setting = Setting(meter, pool, *use)
    n = len(setting.kv)
    error = error_of(setting.ours(0)[:CHECKED], setting.exact(setting.slots))
    ours, gathered = meter.us(setting.ours, n), meter.us(setting.gathered, min(n, 16))
    return {"ours_us": ours, "sdpa_us": gathered, "gb_per_s": rate(setting.n_bytes, ours), "error": error}


def _flexed(meter: Meter, pool: Tensor, *use: object) -> Figures:
    setting = Setting(meter, pool, *use)
    call = setting.flex()
    error = error_of(call(0)[:CHECKED].transpose(1, 2).flatten(2), setting.exact(None))
    us = meter.us(call, len(setting.kv))
    return {"flex_us": us, "gb_per_s": rate(setting.n_bytes, us), "error": error}


def _views(pool: Tensor, n: int, *shape: int) -> list[Tensor]:
    """Up to n tensors that lie one behind the other."""
    size = torch.Size(shape).numel()
    n = min(n, pool.numel() // size)
    assert n, f"pool: expected {size} numbers, got {pool.numel()}"
    return [pool[i * size : (i + 1) * size].view(shape) for i in range(n)]
