"""Restart of the audio encoder from a slot's last units of log-mel, before its position table ends.

The encoder has 1500 learned positions, which is 29 units. On its own it empties the cache there (`Apm.stream`). Here
the last units are encoded again from position 0, in one pass, from the same log-mel as before, and the next unit
follows them: the encoder always attends to at least the units that are kept. The positions are not kept: they step back
at the end of the table, and rows depend on them.

The oldest rows cannot be dropped while the others are kept, as the language model does (`KVCache.evict`). Its positions
are rotations of finished keys, which can be rotated back. Here a position is added to the input of the first layer, so
that the keys and values of every layer depend on it, and only the layers themselves can recompute them. Rows kept at
their positions would leave no positions for new rows: giving all new rows the last position would lose their order, and
giving them the positions of the dropped rows would put the newest sound before the oldest.

Does not contain sessions. Before each unit the host calls `needs_overlap` and, if it is true, runs `overlap_encode`.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from models.errors import SettingsError
from models.inputs.audio import N_MELS, UNIT_COLUMNS, conv_length
from models.layers.apm import UNIT_ROWS, Apm
from models.layers.kv_cache import KVCache

OVERLAP_UNITS = 10
MAX_POSITIONS = 1500


@dataclass(frozen=True)
class RecentMel:
    """The log-mel of every slot's last units, allocated once; S slots and a scratch slot for padding.

    Unit u is at index u mod (K + 1). There is one index more than the K units that are encoded again: taking back the
    newest unit, by lowering `n_units`, leaves the K units before it intact.
    """

    mel: Tensor  # [S + 1, K + 1, n_mels, 104] f32
    first: Tensor  # [S + 1, K + 1] i64  valid columns [first, end), as `Apm.stream`
    end: Tensor  # [S + 1, K + 1] i64
    n_units: Tensor  # [S + 1] i64  units encoded so far; advanced by `store_recent`

    @classmethod
    def allocate(
        cls,
        n_slots: int,
        n_units: int | None = None,
        *,
        max_positions: int = MAX_POSITIONS,
        n_mels: int = N_MELS,
        device: torch.device | str = "cpu",
    ) -> "RecentMel":
        """Allocate every slot, empty.

        Args:
            n_slots: S.
            n_units: K, units to encode again; None = 10, or as many as a shorter table allows.
            max_positions: rows of the encoder's position table.
            n_mels: bins of the log-mel.
        Raises: SettingsError if the table does not hold another unit after K units.
        """
        limit = max_overlap_units(max_positions)
        n_units = min(OVERLAP_UNITS, limit) if n_units is None else n_units
        if not 1 <= n_units <= limit:
            raise SettingsError("audio overlap", expected=f"1 to {limit} units of {max_positions} rows", got=n_units)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(n_slots + 1, n_units + 1, *shape, dtype=dtype, device=device)

        mel = zeros(n_mels, UNIT_COLUMNS, dtype=torch.float32)
        return cls(mel, zeros(), zeros(), torch.zeros(n_slots + 1, dtype=torch.int64, device=device))

    @property
    def scratch(self) -> int:
        return self.n_units.shape[0] - 1

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def reset(self, slots: Tensor) -> None:
        """Empty `slots` [B]."""
        for tensor in self.tensors():
            tensor.index_fill_(0, slots, 0)


def max_overlap_units(max_positions: int = MAX_POSITIONS) -> int:
    """Most units to encode again such that one more fits the table."""
    return (max_positions - conv_length(UNIT_COLUMNS) - 1) // UNIT_ROWS


def needs_overlap(n_rows: int, first: int, end: int, max_positions: int = MAX_POSITIONS) -> bool:
    """Whether a unit of columns [first, end) would make `Apm.stream` empty a slot of n_rows rows.

    As there, the unit counts with the rows of its context frames. With 1500 positions and units of 50 rows this is true
    at 1450 rows and then, with 10 units encoded again, every 19 units.
    """
    return n_rows + conv_length(end - first) >= max_positions


def store_recent(recent: RecentMel, slots: Tensor, mel: Tensor, first: Tensor, end: Tensor) -> None:
    """Store one unit per slot in place of the oldest.

    Args:
        slots: [B] int64, distinct except for the scratch slot.
        mel, first, end: as for `Apm.stream`; a slot without columns is not changed.
    """
    given = end > first
    target = torch.where(given, slots, recent.scratch)
    place = recent.n_units[slots] % recent.mel.shape[1]
    for kept, new in ((recent.mel, mel), (recent.first, first), (recent.end, end)):
        kept[target, place] = new
    recent.n_units.index_add_(0, slots, given.long())


def overlap_encode(apm: Apm, recent: RecentMel, cache: KVCache, slots: Tensor, active: Tensor) -> None:
    """Restart active slots from their stored units; other slots are not changed.

    Afterwards the cache of an active slot equals that of an empty slot after streaming these units: 50 rows per unit,
    fewer for shorter ones. A second run has the same result.

    Args:
        cache: the encoder's slot cache.
        slots: [B] int64, distinct except for the scratch slot.
        active: [B] bool.
    """
    n_places = recent.mel.shape[1]
    unit = recent.n_units[slots][:, None] - torch.arange(n_places - 1, 0, -1, device=slots.device)  # oldest first
    rows, place = slots[:, None], unit % n_places
    first = recent.first[rows, place]
    end = torch.where(unit >= 0, recent.end[rows, place], 0)
    mel = recent.mel[rows, place].to(apm.conv1.weight.dtype)
    apm.refill(mel, first, end, cache, slots, active)
