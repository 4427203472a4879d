"""A slot cache fed with random rows, and plain lists of its expected content."""

import torch
from torch import Tensor

from models.layers.kv_cache import CacheView, KVCache
from models.layers.kv_pages import PageSizes
from models.layers.rotary import rotary_angles, rotary_frequencies, rotate
from tests.models.compare import assert_close, assert_same

N_SLOTS, MAX_LEN, HEADS, DIM = 4, 320, 2, 8
NAN = float("nan")


def make_cache(
    max_len: int = MAX_LEN,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    page_sizes: PageSizes | None = None,
) -> KVCache:
    return KVCache(
        n_layers=2,
        n_slots=N_SLOTS,
        max_len=max_len,
        kv_heads=HEADS,
        head_dim=DIM,
        dtype=dtype,
        device=device,
        page_sizes=page_sizes,
    )


class Session:
    """A cache fed with rotated keys, and the rows of each slot before rotation."""

    def __init__(self, seed: int = 0, max_len: int = MAX_LEN, theta: float = 1e4, dtype: torch.dtype = torch.float32):
        self.cache, self.dtype = make_cache(max_len, dtype), dtype
        self.frequencies = rotary_frequencies(DIM, theta, "cpu")
        self.generator = torch.Generator().manual_seed(seed)
        # Per slot and layer, [n, heads, dim].
        self.keys = [[self.noise(0), self.noise(0)] for _ in range(N_SLOTS)]
        self.values = [[self.noise(0), self.noise(0)] for _ in range(N_SLOTS)]

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, HEADS, DIM, generator=self.generator).to(self.dtype)

    def feed(self, counts: dict[int, int], padding: int = 3, poison: float = NAN) -> CacheView:
        """Feed random rows (slot -> number of rows) in one call, with `padding` rows beyond the longest."""
        slots, n_new = torch.tensor(list(counts)), torch.tensor(list(counts.values()))
        bucket = max(counts.values()) + padding
        view = self.cache.view(slots, n_new, bucket, self.cache.max_len)
        cos, sin = (part.unsqueeze(2) for part in rotary_angles(view.positions, self.frequencies))
        inside = (torch.arange(bucket) < n_new[:, None])[..., None, None]
        for layer in range(2):
            k, v = self.noise(len(slots), bucket), self.noise(len(slots), bucket)
            for row, (slot, n) in enumerate(counts.items()):
                self.keys[slot][layer] = torch.cat((self.keys[slot][layer], k[row, :n]))
                self.values[slot][layer] = torch.cat((self.values[slot][layer], v[row, :n]))
            view.write(self.cache.k[layer], torch.where(inside, rotate(k, cos, sin), poison))
            view.write(self.cache.v[layer], torch.where(inside, v, poison))
        self.cache.advance(slots, n_new)
        return view

    def evict(self, gaps: dict[int, tuple[int, int]]) -> None:
        """Evict rows; gaps: slot -> (keep, drop)."""
        keep, drop = torch.tensor(list(gaps.values())).reshape(-1, 2).unbind(1)
        self.cache.evict(torch.tensor(list(gaps)), keep, drop, self.frequencies)
        for slot, (kept, dropped) in gaps.items():
            for fed in (self.keys[slot], self.values[slot]):
                fed[:] = [torch.cat((rows[:kept], rows[kept + dropped :])) for rows in fed]

    def shift(self, moves: dict[int, tuple[int, int]]) -> None:
        """Move rows; moves: slot -> (first, by). A gap that opens contains zeros."""
        first, by = torch.tensor(list(moves.values())).reshape(-1, 2).unbind(1)
        self.cache.shift(torch.tensor(list(moves)), first, by, self.frequencies)
        for slot, (start, n) in moves.items():
            for fed in (self.keys[slot], self.values[slot]):
                gap = torch.zeros(max(n, 0), HEADS, DIM, dtype=self.dtype)
                fed[:] = [torch.cat((rows[: start + min(n, 0)], gap, rows[start:])) for rows in fed]

    def check(self, tolerance: float) -> None:
        """Check that every session slot contains exactly its rows, keys rotated to their present positions."""
        for slot in range(N_SLOTS):
            n = len(self.keys[slot][0])
            for name in ("lengths", "positions"):
                got = int(getattr(self.cache, name)[slot])
                assert got == n, f"slot {slot} {name}: expected {n}, got {got}"
            cos, sin = (part.unsqueeze(1) for part in rotary_angles(torch.arange(n), self.frequencies))
            for layer in range(2):
                what = f"slot {slot} layer {layer}"
                k, v = (cache[layer][slot].transpose(0, 1) for cache in (self.cache.k, self.cache.v))
                assert_close(k[:n], rotate(self.keys[slot][layer], cos, sin), tolerance, f"{what} keys")
                assert_same(v[:n], self.values[slot][layer], f"{what} values")
                for rows in (k, v):
                    assert rows[n:].eq(0).all(), f"{what}: expected zeros from row {n} on, got {rows[n:]}"


def slot_rows(cache: KVCache, slot: int) -> list[Tensor]:
    return [tensor[slot].clone() for tensor in cache.tensors()]


def assert_slot(cache: KVCache, slot: int, expected: list[Tensor]) -> None:
    for number, (got, wanted) in enumerate(zip(slot_rows(cache, slot), expected, strict=True)):
        assert_same(got, wanted, f"slot {slot}, state tensor {number}")
