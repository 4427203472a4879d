"""Values of the unit steps: a slot's counters, the result of a prefill or decode step, a unit of audio to encode."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.inputs.audio import N_FFT
from models.inputs.mel_stream import MelStreamState
from models.layers.audio_overlap import RecentMel
from models.layers.kv_cache import KVCache


class Chosen(NamedTuple):
    """Result of a prefill or decode step for one slot.

    Args:
        token: the chosen token; None if none was requested or the logits were not usable.
        bad: the logits were NaN or infinite.
        batch: [B, V] logits of the call.
        row: the slot's row among them.
        is_remembered: the token went into the sampler's history.
    """

    token: int | None
    bad: bool
    batch: Tensor
    row: int
    is_remembered: bool = False

    @property
    def logits(self) -> Tensor:
        """[V] on the device, valid until the next call. A property, because a view per slot and step costs time."""
        return self.batch[self.row]


class Counters(NamedTuple):
    """All counters of one slot.

    Args:
        context_len, speech_rows: rows in the LLM and speech caches. First, because `UnitSteps.counters` replaces them.
        draws, remembered, chunk_start: of the text sampler.
        n_samples, n_frames, n_units, audio_rows: samples, mel frames, units and encoder rows so far.
        tail: [400] newest samples, on the CPU.
        speech_draws, tokens_remembered: of the speech sampler.
        audio_state, recent_tokens: tensors kept by `keep_audio_state` and `keep_recent_tokens`.
    """

    context_len: int
    speech_rows: int
    draws: int
    remembered: int
    chunk_start: int
    n_samples: int
    n_frames: int
    n_units: int
    audio_rows: int
    tail: Tensor
    speech_draws: int
    tokens_remembered: int
    audio_state: tuple[Tensor, ...] = ()
    recent_tokens: Tensor | None = None


EMPTY_COUNTERS = Counters(0, 0, 0, 0, 0, 0, 0, 0, 0, torch.zeros(N_FFT), 0, 0)


class AudioParts(NamedTuple):
    """The audio tensors of the slots."""

    apm: KVCache
    mel: MelStreamState
    recent_mel: RecentMel


@dataclass(frozen=True)
class AudioUnit:
    """One slot's next unit of audio. first, end: its mel frames in the slot's emission. n_frames: emitted after it.

    overlap: rebuild the encoder's cache first.
    """

    slot: int
    samples: Tensor
    first: int
    end: int
    n_frames: int
    overlap: bool
