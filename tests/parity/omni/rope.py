"""Eviction of cache rows (`cases/rope`): keys after the gap are rotated to their new positions."""

import re

import torch

from models.layers.kv_cache import KVCache
from models.layers.rotary import rotary_frequencies
from tests.parity.golden import GoldenDir
from tests.parity.report import ATOL, Report


def run(golden: GoldenDir, report: Report) -> None:
    """`rN`: keys moved, spec = [old start, new start, rows, theta]. `drop`: one gap behind protected rows."""
    folder = GoldenDir(golden.path / "cases")
    tensors, drop = folder.tensors("rope"), (folder.json("rope.json") or {}).get("drop")
    for case in sorted({m[1] for name in tensors if (m := re.fullmatch(r"(r\d+)\.spec", name))}):
        old, new, _, theta = tensors[f"{case}.spec"].tolist()
        if report.has_inputs(f"rope {case}", tensors, f"{case}.key") and f"{case}.out" in tensors:
            key = tensors[f"{case}.key"]
            held = torch.cat((torch.zeros(*key.shape[:2], int(old), key.shape[3]), key), dim=2)
            moved, _ = _evict(held, held, int(new), int(old - new), theta)
            # Float32 represents the angle of position p to p / 2^24 radians at best.
            tolerance = max(ATOL, (old + key.shape[2]) / 2**24)
            report.close(f"rope {case}", "keys", moved[:, :, int(new) :], tensors[f"{case}.out"], tolerance)
    for layer in sorted({m[1] for name in tensors if (m := re.fullmatch(r"drop\.key_before\.(\d+)", name))}):
        if drop is None or not report.has_inputs("rope drop", tensors, f"drop.value_before.{layer}"):
            continue
        before = (tensors[f"drop.{part}_before.{layer}"] for part in ("key", "value"))
        key, value = _evict(*before, drop["preserve"], drop["length"], drop["rope_theta"])
        report.close_if("rope drop", f"keys of layer {layer}", key, tensors.get(f"drop.key_after.{layer}"))
        report.close_if("rope drop", f"values of layer {layer}", value, tensors.get(f"drop.value_after.{layer}"))


def _evict(
    key: torch.Tensor, value: torch.Tensor, keep: int, drop: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, kv_heads, rows, head_dim] of a slot after `KVCache.evict`."""
    _, kv_heads, rows, head_dim = key.shape
    cache = KVCache(
        n_layers=1, n_slots=1, max_len=rows, kv_heads=kv_heads, head_dim=head_dim, dtype=key.dtype, device="cpu"
    )
    slot = torch.tensor([0])
    cache.k[0][0], cache.v[0][0] = key[0], value[0]
    cache.advance(slot, torch.tensor([rows]))
    frequencies = rotary_frequencies(head_dim, theta, "cpu")
    cache.evict(slot, torch.tensor([keep]), torch.tensor([drop]), frequencies)
    left = int(cache.lengths[0])
    return cache.k[0][:1, :, :left], cache.v[0][:1, :, :left]
