"""Undo of one unit's prefill and first token: counters of a slot, kept on the device and written back.

Only counters and the few values that a unit overwrites are kept, in tensors that exist for every slot from the start.
All else that the prefill of a unit writes is beyond a counter. The next unit of the slot has as many samples and
writes the same places again before it reads them:

    llm             rows from `lengths` on: a query sees rows below its own only, and its own is written first
    apm             rows from `lengths` on. A slot whose positions run out is refilled from its first row on, from the
                    log-mel of its last units; the next unit refills it again
    mel             the frames of one unit in the rings `raw` and `frame_max`, and one value of `edge_max`, at places
                    that follow from `n_samples`. Of 256 frames a unit writes 103 at most and reads the newest 104, of
                    4096 maxima the newest 3000, of four edges the newest three: none that was overwritten
    recent_mel      the place after the K units that a refill reads
    text            the last entry of the token history, which a window as long as the history still reads: kept

Rows beyond a length must be finite, as a masked row is multiplied by zero: after a failure, rewind the slot before.
"""

import torch
from torch import Tensor

from models.stages.step_types import Counters
from models.stages.unit_steps import UnitSteps


class KeptSlots:
    """State of slots before a unit that may be undone. One unit of a slot at a time; allocates nothing per unit."""

    def __init__(self, unit_steps: UnitSteps):
        self._unit_steps, state = unit_steps, unit_steps.state
        self._live = [state.llm.lengths, state.llm.positions, state.text.draws, state.text.count]
        self._live.append(state.text.chunk_start)
        if state.apm is not None and state.mel is not None and state.recent_mel is not None:
            self._live += [state.apm.lengths, state.apm.positions, state.recent_mel.n_units]
            self._live += [state.mel.tail, state.mel.n_samples, state.mel.n_emitted]
        self._kept = [torch.zeros_like(tensor) for tensor in self._live]
        self._history = state.text.history
        self._entry = torch.zeros_like(state.text.count)  # of the history, which the next token overwrites
        self._counters: dict[int, Counters] = {}

    def keep(self, slot: int) -> None:
        """Keep the slot's state, without a wait for the device."""
        at = self._counters[slot] = self._unit_steps.counters(slot)
        for kept, live in zip(self._kept, self._live, strict=True):
            kept[slot].copy_(live[slot])
        self._entry[slot].copy_(self._place(slot, at))

    def put_back(self, slot: int) -> None:
        """Restore the kept state after at most one unit's prefill and first token."""
        at = self._counters.pop(slot)
        for kept, live in zip(self._kept, self._live, strict=True):
            live[slot].copy_(kept[slot])
        self._place(slot, at).copy_(self._entry[slot])
        self._unit_steps.set_counters(slot, at)

    def forget(self, slot: int) -> None:
        """Drop the kept state: the unit stays."""
        del self._counters[slot]

    def _place(self, slot: int, at: Counters) -> Tensor:
        return self._history[slot, at.remembered % self._history.shape[1]]
