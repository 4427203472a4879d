"""Slot tensors of an engine, without the scratch rows that two engines may fill differently.

Contains slots, caches and scratch rows. Does not contain regions or comparisons.
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
    """Slot tensors of one engine.

    Attributes:
        whole: tensors that are compared entirely.
        caches: caches of which only the held rows are compared.
        n_slots: slots of the caches that are compared.
        scratch: index of the slot that padding rows use.
    """

    whole: list[Tensor]
    caches: list[KVCache] = field(default_factory=list)
    n_slots: int = 0
    scratch: int = -1

    def held(self) -> list[int]:
        """Largest number of rows held in a slot of each cache; synchronizes with the device."""
        if not self.caches:
            return []
        return torch.stack([cache.lengths[: self.n_slots].max() for cache in self.caches]).tolist()

    def views(self, n_rows: Sequence[int]) -> list[Tensor]:
        """All tensors; of each cache the first `n_rows` rows."""
        rows = [
            tensor[: self.n_slots, :, :limit]
            for cache, limit in zip(self.caches, n_rows, strict=True)
            for tensor in (*cache.k, *cache.v)
        ]
        return [*self.whole, *rows]


def paired_slots(one: EngineParts, other: EngineParts) -> dict[str, tuple[SlotTensors, SlotTensors]]:
    """Slot tensors of both engines, by region table. Raises: AssertionError if the shapes differ."""
    pairs = {"omni": _pair(omni_slots(one), omni_slots(other))}
    return pairs if one.vocoder is None else {**pairs, "vocoder": _pair(vocoder_slots(one), vocoder_slots(other))}


def omni_slots(parts: EngineParts) -> SlotTensors:
    """The model's slots without the scratch slot, in which padding rows overwrite each other in any order."""
    state, n = parts.unit_steps.state, parts.n_slots
    caches = [part for part in (state.llm, state.apm, state.speech and state.speech.cache) if part is not None]
    rows = {id(tensor) for cache in caches for tensor in (*cache.k, *cache.v)}
    return SlotTensors([tensor[:n] for tensor in state.tensors() if id(tensor) not in rows], caches, n, state.scratch)


def vocoder_slots(parts: EngineParts) -> SlotTensors:
    """The vocoder's slots without the scratch slot, its rows, and the row that padding writes to in any order.

    Takes the memory of all voices: a twin's vocoder does not know which voices its regions prepare.
    """
    state, sound = parts.vocoder.state, parts.vocoder.vocode_state
    state.grow_voices(state.sizes.voice_frames)
    n, tables = state.scratch, (state.token_table, state.mel_table, state.dit_table)
    of_slots = [*state.slot_tensors(), *(tensor for one in tables for tensor in one.tensors())]
    slots = [part for tensor in of_slots for part in (tensor[:n], tensor[n + 1 :])]
    for table, tensors in zip(tables, ([state.token_rows], [state.mel_rows], state.dit_rows), strict=True):
        own = slice(FIRST_ROW, table.first_voice_row - table.ring), slice(table.first_voice_row, None)
        slots += [tensor[..., rows, :, :] for tensor in tensors for rows in own]
    return SlotTensors([*slots, *(tensor[:n] for tensor in sound.tensors())], scratch=n)


def _pair(own: SlotTensors, others: SlotTensors) -> tuple[SlotTensors, SlotTensors]:
    all_rows = [1 << 62] * len(own.caches)
    shapes = [[tensor.shape for tensor in slots.views(all_rows)] for slots in (own, others)]
    assert shapes[0] == shapes[1], f"slots: expected {shapes[0]}, got {shapes[1]}"
    return own, others
