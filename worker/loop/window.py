"""Which units of a conversation stay in the context: policies off, basic and context. Torch-free.

Counts the cache rows of the prompt and of every unit, and decides what the cache evicts when a unit is closed. Does not
access a cache: evictions are returned as `Drop` and `Rebuild`, to be applied in order.

Rows of a session: [prefix][previous text][suffix][units, oldest first]. The previous text exists in context mode only:
a marker and the last words of evicted units.
"""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from models.errors import ContextOverflowError
from worker.config.session import WindowConfig


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """A closed unit. The window keeps `ids` and `text` in context mode only, where evictions read them."""

    id: int
    length: int  # cache rows from `<unit>` to `</unit>`
    kind: str
    ids: tuple[int, ...]  # spoken tokens
    text: str
    is_listen: bool


class Drop(NamedTuple):
    """Remove rows [keep, keep + n) from the cache and close the gap."""

    keep: int
    n: int


class Rebuild(NamedTuple):
    """Move the rows from `first_kept` on to prefix + len(ids), then feed `ids` to rows [prefix, prefix + len(ids))."""

    prefix: int
    first_kept: int
    ids: tuple[int, ...]


class UnitWindow:
    """The window of one session.

    Attributes:
        length: rows the cache must hold, rows not fed yet included.
        preserve: rows at the front that no eviction removes, the previous text included.
        prefix, suffix: number of rows before the previous text; ids after it.
        previous_ids, previous_text: marker and content as ids; content as text.
        units: units in the window, oldest first.
        stray: rows after the prompt that belong to no unit.
        events: closed units that caused an eviction.
        dropped_units: evicted units.
        dropped_tokens: rows the cache shrank by; in context mode less the growth of the previous text.
        position_offset: rows that basic evictions have moved the remaining units by, in total.
    """

    def __init__(
        self,
        config: WindowConfig,
        *,
        is_special: Callable[[int], bool],
        decode: Callable[[Sequence[int]], str],
        marker: Sequence[int],
        max_tokens: int | None = None,
        evict_newest: bool = False,
    ):
        """Create an empty window.

        Args:
            is_special: tests for ids that never enter the previous text.
            decode: ids to text.
            marker: ids before the content of the previous text.
            max_tokens: rows at most in context mode, whose own limit counts units; None is unbounded.
            evict_newest: evict a unit that is too long by itself too. Its last rows must then be in the cache before
                the evictions are applied; otherwise evictions name rows of earlier units only.
        """
        self._config, self._max_tokens, self._evict_newest = config, max_tokens, evict_newest
        self._is_special, self._decode, self._marker = is_special, decode, tuple(marker)
        self.length = self.prefix = self.stray = 0
        self.suffix: tuple[int, ...] = ()
        self.previous_ids: tuple[int, ...] = ()
        self.previous_text = ""
        self.units: deque[UnitRecord] = deque()
        self.events = self.dropped_tokens = self.dropped_units = self.position_offset = 0

    def configure(self, config: WindowConfig, max_tokens: int | None) -> None:
        """Change the limits from the next closed unit on; mode and marker must be as before."""
        assert (config.mode, config.marker) == (self._config.mode, self._config.marker), (
            "window: mode or marker changed"
        )
        self._config, self._max_tokens = config, max_tokens

    def copy(self) -> "UnitWindow":
        """An independent window with the same state."""
        other = copy.copy(self)
        other.units = self.units.copy()
        return other

    def replace_prompt(self, prefix: int, suffix: Sequence[int], max_length: int) -> None:
        """Exchange the prompt and forget units that the window would then evict, all but the newest one.

        Args:
            prefix, suffix: as in `protect`.
            max_length: most rows of the result.
        Raises: ContextOverflowError if the result is longer; the window must not be used then.
        """
        before = self.preserve
        self.prefix, self.suffix = prefix, tuple(suffix)
        self.length += self.preserve - before
        evicts_newest, self._evict_newest = self._evict_newest, False
        self._apply_policy()
        self._evict_newest = evicts_newest
        if self.length > max_length:
            got = f"{self.preserve} of the prompt and {self.length - self.preserve} that stay"
            raise ContextOverflowError("context with another prompt", expected=f"at most {max_length} rows", got=got)

    @property
    def mode(self) -> Literal["off", "basic", "context"]:
        return self._config.mode

    @property
    def preserve(self) -> int:
        return self.prefix + len(self.previous_ids) + len(self.suffix)

    def room(self) -> int | None:
        """Rows of the longest unit that is kept when it is closed; None: any is."""
        if self._config.mode == "off":
            return None
        if self._config.mode == "basic":
            return max(self._config.high_tokens - self.length, self._config.low_tokens - self.preserve)
        return None if self._max_tokens is None else self._max_tokens - self.preserve

    def protect(self, prefix: int, suffix: Sequence[int]) -> None:
        """Register the prompt of an empty context: number of rows before its suffix, ids of the suffix."""
        assert self.length == 0, f"protect: expected an empty context, got {self.length} rows"
        self.prefix, self.suffix = prefix, tuple(suffix)
        self.length = self.preserve

    def add_stray(self, n: int) -> None:
        """Count n rows that were fed and belong to no unit, such as those of an interrupted prefill.

        Basic mode then evicts as many rows as the units had, counted from the prompt; context mode keeps as many as
        the units have, counted from the end.
        """
        self.stray += n
        self.length += n

    def close_unit(self, record: UnitRecord) -> list[Drop | Rebuild]:
        """Register a closed unit; a unit without rows is ignored.

        Returns: evictions to apply, in order.
        """
        if record.length == 0:
            return []
        self.units.append(record if self._config.mode == "context" else replace(record, ids=(), text=""))
        self.length += record.length
        eviction = self._apply_policy()
        parts = self.preserve + self.stray + sum(unit.length for unit in self.units)
        assert parts == self.length, f"window: expected {self.length} rows in prompt, strays and units, got {parts}"
        return [] if eviction is None else [eviction]

    def _apply_policy(self) -> Drop | Rebuild | None:
        """Evict the oldest units that the mode does not keep."""
        mode, before, n_units = self._config.mode, self.length, len(self.units)
        eviction = None if mode == "off" else self._basic() if mode == "basic" else self._context()
        self.dropped_tokens += before - self.length
        self.dropped_units += n_units - len(self.units)
        self.events += eviction is not None
        return eviction

    def _basic(self) -> Drop | None:
        if self.length <= self._config.high_tokens:
            return None
        n = 0
        while self._may_evict() and self.length - n > self._config.low_tokens:
            n += self.units.popleft().length
        if n == 0:
            return None
        self.length -= n
        self.position_offset += n
        return Drop(self.preserve, n)

    def _context(self) -> Drop | Rebuild | None:
        n_units, previous, length = len(self.units), self.previous_ids, self.length
        kept = sum(unit.length for unit in self.units)
        while self._may_evict() and self._too_much(kept):
            oldest = self.units.popleft()
            kept -= oldest.length
            self._remember(oldest)
        if len(self.units) == n_units:
            return None
        first_kept = length - kept
        self.length, self.stray = self.preserve + kept, 0
        if self.previous_ids == previous:
            # Rows of the previous text and the suffix do not attend to units: feeding them again gives the same rows.
            return Drop(self.preserve, first_kept - self.preserve)
        return Rebuild(self.prefix, first_kept, self.previous_ids + self.suffix)

    def _may_evict(self) -> bool:
        return len(self.units) > (0 if self._evict_newest else 1)

    def _too_much(self, kept: int) -> bool:
        too_long = self._max_tokens is not None and self.preserve + kept > self._max_tokens
        return too_long or len(self.units) > self._config.max_units

    def _remember(self, unit: UnitRecord) -> None:
        """Append a unit's spoken ids to the previous text and drop its oldest tokens beyond the limit."""
        ids = () if unit.is_listen else tuple(i for i in unit.ids if not self._is_special(i))
        text = unit.text if unit.text.strip() else ""
        if not ids and not text:
            return
        content = self.previous_ids[len(self._marker) :] + ids
        self.previous_text += text
        if (excess := len(content) - self._config.previous_max_tokens) > 0:
            content = content[excess:]
            self.previous_text = self._decode(content)
        self.previous_ids = self._marker + content
