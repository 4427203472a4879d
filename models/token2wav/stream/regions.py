"""The vocoder's regions: plain functions of a context and tensors, as in `models.stages.regions`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.token2wav.flow.flow import Schedule
from models.token2wav.flow.flow_backend import FlowBackend
from models.token2wav.flow.flow_state import ChunkSlots, ChunkTokens, FlowState, SolveInputs, count_synthesized
from models.token2wav.hift.hift import HiftBackend
from models.token2wav.settings import FRAMES_PER_TOKEN
from models.token2wav.stream.vocode import MelChunk, VocodeRules, VocodeState, vocode


@dataclass(frozen=True)
class FlowContext:
    """What the regions of the flow are bound to."""

    backend: FlowBackend
    state: FlowState
    schedules: dict[int, Schedule]  # by number of Euler steps
    noise: Tensor  # [columns, n_mels] float32


@dataclass(frozen=True)
class HiftContext:
    """What the region of HiFT is bound to."""

    backend: HiftBackend
    state: VocodeState
    rules: VocodeRules


def begin(flow_state: FlowState, vocode_state: VocodeState, slots: Tensor, voices: Tensor) -> None:
    """Set `slots` [B] to the start of a turn with the voices in the voice slots `voices` [B]."""
    flow_state.begin(slots, voices)
    vocode_state.reset(slots)


def flow_chunk(
    context: FlowContext,
    slots: Tensor,
    targets: Tensor,
    speech_tokens: Tensor,
    n_speech_tokens: Tensor,
    last: Tensor,
    width: int,
    n_steps: int,
) -> Tensor:
    """Mel [B, 2T, n_mels] of one chunk of tokens.

    Args:
        context: backend and state.
        slots: [B] int64 slots to read.
        targets: [B] int64 slots to write.
        speech_tokens: [B, T + lookahead] int64; this and the next two as `ChunkTokens`.
        n_speech_tokens: [B] int64.
        last: [B] bool.
        width: cached mel frames to attend to (static).
        n_steps: Euler steps (static).
    """
    backend, state = context.backend, context.state
    chunk = ChunkSlots(slots, width, targets)
    mu = backend.encode(state, chunk, ChunkTokens(speech_tokens, n_speech_tokens, last))
    n_frames = FRAMES_PER_TOKEN * count_synthesized(n_speech_tokens, last, backend.flow.encoder.lookahead)
    return backend.solve(state, chunk, SolveInputs(context.schedules[n_steps], context.noise, mu, n_frames))


def vocode_chunk(
    context: HiftContext, slots: Tensor, targets: Tensor, mel: Tensor, n_new: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Sound of mel [B, T, n_mels]; results and other arguments as `vocode`."""
    chunk = MelChunk(mel.transpose(1, 2), n_new, last)
    return vocode(context.backend, context.state, slots, chunk, context.rules, targets=targets)


def prepare_voice(
    context: FlowContext,
    voices: Tensor,
    starts: Tensor,
    speech_tokens: Tensor,
    n_speech_tokens: Tensor,
    mel: Tensor,
    speaker: Tensor,
    n_steps: int,
) -> None:
    """Run prompts through the flow once and store the resulting state in voice slots, from which sessions begin.

    Args:
        context: backend and state.
        voices: [B] int64 voice slots.
        starts: [B] int64 first row of each voice among the rows of all voices, in mel frames.
        speech_tokens: [B, T + lookahead] int64 tokens of the prompt and the lookahead.
        n_speech_tokens: [B] int64 valid tokens, the lookahead included.
        mel: [B, 2T, n_mels] of the prompts, two frames per token.
        speaker: [B, speaker_dim].
        n_steps: Euler steps (static).
    """
    backend, state = context.backend, context.state
    n_frames = FRAMES_PER_TOKEN * (n_speech_tokens - backend.flow.encoder.lookahead)
    state.place_voices(voices, starts, n_frames, backend.flow.speaker(speaker))
    slots = ChunkSlots(voices, 0, ring=mel.shape[1])
    more_follows = torch.zeros_like(n_speech_tokens, dtype=torch.bool)
    mu = backend.encode(state, slots, ChunkTokens(speech_tokens, n_speech_tokens, more_follows))
    backend.solve(state, slots, SolveInputs(context.schedules[n_steps], context.noise, mu, n_frames, mel))
