"""Drops rows from the language model's context and closes the gap without adding rounding errors to the other keys.

Keys are stored rotated by their positions. Closing a gap by rotating every key after it, as `KVCache.evict` can, rounds
each of them once per eviction, and in bfloat16 the errors add up. But only differences of positions count. In a *held*
slot, rows after the gap therefore keep their keys and positions, and the keys of the prompt before the gap are rotated
towards them, in one step from the unrotated copy of the prompt. Positions then run ahead of places. Before they leave
the range in which float32 angles are exact enough, all keys are rotated back once.

Contains rows and positions. Does not decide which rows to drop (`worker.loop.window`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.layers.kv_cache import SavedRows
from models.stages.region_table import EVICTED_AT_ONCE
from models.stages.runner import Rows, Runner

MAX_AHEAD = 8192  # largest position minus place; in a context of 8192 rows, the error of an angle is at most 1e-3


@dataclass(frozen=True)
class _Held:
    """The prompt of a held slot.

    Args:
        keys: [layers, kv_heads, n or more, head_dim] after the prompt was fed, from position 0.
        n: rows held.
        ahead: positions that the slot's rows are ahead of their places.
    """

    keys: Tensor
    n: int
    ahead: int = 0


class ContextMover:
    """Evictions of a runner's slots.

    Args:
        feed: appends rows to a slot.
    """

    def __init__(self, runner: Runner, feed: Callable[[int, Rows], None]):
        self._runner, self._cache, self._feed = runner, runner.state.llm, feed
        self._held: dict[int, _Held] = {}

    def hold(self, slot: int, keys: Tensor, n: int) -> None:
        """Hold the slot's first `n` rows: keep a copy of their keys. No row may have been dropped yet.

        Args:
            keys: of at least these rows, as `UnitSteps.save_keys`.
        """
        self._held[slot] = _Held(keys, n)

    def load_kernel(self) -> None:
        """Load the kernel that moves held keys, which no region's example calls; only the scratch slot is written."""
        slot = self._runner.state.scratch
        self._rotate_front(slot, self._cache.save_keys(slot, 1), 1, 0)

    def release(self, slot: int) -> None:
        """End the hold of a slot that was emptied."""
        self._held.pop(slot, None)

    def n_held(self, slot: int) -> int | None:
        """Rows held at the slot's front; None for a slot that is not held."""
        return self._held[slot].n if slot in self._held else None

    def drop(self, slots: Sequence[int], keep: Sequence[int], n_rows: Sequence[int]) -> None:
        """Drop context rows [keep, keep + n_rows) of each slot and close the gap. Held rows cannot be dropped.

        Raises: as `Runner.evict`.
        """
        for held in (False, True):
            chosen = [i for i, slot in enumerate(slots) if (slot in self._held) is held]
            n_max = max(self._runner.shapes.batch[0], EVICTED_AT_ONCE)
            for start in range(0, len(chosen), n_max):
                part = chosen[start : start + n_max]
                own = ([values[i] for i in part] for values in (slots, keep, n_rows))
                self._runner.evict(*own, rotates=not held)
                for i in part if held else ():
                    assert keep[i] == self._held[slots[i]].n, f"slot {slots[i]}: expected a drop right after held rows"
                    self._move_held(slots[i], n_rows[i])

    def rebuild(self, slot: int, prefix: int, first_kept: int, ids: Sequence[int]) -> None:
        """Replace the rows between the first `prefix` rows and row `first_kept` by `ids`; the rows after them move.

        Raises: ContextOverflowError if the result does not fit, before any change.
        """
        runner, cache, slots = self._runner, self._cache, self._slots(slot)
        total, by = runner.context_len(slot), prefix + len(ids) - first_kept
        runner.check_room(slot, by)
        frequencies, held = runner.model.llm.model.frequencies, slot in self._held
        first, places = torch.full_like(slots, first_kept), torch.full_like(slots, by)
        cache.shift(slots, first, places, frequencies, rotates=not held)
        if held:
            cache.positions.index_add_(0, slots, -places)
            self._move_held(slot, -by)
        # The moved rows stay in memory after the new ones, but a query attends only to rows before it.
        cache.set_length(slots, torch.full_like(slots, prefix))
        runner.set_context_len(slot, prefix)
        self._feed(slot, Rows.mixed(ids, []))
        cache.set_length(slots, torch.full_like(slots, total + by))
        runner.set_context_len(slot, total + by)

    def compute_front(self, slot: int, rows: Rows) -> SavedRows:
        """Keys and values of rows that are fed to an empty context, computed in this slot, which stays as it is.

        Returns: as `KVCache.save`.
        Raises: as the feed; the slot has its previous content then too.
        """
        runner, cache, slots = self._runner, self._cache, self._slots(slot)
        total, position = runner.context_len(slot), cache.positions[slot].clone()
        kept = cache.save(slot, min(len(rows), total))
        cache.set_length(slots, torch.zeros_like(slots))
        cache.positions[slot] = 0
        runner.set_context_len(slot, 0)
        try:
            self._feed(slot, rows)
            return cache.save(slot, len(rows))
        finally:
            cache.load(slot, kept)
            cache.lengths[slot], cache.positions[slot] = total, position
            runner.set_context_len(slot, total)
            if len(rows) > total:
                cache.wipe(slots, cache.lengths[slots])

    def replace_front(self, slot: int, first_kept: int, front: SavedRows, n_held: int | None) -> None:
        """Replace the rows before row `first_kept`; the rows from it on follow the new ones.

        Args:
            front: keys and values of the new rows, as `KVCache.save`, from position 0 on.
            n_held: rows of `front` to hold; the rows after it then keep their keys and positions. None: the slot is
                not held, and the keys of the rows after `front` are rotated to their new places.
        Raises: ContextOverflowError if the result does not fit, before any change.
        """
        runner, cache, slots = self._runner, self._cache, self._slots(slot)
        n_front = front.n_rows
        by = n_front - first_kept
        runner.check_room(slot, by)
        first, places = torch.full_like(slots, first_kept), torch.full_like(slots, by)
        cache.shift(slots, first, places, runner.model.llm.model.frequencies, rotates=n_held is None)
        cache.write_rows(slot, front)
        runner.set_context_len(slot, runner.context_len(slot) + by)
        if n_held is not None:
            cache.positions.index_add_(0, slots, -places)
            ahead = self._held[slot].ahead if slot in self._held else 0
            ahead = self._rotate_front(slot, front.keys, n_front, ahead - by)
            self._held[slot] = _Held(front.keys, n_held, ahead)

    def _move_held(self, slot: int, by: int) -> None:
        """Rotate the held keys `by` more positions."""
        held = self._held[slot]
        self._held[slot] = replace(held, ahead=self._rotate_front(slot, held.keys, held.n, held.ahead + by))

    def _rotate_front(self, slot: int, keys: Tensor, n: int, ahead: int) -> int:
        """Write the first `n` keys, from position 0, rotated by `ahead`; too far ahead, rotate all others back.

        Returns: positions that the slot's rows are ahead of their places.
        """
        cache, frequencies = self._cache, self._runner.model.llm.model.frequencies
        if abs(ahead) > MAX_AHEAD:
            slots = self._slots(slot)
            cache.move_positions(slots, torch.full_like(slots, n), torch.full_like(slots, -ahead), frequencies)
            ahead = 0
        self._runner.model.backend.restore_keys(cache, slot, keys, n, ahead, frequencies)
        return ahead

    def _slots(self, slot: int) -> Tensor:
        return self._runner.tensor([slot], 1, slot)
