"""Chunks of mel frames to sound, for many slots at once: tails, cross-fade and the number of samples to send.

Contains frames, samples and slots. Does not contain speech tokens, sessions or the source of the mel frames.

HiFT is not causal, so the last eight frames of a chunk are vocoded again together with the next chunk. The sound of
these frames (the tail) is held back and cross-faded with the sound of the second pass. A slot with fewer than eight
frames has sent nothing yet; its frames are prepended to the next chunk. A turn of n frames has 480 n samples for any
division into chunks.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from models.token2wav.hift.hift import HiftBackend
from models.token2wav.hift.source import NOISE_SAMPLES, continued_lines, harmonic_rates, held_lines
from models.token2wav.settings import SAMPLES_PER_FRAME

TAIL_FRAMES = 8
TAIL_SAMPLES = TAIL_FRAMES * SAMPLES_PER_FRAME


@dataclass(frozen=True)
class VocodeRules:
    """How chunks are joined; the same for all slots of a call.

    fade   even: the two weights of the cross-fade add up to one. reference: they add up to 1.08, as in the public
           implementation, which makes every seam 0.7 dB louder and lets sound exceed the limit.
    phase  continue: harmonics continue at the phase where the slot's last chunk ended. restart: they start at the same
           phase in each chunk, as in the public implementation, so the excitation jumps at the end of the cached part.
    end    clear: the end of a turn empties the slot. keep: the tails stay, as in the public implementation, so frames
           that follow the last ones fade in from sound that was already sent.
    """

    fade: Literal["even", "reference"] = "even"
    phase: Literal["continue", "restart"] = "continue"
    end: Literal["clear", "keep"] = "clear"


REFERENCE_RULES = VocodeRules(fade="reference", phase="restart", end="keep")


@dataclass(frozen=True)
class VocodeState:
    """The tails of n slots and of the scratch slot n, which receives the writes of padding; advanced by `vocode` only.

    Sound, excitation and phase are valid if `n_tail` is 8. With a smaller `n_tail` the slot has not sent anything.
    """

    mel: Tensor  # [n + 1, n_mels, 8] float32  the newest frames, n_tail of them valid, left-aligned
    n_tail: Tensor  # [n + 1] int64
    source: Tensor  # [n + 1, 3840] float32  excitation of these frames
    wave: Tensor  # [n + 1, 3840] float32  sound of these frames, held back for the cross-fade
    phase: Tensor  # [n + 1] float64  phase of the fundamental after these frames, in turns
    noise_position: Tensor  # [n + 1] int64  index of the first of these frames' samples in the noise table

    @classmethod
    def allocate(cls, n_slots: int, n_mels: int, device: torch.device | str = "cpu") -> "VocodeState":
        def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(n_slots + 1, *shape, dtype=dtype, device=device)

        return cls(
            mel=rows(n_mels, TAIL_FRAMES),
            n_tail=rows(dtype=torch.int64),
            source=rows(TAIL_SAMPLES),
            wave=rows(TAIL_SAMPLES),
            phase=rows(dtype=torch.float64),
            noise_position=rows(dtype=torch.int64),
        )

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def reset(self, slots: Tensor) -> None:
        """Empty `slots` [B]; the sound that they hold back is lost."""
        for tensor in self.tensors():
            tensor.index_fill_(0, slots, 0)


@dataclass(frozen=True)
class MelChunk:
    """The next mel frames of B slots."""

    mel: Tensor  # [B, n_mels, T]; undefined beyond n_new
    n_new: Tensor  # [B] int64 valid frames, 0 to T
    last: Tensor  # [B] bool: the turn ends
    # [B, 480 (T + 8), 9] noise of each harmonic, starting at the first held-back frame. None = noise from a fixed
    # table, which is the same for the same sample of the turn in every pass.
    noise: Tensor | None = None


def vocode(
    hift: HiftBackend,
    state: VocodeState,
    slots: Tensor,
    chunk: MelChunk,
    rules: VocodeRules,
    targets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sound of the next frames of each slot. Holds back the newest eight frames, or none where the turn ends.

    A row without new frames leaves its slot unchanged and has no samples. If such a row is `last`, its samples are the
    sound held back. After `last` the slot is empty, unless the rules keep it.

    Args:
        hift: the networks.
        state: updated in place.
        slots: [B] int64 slots to read, distinct except for rows of padding, which name the scratch slot with n_new 0.
        chunk: the frames.
        rules: how chunks are joined.
        targets: [B] slots to write, `slots` stay unchanged; None = write `slots`.
    Returns: [B, 480 (T + 8)] float32 in +-0.99 (with an `even` fade); [B] int64, the number of its samples to send. The
        rest of each row is undefined.
    Source: golden `e2e_*`.
    """
    targets = slots if targets is None else targets
    mel, n_new, last, noise = chunk.mel, chunk.n_new, chunk.last, chunk.noise
    n_tail = state.n_tail[slots]
    joined = n_tail == TAIL_FRAMES
    n_frames = n_tail + n_new
    frames = _join(state.mel[slots], mel, n_tail)
    n_samples = frames.shape[2] * SAMPLES_PER_FRAME

    position = state.noise_position[slots]
    mixed = hift.m_source.mixed_noise(position, n_samples) if noise is None else hift.m_source.mix(noise)
    f0 = hift.f0(frames, n_frames)
    rate = harmonic_rates(f0)
    if rules.phase == "continue":
        edge = torch.where(joined, TAIL_FRAMES, 0)
        lines, phase = continued_lines(rate, n_frames, edge, torch.where(joined, state.phase[slots], 0.0))
    else:
        lines, phase = held_lines(rate, n_frames), state.phase[slots]
    source, _ = hift.m_source(f0, lines, mixed, n_frames)
    cached = torch.where(joined[:, None], state.source[slots], source[:, :TAIL_SAMPLES])
    source = torch.cat((cached, source[:, TAIL_SAMPLES:]), dim=1)

    fresh = hift.decode(frames, source, n_frames)
    old, new = state.wave[slots], fresh[:, :TAIL_SAMPLES]
    head = torch.where(joined[:, None], _fade(old, new, rules), new)
    # Without new frames there is no second pass: the sound held back is sent unchanged.
    head = torch.where((joined & (n_new == 0))[:, None], old, head)
    wave = torch.cat((head, fresh[:, TAIL_SAMPLES:]), dim=1)

    # The new tails begin eight frames before the end of each row, or at its beginning.
    n_kept = n_frames.clamp(max=TAIL_FRAMES)
    begin = n_frames - n_kept
    kept = TailRange(begin, n_kept)
    moved = position + begin * SAMPLES_PER_FRAME
    changed = last | (n_new > 0)
    for tensor, value in (
        (state.mel, kept.of(frames, 1)),
        (state.n_tail, n_kept),
        (state.source, kept.of(source, SAMPLES_PER_FRAME)),
        (state.wave, kept.of(wave, SAMPLES_PER_FRAME)),
        (state.phase, phase),
        (state.noise_position, moved % NOISE_SAMPLES),
    ):
        shape = (-1,) + (1,) * (tensor.ndim - 1)
        cleared = last.view(shape) & (rules.end == "clear")
        value = torch.where(cleared, 0, value).to(tensor.dtype)
        tensor.index_copy_(0, targets, torch.where(changed.view(shape), value, tensor[slots]))
    return wave, SAMPLES_PER_FRAME * torch.where(last, n_frames, begin)


@dataclass(frozen=True)
class TailRange:
    """The frames [begin, begin + count) of each row, count at most 8."""

    begin: Tensor  # [B] int64
    count: Tensor  # [B] int64

    def of(self, values: Tensor, per_frame: int) -> Tensor:
        """The range of values [B, ..., N] with `per_frame` columns per frame, [B, ..., 8 per_frame]; 0 after it."""
        shape = (-1,) + (1,) * (values.ndim - 1)
        column = torch.arange(TAIL_FRAMES * per_frame, device=values.device)
        index = (self.begin.view(shape) * per_frame + column).expand(*values.shape[:-1], -1)
        return torch.where(column < self.count.view(shape) * per_frame, values.gather(-1, index), 0)


def _join(tail: Tensor, mel: Tensor, n_tail: Tensor) -> Tensor:
    """The n_tail [B] valid frames of tail [B, n_mels, 8], then mel [B, n_mels, T] without a gap: [B, n_mels, T + 8]."""
    both = torch.cat((tail, mel.to(tail.dtype)), dim=2)
    column = torch.arange(both.shape[2], device=mel.device)
    skipped = TAIL_FRAMES - n_tail[:, None]
    index = torch.where(column < n_tail[:, None], column, column + skipped).clamp(max=both.shape[2] - 1)
    return both.gather(2, index[:, None].expand_as(both))


def _fade(old: Tensor, new: Tensor, rules: VocodeRules) -> Tensor:
    """Cross-fade from the sound of the first pass to the sound of the second pass, [B, 3840] each."""
    sample = torch.arange(TAIL_SAMPLES, dtype=torch.float64, device=new.device)
    if rules.fade == "reference":
        # Both halves of a symmetric Hamming window of twice the length.
        step = 2 * math.pi / (2 * TAIL_SAMPLES - 1)
        rising = (0.54 - 0.46 * torch.cos(step * sample)).float()
        return new * rising + old * rising.flip(0)
    rising = (0.5 - 0.5 * torch.cos(math.pi / TAIL_SAMPLES * (sample + 0.5))).float()
    return torch.lerp(old, new, rising)  # between the two values even after rounding
