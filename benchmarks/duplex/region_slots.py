"""What sessions own in an engine, as far as it counts where two engines are compared.

Knows slots, caches and which rows are nobody's. Does not know regions, nor what is compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.layers.kv_cache import KVCache
from models.token2wav.flow.block_table import FIRST_ROW
from worker.assembly.parts import EngineParts


@dataclass(frozen=True)
class SlotTensors:
    """What sessions own in one engine. whole: tensors as they are. caches: those whose rows are looked at as far as
    they are held. n: slots of them that count. scratch: the slot that rows of padding name.
    """

    whole: list[Tensor]
    caches: list[KVCache] = field(default_factory=list)
    n: int = 0
    scratch: int = -1

    def held(self) -> list[int]:
        """Most rows that a slot of each cache holds; the host waits for it."""
        if not self.caches:
            return []
        return torch.stack([cache.lengths[: self.n].max() for cache in self.caches]).tolist()

    def views(self, n_rows: Sequence[int]) -> list[Tensor]:
        """All of it, caches up to so many rows each."""
        rows = [
            tensor[: self.n, :, :most]
            for cache, most in zip(self.caches, n_rows, strict=True)
            for tensor in (*cache.k, *cache.v)
        ]
        return [*self.whole, *rows]


def paired_slots(one: EngineParts, other: EngineParts) -> dict[str, tuple[SlotTensors, SlotTensors]]:
    """By table. Raises: AssertionError if they differ in shape."""
    pairs = {"omni": _pair(omni_slots(one), omni_slots(other))}
    return pairs if one.vocoder is None else {**pairs, "vocoder": _pair(vocoder_slots(one), vocoder_slots(other))}


def omni_slots(parts: EngineParts) -> SlotTensors:
    """Without the scratch slot, where rows of padding overwrite each other in any order."""
    state, n = parts.duplex.state, parts.n_slots
    caches = [part for part in (state.llm, state.apm, state.speech and state.speech.cache) if part is not None]
    rows = {id(tensor) for cache in caches for tensor in (*cache.k, *cache.v)}
    return SlotTensors([tensor[:n] for tensor in state.tensors() if id(tensor) not in rows], caches, n, state.scratch)


def vocoder_slots(parts: EngineParts) -> SlotTensors:
    """Without the scratch slot and its rows, and without the row that takes the writes of padding, in any order."""
    state, sound = parts.vocoder.state, parts.vocoder.vocode_state
    n, tables = state.scratch, (state.token_table, state.mel_table, state.dit_table)
    of_slots = [*state.slot_tensors(), *(tensor for one in tables for tensor in one.tensors())]
    slots = [part for tensor in of_slots for part in (tensor[:n], tensor[n + 1 :])]
    for table, tensors in zip(tables, ([state.token_rows], [state.mel_rows], state.dit_rows), strict=True):
        own = slice(FIRST_ROW, table.first_voice_row - table.ring), slice(table.first_voice_row, None)
        slots += [tensor[..., rows, :, :] for tensor in tensors for rows in own]
    return SlotTensors([*slots, *(tensor[:n] for tensor in sound.tensors())], scratch=n)


def _pair(own: SlotTensors, others: SlotTensors) -> tuple[SlotTensors, SlotTensors]:
    every = [1 << 62] * len(own.caches)
    shapes = [[tensor.shape for tensor in slots.views(every)] for slots in (own, others)]
    assert shapes[0] == shapes[1], "expected slots of the same shapes in both engines"
    return own, others
