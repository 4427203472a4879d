"""What a training sequence needs beside its rows, computed as serving does: log-mel of units, pictures as patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.checkpoint.config import OmniConfig
from models.inputs.audio import N_MELS, LogMel
from models.inputs.audio_sizes import FIRST_UNIT_PADDED, FIRST_UNIT_SAMPLES, UNIT_SAMPLES
from models.inputs.image import ImagePatches, image_patches, pad_batch, plan
from models.inputs.mel_stream import MelStreamState, mel_step
from models.layers.apm import UNIT_ROWS
from models.layers.audio_overlap import OVERLAP_UNITS, max_overlap_units, needs_overlap
from training.timelines.layout import ContextRows, RowLayout
from training.timelines.speech import RATE, Samples
from training.timelines.timeline import Timeline
from training.timelines.windows import TimelinePart, part_rows

REDUNDANCY = 2  # mel frames of context around a unit's own
LEAD = FIRST_UNIT_PADDED - UNIT_SAMPLES  # zeros in front of a session's sound


@dataclass(frozen=True)
class EncoderSegment:
    """Units that the audio encoder sees at once: [context, end), of which those from `first` on get their rows here."""

    context: int
    first: int
    end: int


class Pictures(NamedTuple):
    """All pictures of a sequence in order, as `OmniModel.encode_images` takes them."""

    pixels: Tensor
    position_ids: Tensor
    coords: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Example:
    """One training sequence.

    Args:
        rows: of the context.
        mel: [S, K, 80, 104] float32 of the units of each segment. mel_first, mel_end: [S, K] valid columns.
        taken: for each of the part's units in order, its segment and its place there.
        pictures: patches of all pictures in order; None without any.
        reference: [n] samples of the reference voice, or of a chat's spoken question; None without one.
    """

    rows: ContextRows
    mel: Tensor
    mel_first: Tensor
    mel_end: Tensor
    taken: list[tuple[int, int]]
    pictures: Pictures | None = None
    reference: Tensor | None = None


def unit_mels(sound: Samples) -> tuple[Tensor, Tensor, Tensor]:
    """Log-mel [U, 80, 104] of a conversation's units, and their valid columns [first, end), [U] each."""
    padded = torch.from_numpy(np.concatenate((np.zeros(LEAD, np.float32), sound)))
    n_units = len(sound) // RATE
    log_mel, state, slot = LogMel(), MelStreamState.allocate(1), torch.zeros(1, dtype=torch.int64)
    emits, ends = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    parts = []
    taken = 0
    for unit in range(n_units):
        n = UNIT_SAMPLES if unit else FIRST_UNIT_SAMPLES
        samples, taken = padded[None, taken : taken + n], taken + n
        n_new = torch.tensor([n])
        parts.append(mel_step(log_mel, state, slot, samples, n_new, emits, ends, redundancy=REDUNDANCY))
    mel, first, end = zip(*parts, strict=True)
    return torch.cat(mel), torch.cat(first), torch.cat(end)


def sound_segments(first: Sequence[int], end: Sequence[int], max_positions: int) -> list[EncoderSegment]:
    """How the encoder's history grows and restarts from its last units, as in serving.

    Args:
        first, end: valid columns of each unit.
        max_positions: of the encoder's table.
    """
    n_kept = min(OVERLAP_UNITS, max_overlap_units(max_positions))
    segments, context, begin, held = list[EncoderSegment](), 0, 0, 0
    for unit, (low, high) in enumerate(zip(first, end, strict=True)):
        if needs_overlap(held, low, high, max_positions):
            segments.append(EncoderSegment(context, begin, unit))
            context, begin = max(0, unit - n_kept), unit
            held = UNIT_ROWS * (unit - context)
        held += UNIT_ROWS
    return [*segments, EncoderSegment(context, begin, len(end))]


def make_example(
    timeline: Timeline,
    part: TimelinePart,
    layout: RowLayout,
    config: OmniConfig,
    *,
    mels: tuple[Tensor, Tensor, Tensor] | None = None,
    reference: Tensor | None = None,
) -> Example:
    """The sequence of one part of a conversation.

    Args:
        mels: of the whole conversation, from `unit_mels`; computed if None.
        reference: [n] samples at 16 kHz of the reference voice, whole tenths of a second.
    """
    mel, low, high = mels or unit_mels(timeline.sound)
    segments = [
        one
        for one in sound_segments(low.tolist(), high.tolist(), config.audio_config.max_source_positions)
        if one.first < part.end and one.end > part.first
    ]
    longest = max(min(one.end, part.end) - one.context for one in segments)
    stacked = torch.zeros(len(segments), longest, N_MELS, mel.shape[-1])
    columns = torch.zeros(2, len(segments), longest, dtype=torch.int64)
    places: dict[int, tuple[int, int]] = {}
    for number, one in enumerate(segments):
        end = min(one.end, part.end)
        stacked[number, : end - one.context] = mel[one.context : end]
        columns[0, number, : end - one.context] = low[one.context : end]
        columns[1, number, : end - one.context] = high[one.context : end]
        places |= {unit: (number, unit - one.context) for unit in range(one.first, end)}
    n_reference = 0 if reference is None else len(reference) * 10 // RATE
    return Example(
        rows=part_rows(timeline.units, part, layout, n_reference),
        mel=stacked,
        mel_first=columns[0],
        mel_end=columns[1],
        taken=[places[unit] for unit in range(part.first, part.end)],
        pictures=_pictures(timeline, part, config),
        reference=reference,
    )


def stack_pictures(patches: Sequence[ImagePatches]) -> Pictures | None:
    """Slices as one batch of tensors, which processes pass on without a copy; None for none."""
    if not patches:
        return None
    batch = pad_batch(patches, max(len(one.pixels) for one in patches))
    return Pictures(*map(torch.from_numpy, (batch.pixels, batch.position_ids, batch.coords, batch.mask)))


def _pictures(timeline: Timeline, part: TimelinePart, config: OmniConfig) -> Pictures | None:
    patches: list[ImagePatches] = []
    for unit in timeline.units[part.first : part.end]:
        if unit.picture is not None:
            frame = unit.picture.render()
            patches += image_patches(frame, plan(*frame.size, 1), table_side=config.vision_config.table_side)
    return stack_pictures(patches)
