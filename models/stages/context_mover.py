"""How rows leave the language model's context and others close up, without wearing out the keys that stay.

Keys are stored turned by their positions. Closing a gap by turning every key behind it, as `KVCache.evict` can, rounds
each of them once per eviction, and in bfloat16 that adds up. But only distances between positions count. So a slot that
is *held* does it the other way round: rows behind the gap keep their keys and positions, and the prompt in front of it
is brought up behind them, turned in one step from the keys it was first fed with. Positions then run ahead of places;
before they leave the range in which float32 angles are exact enough, everything is turned back once.

Knows rows and positions. Does not know what is worth keeping (`worker.loop.window`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.stages.region_table import EVICTED_AT_ONCE
from models.stages.runner import Rows, Runner

MAX_AHEAD = 8192  # positions ahead of places: with a context of as many rows, angles err by 1e-3 at most


@dataclass(frozen=True)
class _Held:
    """keys: of every layer after the prompt, from position 0. n: its rows that are held. ahead: positions that the
    slot's rows are ahead of their places.
    """

    keys: list[Tensor]
    n: int
    ahead: int = 0


class ContextMover:
    """Evictions of a runner's slots. feed: puts rows at a slot's end."""

    def __init__(self, runner: Runner, feed: Callable[[int, Rows], object]):
        self._runner, self._cache, self._feed = runner, runner.state.llm, feed
        self._held: dict[int, _Held] = {}

    def hold(self, slot: int, saved: list[Tensor], n: int) -> None:
        """Keep the keys of the slot's first n rows as they were fed; nothing has been dropped yet.

        saved: what `Duplex.save_keys` gave of at least these, or `Duplex.save`, of which no values are kept.
        """
        self._held[slot] = _Held(saved[: len(self._cache.k)], n)

    def let_go(self, slot: int) -> None:
        """The slot is emptied."""
        self._held.pop(slot, None)

    def n_held(self, slot: int) -> int | None:
        """Rows held at the slot's front; None if it turns keys instead."""
        return self._held[slot].n if slot in self._held else None

    def drop(self, slots: Sequence[int], keep: Sequence[int], n_rows: Sequence[int]) -> None:
        """Drop context rows [keep, keep + n_rows) of each slot and close the gap. A held slot keeps what it holds.

        Raises: as `Runner.evict`.
        """
        for held in (False, True):
            chosen = [i for i, slot in enumerate(slots) if (slot in self._held) is held]
            most = max(self._runner.shapes.batch[0], EVICTED_AT_ONCE)
            for start in range(0, len(chosen), most):
                part = chosen[start : start + most]
                own = ([values[i] for i in part] for values in (slots, keep, n_rows))
                self._runner.evict(*own, turn=not held)
                for i in part if held else ():
                    assert keep[i] == self._held[slots[i]].n, f"slot {slots[i]}: a held slot drops behind what it holds"
                    self._bring_up(slots[i], n_rows[i])

    def rebuild(self, slot: int, prefix: int, first_kept: int, ids: Sequence[int]) -> None:
        """Put `ids` between the first `prefix` rows and those from `first_kept` on, which move to make room.

        Raises: ContextOverflowError if it does not fit, before anything is moved.
        """
        runner, cache, one = self._runner, self._cache, self._one(slot)
        total, by = runner.context_len(slot), prefix + len(ids) - first_kept
        runner.check_room(slot, by)
        frequencies, held = runner.model.llm.model.frequencies, slot in self._held
        first, places = torch.full_like(one, first_kept), torch.full_like(one, by)
        cache.shift(one, first, places, frequencies, rotates=not held)
        if held:
            cache.positions.index_add_(0, one, -places)
            self._bring_up(slot, -by)
        # Rows behind the place that is fed exist, but a query sees only what lies before it.
        cache.set_length(one, torch.full_like(one, prefix))
        runner.set_context_len(slot, prefix)
        self._feed(slot, Rows.mixed(ids, []))
        cache.set_length(one, torch.full_like(one, total + by))
        runner.set_context_len(slot, total + by)

    def _bring_up(self, slot: int, by: int) -> None:
        """Turn what is held by that many positions more; turn everything back if that is too far."""
        held, cache = self._held[slot], self._cache
        ahead, frequencies = held.ahead + by, self._runner.model.llm.model.frequencies
        if abs(ahead) > MAX_AHEAD:
            one = self._one(slot)
            cache.move_positions(one, torch.full_like(one, held.n), torch.full_like(one, -ahead), frequencies)
            ahead = 0
        cache.restore_keys(slot, held.keys, held.n, ahead, frequencies)
        self._held[slot] = replace(held, ahead=ahead)

    def _one(self, slot: int) -> Tensor:
        return self._runner.tensor([slot], 1, slot)
