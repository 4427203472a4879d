"""Mel frames that arrive in chunks to sound, for many slots at once: tails, cross-fade, how much may go out.

Knows frames, samples and slots. Does not know codes, sessions or what makes mel frames.

The vocoder looks both ways, so a chunk's last eight frames are vocoded again with the next chunk, and their sound
is held back: it fades from what the first pass said to what the second one says. A slot that holds fewer frames
than that has sent nothing yet; its frames simply go in front of the next chunk's. A turn of n frames comes to 480 n
samples, however it was cut.
"""

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from models.token2wav.hift.hift import Hift
from models.token2wav.hift.source import NOISE_SAMPLES, continued_lines, harmonic_rates, held_lines
from models.token2wav.settings import SAMPLES_PER_FRAME

if TYPE_CHECKING:
    from models.token2wav.hift.hift_fused import FusedHift

TAIL_FRAMES = 8
TAIL_SAMPLES = TAIL_FRAMES * SAMPLES_PER_FRAME


@dataclass(frozen=True)
class VocodeRules:
    """How chunks are joined; fixed for all slots of a call.

    fade   even: the two halves of the cross-fade add up to one. reference: to 1.08, as in the public implementation,
           which makes every seam 0.7 dB louder and lets sound pass the limit.
    phase  continue: harmonics go on where the slot's last chunk left them. restart: they start anew with each chunk,
           as in the public implementation, and the excitation jumps where the cached one ends.
    end    forget: a finished turn leaves nothing. keep: its tails stay, as in the public implementation, so that
           frames sent after the last ones fade in from sound that went out already.
    """

    fade: Literal["even", "reference"] = "even"
    phase: Literal["continue", "restart"] = "continue"
    end: Literal["forget", "keep"] = "forget"


REFERENCE_RULES = VocodeRules(fade="reference", phase="restart", end="keep")


@dataclass(frozen=True)
class VocodeState:
    """Per slot, row n being scratch for rows of padding; `vocode` alone advances it.

    Sound, excitation and phase mean something once `n_tail` is 8; below, the slot has not sent anything.
    """

    mel: Tensor  # [n + 1, n_mels, 8] f32  newest frames, n_tail of them, left-aligned
    n_tail: Tensor  # [n + 1] i64
    source: Tensor  # [n + 1, 3840] f32  excitation of those frames
    wave: Tensor  # [n + 1, 3840] f32  their sound, held back
    phase: Tensor  # [n + 1] f64  the fundamental's phase behind them, in turns
    noise_position: Tensor  # [n + 1] i64  where the noise of the first of them stands on the tape

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
        """Empty `slots` [B]; what they held back is lost."""
        for tensor in self.tensors():
            tensor.index_fill_(0, slots, 0)


def vocode(
    hift: "Hift | FusedHift",
    state: VocodeState,
    slots: Tensor,
    mel: Tensor,
    n_new: Tensor,
    last: Tensor,
    rules: VocodeRules,
    noise: Tensor | None = None,
    targets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Vocode the next frames of each slot and hold back the newest eight, or nothing where the turn ends.

    A row without new frames stays as it was and gives nothing; if it is `last`, it gives what was held back.
    After `last` nothing is left, unless the rules keep it.

    Args:
        slots: [B] int64, distinct except for rows of padding, which name the scratch slot with n_new 0.
        mel: [B, n_mels, T]; beyond n_new [B] int64 (0 to T) it may hold anything. last: [B] bool.
        noise: [B, 480 (T + 8), 9] noise of each harmonic, from the first held-back frame on; without it noise
            comes from a fixed tape, the same for the same sample of the turn whenever it is vocoded.
        targets: [B] where to leave what comes next; None = in `slots`. If they are others, `slots` stay as they were.
    Returns: [B, 480 (T + 8)] float32 in +-0.99 (`even`) and [B] int64, how many of its samples go out; the rest of
        the row is meaningless.
    Source: golden `e2e_*`.
    """
    targets = slots if targets is None else targets
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
    # Nothing new to fade to: what was held back goes out as it is.
    head = torch.where((joined & (n_new == 0))[:, None], old, head)
    wave = torch.cat((head, fresh[:, TAIL_SAMPLES:]), dim=1)

    # The new tails begin eight frames before each row's own end, or where the row begins.
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
        forgotten = last.view(shape) & (rules.end == "forget")
        value = torch.where(forgotten, 0, value).to(tensor.dtype)
        tensor.index_copy_(0, targets, torch.where(changed.view(shape), value, tensor[slots]))
    return wave, SAMPLES_PER_FRAME * torch.where(last, n_frames, begin)


@dataclass(frozen=True)
class TailRange:
    """The frames [begin, begin + count) of each row, count at most 8."""

    begin: Tensor  # [B] int64
    count: Tensor  # [B] int64

    def of(self, values: Tensor, per_frame: int) -> Tensor:
        """[B, ..., N] with `per_frame` columns a frame -> [B, ..., 8 per_frame], 0 behind the range."""
        shape = (-1,) + (1,) * (values.ndim - 1)
        column = torch.arange(TAIL_FRAMES * per_frame, device=values.device)
        index = (self.begin.view(shape) * per_frame + column).expand(*values.shape[:-1], -1)
        return torch.where(column < self.count.view(shape) * per_frame, values.gather(-1, index), 0)


def _join(tail: Tensor, mel: Tensor, n_tail: Tensor) -> Tensor:
    """[B, n_mels, 8], n_tail [B] of them valid, and [B, n_mels, T] without a gap between: [B, n_mels, T + 8]."""
    both = torch.cat((tail, mel.to(tail.dtype)), dim=2)
    column = torch.arange(both.shape[2], device=mel.device)
    skipped = TAIL_FRAMES - n_tail[:, None]
    index = torch.where(column < n_tail[:, None], column, column + skipped).clamp(max=both.shape[2] - 1)
    return both.gather(2, index[:, None].expand_as(both))


def _fade(old: Tensor, new: Tensor, rules: VocodeRules) -> Tensor:
    """From one version of a tail's sound to the other, [B, 3840] each."""
    sample = torch.arange(TAIL_SAMPLES, dtype=torch.float64, device=new.device)
    if rules.fade == "reference":
        # Both halves of a symmetric Hamming window over the double length.
        step = 2 * math.pi / (2 * TAIL_SAMPLES - 1)
        rising = (0.54 - 0.46 * torch.cos(step * sample)).float()
        return new * rising + old * rising.flip(0)
    rising = (0.5 - 0.5 * torch.cos(math.pi / TAIL_SAMPLES * (sample + 0.5))).float()
    return torch.lerp(old, new, rising)  # never beyond the two, rounding included
