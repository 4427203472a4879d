"""What a slot has heard last, and the audio encoder's fresh start from it before its position table ends.

The encoder has 1500 learned positions, 29 units. Its own rule is to forget everything there (`Apm.stream`). Here
the last units are encoded again from position 0, in one pass and on the log-mel they were first encoded from, and
the next unit goes on behind them: the encoder always looks back on at least as much as is remembered. What cannot be
kept is the position: it steps back at the end of the table, and rows depend on it.

Why not drop the oldest rows and keep the others, as the language model does (`KVCache.evict`)? Its positions are
rotations of finished keys, which can be turned back. Here a position is added to the input of the first layer, so
that every layer's keys and values are functions of it which nothing but the layers themselves can recompute. Rows
left where they are would leave no positions for new ones: the last one for all of them takes away their order, and
those of the dropped rows put the newest sound before the oldest.

Knows units of log-mel and how many rows the table holds. Does not know sessions, nor when a unit is run: the host
asks `needs_overlap` before each and, if so, runs `overlap_encode` first.
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
class HeardMel:
    """The last units of every slot as the encoder got them, allocated once; S slots and one for rows of padding.

    Unit u lies at place u mod (K + 1). One place more than the K units that are encoded again: whoever takes back
    the newest unit, by lowering `n_units`, finds the K before it untouched.
    """

    mel: Tensor  # [S + 1, K + 1, n_mels, 104] f32
    first: Tensor  # [S + 1, K + 1] i64  valid columns [first, end), as `Apm.stream`
    end: Tensor  # [S + 1, K + 1] i64
    n_units: Tensor  # [S + 1] i64  units heard so far; advanced by `remember`

    @classmethod
    def allocate(
        cls,
        n_slots: int,
        n_units: int | None = None,
        *,
        max_positions: int = MAX_POSITIONS,
        n_mels: int = N_MELS,
        device: torch.device | str = "cpu",
    ) -> "HeardMel":
        """Allocate every slot, empty.

        Args:
            n_units: K, units to encode again; None = 10, or as many as a shorter table allows.
            max_positions: rows of the encoder's position table.
        Raises: SettingsError if after K units the table holds no further one.
        """
        most = most_units(max_positions)
        n_units = min(OVERLAP_UNITS, most) if n_units is None else n_units
        if not 1 <= n_units <= most:
            raise SettingsError("audio overlap", expected=f"1 to {most} units of {max_positions} rows", got=n_units)

        def places(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(n_slots + 1, n_units + 1, *shape, dtype=dtype, device=device)

        mel = places(n_mels, UNIT_COLUMNS, dtype=torch.float32)
        return cls(mel, places(), places(), torch.zeros(n_slots + 1, dtype=torch.int64, device=device))

    @property
    def scratch(self) -> int:
        return self.n_units.shape[0] - 1

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def reset(self, slots: Tensor) -> None:
        """Forget everything about `slots` [B]."""
        for tensor in self.tensors():
            tensor.index_fill_(0, slots, 0)


def most_units(max_positions: int = MAX_POSITIONS) -> int:
    """Units that may be encoded again such that one more still fits the table."""
    return (max_positions - conv_length(UNIT_COLUMNS) - 1) // UNIT_ROWS


def needs_overlap(n_rows: int, first: int, end: int, max_positions: int = MAX_POSITIONS) -> bool:
    """Whether a unit of columns [first, end) would make `Apm.stream` forget the n_rows a slot holds.

    The unit counts with the rows of the frames around it, as there. With 1500 positions and steady units: at 1450 rows
    and, with 10 units encoded again, every 19 units from then on.
    """
    return n_rows + conv_length(end - first) >= max_positions


def remember(heard: HeardMel, slots: Tensor, mel: Tensor, first: Tensor, end: Tensor) -> None:
    """Keep one unit per slot, in place of the oldest.

    Args:
        slots: [B] int64, distinct except for rows of padding, which name the scratch slot.
        mel, first, end: what `Apm.stream` gets; a slot without columns sits out and stays as it is.
    """
    given = end > first
    target = torch.where(given, slots, heard.scratch)
    place = heard.n_units[slots] % heard.mel.shape[1]
    for kept, new in ((heard.mel, mel), (heard.first, first), (heard.end, end)):
        kept[target, place] = new
    heard.n_units.index_add_(0, slots, given.long())


def overlap_encode(apm: Apm, heard: HeardMel, cache: KVCache, slots: Tensor, active: Tensor) -> None:
    """Let active slots start over from what they remember; others stay as they are.

    Afterwards an active slot's cache equals that of an empty slot to which those units were streamed: 50 rows for each
    of them, shorter units fewer. It may be run again, with the same result.

    Args:
        cache: the encoder's slot cache.
        slots: [B] int64, distinct except for the scratch slot. active: [B] bool.
    """
    n_places = heard.mel.shape[1]
    unit = heard.n_units[slots][:, None] - torch.arange(n_places - 1, 0, -1, device=slots.device)  # oldest first
    rows, place = slots[:, None], unit % n_places
    first = heard.first[rows, place]
    end = torch.where(unit >= 0, heard.end[rows, place], 0)
    mel = heard.mel[rows, place].to(apm.conv1.weight.dtype)
    apm.refill(mel, first, end, cache, slots, active)
