"""Records as one batch: the indices that say which row of the language model comes from where. Host only."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from training.mind.records import PLACES, REFERENCE, UNIT_END, Record
from training.timelines.layout import NOTHING, PICTURE, PICTURE_ROWS, SOUND, SOUND_ROWS


@dataclass(frozen=True)
class Batch:
    """B sequences of at most T rows. Places are b * T + t; sources are rows of what the encoders give for the batch.

    Args:
        ids: [B, T].
        learned, targets: [N] places of rows with a target, and the targets.
        is_decision: [N] whether the target is the first token of its unit.
        is_new_picture: [N] whether it is that of a unit with a picture that no earlier unit of the record has.
        looks, look_pictures: [n] places of the last rows of sound of units with a new picture, also where nothing is
            learned, and the numbers of these pictures.
        watches, watch_classes: [n] places of decisions of units, and what the model watches for, see `TimelineUnit`.
        owners: [N] sequence of each target.
        sound, sound_sources: [n] places of rows of units; sources count (segment * K + unit) * 10 + row.
        clip, clip_sources: [n] the same for rows of clips; sources count clip * PLACES_OF_CLIP + row.
        picture, picture_sources: [n] the same for pictures; sources count picture * 64 + row.
        segments: [S, K] units b * U + u that an encoder segment hears, -1 at its end.
        is_own: [S, K] whether a unit gets its rows in this segment.
    """

    ids: Tensor
    learned: Tensor
    targets: Tensor
    is_decision: Tensor
    is_new_picture: Tensor
    looks: Tensor
    look_pictures: Tensor
    watches: Tensor
    watch_classes: Tensor
    owners: Tensor
    sound: Tensor
    sound_sources: Tensor
    clip: Tensor
    clip_sources: Tensor
    picture: Tensor
    picture_sources: Tensor
    segments: Tensor
    is_own: Tensor
    first: Tensor  # [S, K] valid columns of the log-mel, as in `Apm.refill`
    end: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return Batch(*(to_device(getattr(self, one.name), device) for one in fields(self)))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, which copies it when its earlier work is done while the host goes on."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


ALIGNED_ROWS, ALIGNED_UNITS = 64, 4  # lengths of sequences and segments are multiples: kernels are faster on them
PLACES_OF_CLIP = 512  # rows of a clip; one second has ten


def collate(records: Sequence[Record]) -> Batch:
    """The batch of records."""
    n_rows = -(-max(len(one.ids) for one in records) // ALIGNED_ROWS) * ALIGNED_ROWS
    n_units = max(one.n_units for one in records)
    spans = [(row, *span) for row, one in enumerate(records) for span in one.segments.tolist()]
    longest = -(-max((end - context for _, context, _, end in spans), default=0) // ALIGNED_UNITS) * ALIGNED_UNITS
    segments = np.full((len(spans), longest), NOTHING, np.int64)
    is_own = np.zeros(segments.shape, bool)
    for number, (row, context, first, end) in enumerate(spans):
        segments[number, : end - context] = row * n_units + np.arange(context, end)
        is_own[number, first - context : end - context] = True
    ids = np.zeros((len(records), n_rows), np.int64)
    found: dict[str, list[np.ndarray]] = {name: [] for name in _LISTS}
    n_segments = n_pictures = n_clips = 0
    for row, one in enumerate(records):
        n, base = len(one.ids), row * n_rows
        ids[row, :n] = one.ids
        learned = np.flatnonzero(one.targets != NOTHING)
        found["learned"].append(base + learned)
        found["targets"].append(one.targets[learned].astype(np.int64))
        found["is_decision"].append(one.kinds[learned] == SOUND)
        looks, pictures = new_pictures(one)
        found["is_new_picture"].append(np.isin(learned, looks))
        found["looks"].append(base + looks)
        found["look_pictures"].append(n_pictures + pictures)
        watches = np.flatnonzero(one.watched != NOTHING)
        found["watches"].append(base + watches)
        found["watch_classes"].append(one.watched[watches].astype(np.int64))
        found["owners"].append(np.full(len(learned), row))
        for name, kind in (("sound", SOUND), ("clip", REFERENCE), ("picture", PICTURE)):
            places = np.flatnonzero(one.kinds == kind)
            sources = one.sources[places].astype(np.int64)
            if kind == SOUND:
                unit, of_unit = np.divmod(sources, SOUND_ROWS)
                segment, place = np.divmod(unit, PLACES)
                sources = ((n_segments + segment) * longest + place) * SOUND_ROWS + of_unit
            else:
                sources += n_clips * PLACES_OF_CLIP if kind == REFERENCE else n_pictures * PICTURE_ROWS
            found[name].append(base + places)
            found[f"{name}_sources"].append(sources)
        n_segments += len(one.segments)
        n_pictures += len(one.pictures)
        n_clips += bool(len(one.clip))
    is_real = segments != NOTHING
    is_first = is_real & (segments % max(n_units, 1) == 0)
    arrays = {name: np.concatenate(parts) for name, parts in found.items()}
    arrays |= {"ids": ids, "segments": segments, "is_own": is_own}
    arrays |= {"first": np.where(is_first, 2, 0), "end": np.where(is_real, UNIT_END, 0)}
    return Batch(**{name: torch.from_numpy(values) for name, values in arrays.items()})


def new_pictures(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """The last rows [n] of sound in units whose pictures no earlier unit has, and the numbers of these pictures.

    A long view has a new picture every `FRAMES_OF_A_VIEW` units, a movement one in each unit.
    """
    ends = np.flatnonzero((record.kinds == PICTURE) & (record.sources % PICTURE_ROWS == PICTURE_ROWS - 1))
    pictures, first = np.unique(record.sources[ends] // PICTURE_ROWS, return_index=True)
    last = ends[first] + 1 + SOUND_ROWS  # after `</image>` and the sound; a chat's picture has none
    follows = last < len(record.kinds)
    follows[follows] = record.kinds[last[follows]] == SOUND
    return last[follows], pictures[follows].astype(np.int64)


_LISTS = (
    *("learned", "targets", "is_decision", "is_new_picture", "looks", "look_pictures", "watches", "watch_classes"),
    *("owners", "sound", "sound_sources"),
    *("clip", "clip_sources", "picture", "picture_sources"),
)
