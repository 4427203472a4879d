"""Streaming log-mel of many slots at once, emitted one second at a time.

The output equals the log-mel of the whole window, recomputed on every call: the window grows to 30 s, then drops
its oldest 10 s; it is mirrored at both ends; from 5 s on it is clipped 8 decades below its loudest bin. Here each
frame is computed once. The state of a slot depends only on the samples pushed so far, not on how they were divided
into pushes.

With n samples pushed since the start of the session, and all positions counted from that start:
    stable frames  (n - 40) // 160   frames that later samples cannot change
    all frames     n // 160          at most one more: the last frame, mirrored at the end of the window
    window start   0; from 480 000 samples on, the multiple of 160 000 that leaves a window of [320 000, 480 000)
Sliding the window does not change frame values, except at its new start: the loudest bin of a window includes the
mirrored last frame and, after a slide, the first two frames, which are mirrored at the new start.
"""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from models.errors import AudioError
from models.inputs.audio import CONTEXT, HALF_WINDOW, N_FFT, N_MELS, UNIT_COLUMNS, LogMel, mirror
from models.inputs.audio_sizes import HOP, SAMPLE_RATE, UNIT_FRAMES

SLIDE_AT = 30 * SAMPLE_RATE
SLIDE_BY = 10 * SAMPLE_RATE
DYNAMIC_FROM = 5 * SAMPLE_RATE  # shorter windows have a fixed floor
STABLE_LAG = HALF_WINDOW - HOP  # samples that a frame covers after the end of its hop
MIRRORED_FIRST = 2  # frames of a window that begin before its start
EDGE_SAMPLES = 360  # samples that these two frames cover

# Ring lengths, powers of two: the frames of one emission, the frames of one window, slides.
RAW_FRAMES = 256
MAX_FRAMES = 4096
EDGES = 4

MAX_PUSH = RAW_FRAMES * HOP

StreamClip = Literal["auto", "fixed", "dynamic"]


@dataclass(frozen=True)
class MelStreamState:
    """State of S slots and one scratch slot for padding rows, allocated once and advanced by `mel_step` only.

    Frames are stored in rings: frame f is at f mod length.
    """

    tail: Tensor  # [S + 1, 400] f32  newest samples, oldest first
    n_samples: Tensor  # [S + 1] i64  samples pushed
    n_emitted: Tensor  # [S + 1] i64  core frames emitted, context excluded
    raw: Tensor  # [S + 1, 256, n_mels] f32  log10 power of stable frames
    frame_max: Tensor  # [S + 1, 4096] f32  loudest bin of each stable frame
    edge_max: Tensor  # [S + 1, 4] f32  loudest bin of the first two frames of the window at 160 000 m; ring over m

    @classmethod
    def allocate(cls, n_slots: int, device: torch.device | str = "cpu", n_mels: int = N_MELS) -> "MelStreamState":
        def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(n_slots + 1, *shape, dtype=dtype, device=device)

        counts = rows(dtype=torch.int64), rows(dtype=torch.int64)
        return cls(rows(N_FFT), *counts, rows(RAW_FRAMES, n_mels), rows(MAX_FRAMES), rows(EDGES))

    @property
    def scratch(self) -> int:
        """Index of the scratch slot."""
        return self.n_samples.shape[0] - 1

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def reset(self, slots: Tensor) -> None:
        """Set all state of `slots` [B] to zero."""
        for tensor in self.tensors():
            tensor.index_fill_(0, slots, 0)


def window_start(n_samples: Tensor) -> Tensor:
    """First sample of the window after `n_samples` samples."""
    return ((n_samples - SLIDE_AT) // SLIDE_BY + 1).clamp_min(0) * SLIDE_BY


def stable_count(n_samples: Tensor) -> Tensor:
    """Frames that samples after the first `n_samples` cannot change."""
    return ((n_samples - STABLE_LAG) // HOP).clamp_min(0)


def mel_step(
    mel: LogMel,
    state: MelStreamState,
    slots: Tensor,
    samples: Tensor,
    n_new: Tensor,
    emit: Tensor,
    last: Tensor,
    *,
    redundancy: int,
    clip: StreamClip = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Push samples into slots, then emit the next 100 frames of each slot with `emit`.

    Column j of the output is frame `n_emitted - 2 + j`: two frames of context, the core, two frames of context.
    Columns [lo, hi) contain frames; the others are zero. A slot emits once all frames of its columns are stable. Until
    then, and without `emit`, lo = hi = 0, its columns are zero and `n_emitted` stays.

    Args:
        slots: [B] int64, distinct except for padding rows, which have the scratch slot.
        samples: [B, N] float32, N a bucket of at most 40 960; row b uses the first n_new[b], the rest is ignored.
        n_new: [B] int64.
        emit: [B] bool.
        last: [B] bool, the sound has ended: a slot emits the remaining frames, fewer than 100 if necessary and
            including the mirrored last one. Call again until hi is 0.
        redundancy: frames of context on each side: 2 in duplex, 0 in half-duplex.
        clip: `auto` is fixed while the window is shorter than 5 s, then dynamic.
    Returns: [B, n_mels, 104] float32; lo, hi: [B] int64.
    Source: golden `mel_stream_*`.
    """
    N = samples.shape[1]
    assert N <= MAX_PUSH, f"mel_step: expected at most {MAX_PUSH} samples a push, got {N}"
    assert 0 <= redundancy <= CONTEXT, f"mel_step: expected redundancy 0 to {CONTEXT}, got {redundancy}"
    n_before = state.n_samples[slots]
    n_after = n_before + n_new
    start = window_start(n_after)
    stable, all_frames = stable_count(n_after), n_after // HOP

    # 1. Compute the new stable frames, the first two frames of the next window, and the mirrored last frame.
    joined = torch.cat((state.tail[slots], samples), dim=1)  # [B, 400 + N]
    new = stable_count(n_before)[:, None] + torch.arange(-(-N // HOP), device=samples.device)  # [B, F]
    is_new = new < stable[:, None]
    edge = ((n_after - EDGE_SAMPLES) // SLIDE_BY).clamp_min(0)  # newest m whose first two frames are complete
    is_edge = edge * SLIDE_BY + EDGE_SAMPLES > n_before
    first_two = edge[:, None] * (SLIDE_BY // HOP) + torch.arange(MIRRORED_FIRST, device=samples.device)
    frame = torch.cat((new, first_two, all_frames[:, None] - 1), dim=1)
    origin = torch.zeros_like(new)
    coming = (edge * SLIDE_BY)[:, None].expand_as(first_two)
    begin = torch.cat((origin, coming, torch.zeros_like(all_frames)[:, None]), dim=1)
    raw = mel.raw(_frames(joined, n_before, frame, begin, n_after))  # [B, F + 3, n_mels]
    loudest = raw.amax(dim=2)
    F = new.shape[1]

    # 2. Store them.
    _put(state.raw, slots, new % RAW_FRAMES, raw[:, :F], is_new)
    _put(state.frame_max, slots, new % MAX_FRAMES, loudest[:, :F], is_new)
    edge_loudest = loudest[:, F : F + MIRRORED_FIRST].amax(dim=1, keepdim=True)
    _put(state.edge_max, slots, (edge % EDGES)[:, None], edge_loudest, is_edge[:, None])
    state.tail[slots] = joined.gather(1, n_new[:, None] + torch.arange(N_FFT, device=samples.device))
    state.n_samples[slots] = n_after

    # 3. Gather the columns to emit.
    core = state.n_emitted[slots]
    whole = core + UNIT_FRAMES + redundancy
    ready = emit & torch.where(last, all_frames > core, stable >= whole)
    lo = (CONTEXT - core).clamp_min(CONTEXT - redundancy)
    hi = torch.minimum(whole, all_frames) - core + CONTEXT
    lo, hi = torch.where(ready, lo, 0), torch.where(ready, hi, 0)
    column = torch.arange(UNIT_COLUMNS, device=samples.device)
    wanted = core[:, None] - CONTEXT + column  # [B, 104] frame of each column
    mirrored_last = (wanted >= stable[:, None])[..., None]
    out = torch.where(mirrored_last, raw[:, -1:], state.raw[slots[:, None], wanted % RAW_FRAMES])
    state.n_emitted[slots] = torch.where(ready, torch.minimum(core + UNIT_FRAMES, all_frames), core)

    # 4. Clip them by the loudest bin of the window.
    fixed = mel.clip(out, "fixed")
    if clip != "fixed":
        has_last = all_frames > stable
        window_loudest = _window_loudest(state, slots, start, stable)
        window_loudest = torch.where(has_last, torch.maximum(window_loudest, loudest[:, -1]), window_loudest)
        dynamic = mel.clip(out, "dynamic", window_loudest[:, None, None])
        is_dynamic = (n_after - start >= DYNAMIC_FROM) if clip == "auto" else torch.ones_like(has_last)
        fixed = torch.where(is_dynamic[:, None, None], dynamic, fixed)
    kept = (column >= lo[:, None]) & (column < hi[:, None])
    return torch.where(kept[..., None], fixed, 0).transpose(1, 2).contiguous(), lo, hi


def _frames(joined: Tensor, n_before: Tensor, frame: Tensor, begin: Tensor, n_after: Tensor) -> Tensor:
    """Samples of each frame [B, K], mirrored at `begin` [B, K] and n_after [B]. Returns: [B, K, 400]."""
    offset = torch.arange(N_FFT, device=joined.device) - HALF_WINDOW
    index = mirror(frame[..., None] * HOP + offset, begin[..., None], n_after[:, None, None])
    # Frames that do not exist read arbitrary samples: each frame is transformed by itself, and theirs are dropped.
    index = (index - n_before[:, None, None] + N_FFT).clamp(0, joined.shape[1] - 1)
    return joined.gather(1, index.flatten(1)).view(index.shape)


def _put(ring: Tensor, slots: Tensor, index: Tensor, value: Tensor, valid: Tensor) -> None:
    """Write value [B, K, ...] to index [B, K] of each slot's ring where `valid` [B, K] is true."""
    rows = slots[:, None]
    mask = valid.view(valid.shape + (1,) * (value.ndim - 2))
    ring[rows, index] = torch.where(mask, value, ring[rows, index])


def _window_loudest(state: MelStreamState, slots: Tensor, start: Tensor, stable: Tensor) -> Tensor:
    """[B] loudest bin of the window's stable frames and, after a slide, of its mirrored first two frames."""
    place = torch.arange(MAX_FRAMES, device=slots.device)
    newest = stable[:, None] - 1
    frame = newest - (newest - place) % MAX_FRAMES  # the frame at each index of the ring
    slid = start > 0
    oldest = torch.where(slid, start // HOP + MIRRORED_FIRST, 0)[:, None]
    silent = float("-inf")
    stable_loudest = torch.where(frame >= oldest, state.frame_max[slots], silent).amax(dim=1)
    edge = state.edge_max[slots, start // SLIDE_BY % EDGES]
    return torch.maximum(stable_loudest, torch.where(slid, edge, silent))


def plan_emission(n_samples: int, n_emitted: int, redundancy: int, last: bool = False) -> tuple[int, int, int]:
    """lo, hi and n_emitted after a `mel_step`, computed on the host without a device sync.

    Args:
        n_samples: samples pushed so far, including those of this step.
    Raises: AudioError if too many samples were pushed before and the ring no longer contains the frames to emit.
    """
    all_frames = n_samples // HOP
    stable = max(0, (n_samples - STABLE_LAG) // HOP)
    whole = n_emitted + UNIT_FRAMES + redundancy
    if not (all_frames > n_emitted if last else stable >= whole):
        return 0, 0, n_emitted
    oldest = max(0, n_emitted - redundancy)
    if stable - oldest > RAW_FRAMES:
        raise AudioError("streamed audio", expected=f"at most {RAW_FRAMES} frames waiting", got=stable - oldest)
    lo = max(CONTEXT - n_emitted, CONTEXT - redundancy)
    return lo, min(whole, all_frames) - n_emitted + CONTEXT, min(n_emitted + UNIT_FRAMES, all_frames)
