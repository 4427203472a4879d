"""The vocoder's regions: plain functions of weights, slot state and tensors, in the manner of
`models.stages.regions`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.token2wav.flow.conformer import RunLayers
from models.token2wav.flow.flow import Flow, Schedule
from models.token2wav.flow.flow_state import FlowState, encode, voiced
from models.token2wav.hift.hift import Hift
from models.token2wav.settings import FRAMES_PER_TOKEN
from models.token2wav.stream.vocode import VocodeRules, VocodeState, vocode

if TYPE_CHECKING:
    from models.token2wav.hift.hift_fused import FusedHift

Solver = Callable[..., Tensor]  # `flow_state.solve` for one flow, or what computes the same


def begin(flow_state: FlowState, vocode_state: VocodeState, slots: Tensor, voices: Tensor) -> None:
    """Start a turn in `slots` [B] with the voices of the voice slots `voices` [B]; nothing of the last turn is left."""
    flow_state.begin(slots, voices)
    vocode_state.reset(slots)


def flow_chunk(
    flow: Flow,
    run: RunLayers | None,
    solver: Solver,
    state: FlowState,
    schedules: dict[int, Schedule],
    noise: Tensor,
    slots: Tensor,
    targets: Tensor,
    speech_tokens: Tensor,
    n_speech_tokens: Tensor,
    last: Tensor,
    width: int,
    n_steps: int,
) -> Tensor:
    """One chunk of codes to mel [B, 2T, n_mels]; shapes as `encode`, which takes `run`, and `solve` as `solver`."""
    mu = encode(flow, state, slots, speech_tokens, n_speech_tokens, last, width, targets=targets, run=run)
    n_frames = FRAMES_PER_TOKEN * voiced(n_speech_tokens, last, flow.encoder.lookahead)
    return solver(state, schedules[n_steps], noise, slots, mu, n_frames, width, targets=targets)


def vocode_chunk(
    hift: "Hift | FusedHift",
    state: VocodeState,
    slots: Tensor,
    targets: Tensor,
    mel: Tensor,
    n_new: Tensor,
    last: Tensor,
    rules: VocodeRules,
) -> tuple[Tensor, Tensor]:
    """Mel [B, T, n_mels] to sound; shapes as `vocode`, but for the order of axes."""
    return vocode(hift, state, slots, mel.transpose(1, 2), n_new, last, rules, targets=targets)


def prepare_voice(
    flow: Flow,
    solver: Solver,
    state: FlowState,
    schedules: dict[int, Schedule],
    noise: Tensor,
    voices: Tensor,
    starts: Tensor,
    speech_tokens: Tensor,
    n_speech_tokens: Tensor,
    mel: Tensor,
    speaker: Tensor,
    n_steps: int,
) -> None:
    """Run prompts through the flow once and leave their state in voice slots, for sessions to begin from.

    Args:
        voices: [B] voice slots. starts: [B] first of their rows among all voices' rows, in mel frames.
        codes: [B, T + lookahead] prompt codes and what follows them; n_codes: [B] both counted.
        mel: [B, 2T, n_mels] of the prompts, two frames a code. speaker: [B, speaker_dim].
    """
    n_frames = FRAMES_PER_TOKEN * (n_speech_tokens - flow.encoder.lookahead)
    state.place(voices, starts, n_frames, flow.speaker(speaker))
    mu = encode(
        flow,
        state,
        voices,
        speech_tokens,
        n_speech_tokens,
        torch.zeros_like(n_speech_tokens, dtype=torch.bool),
        0,
        mel.shape[1],
    )
    solver(state, schedules[n_steps], noise, voices, mu, n_frames, 0, mel, mel.shape[1])
