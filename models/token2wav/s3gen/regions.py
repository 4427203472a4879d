"""S3Gen's regions, one for each component: plain functions of a context and tensors, as in `models.stages.regions`.

A batch holds utterances of different voices and lengths. Each row is the prompt's tokens followed by the speech's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.token2wav.hift.hift import HiftBackend
from models.token2wav.s3gen.model import S3Gen, UNetFlow


@dataclass(frozen=True)
class SolveContext:
    """What the Euler solve is bound to. grids: time grids on the device by number of steps."""

    flow: UNetFlow
    grids: dict[int, Tensor]


@dataclass
class DecodeContext:
    """What the decoding is bound to. backend: of the model's HiFT, no submodule of it."""

    model: S3Gen
    backend: HiftBackend


def encode_tokens(flow: UNetFlow, speech_tokens: Tensor, n_speech_tokens: Tensor) -> Tensor:
    """The encoder's mel [B, n_mels, 2T] of prompt and speech; arguments as `UNetFlow.encode`."""
    return flow.encode(speech_tokens, n_speech_tokens).contiguous()


def solve_mel(
    context: SolveContext,
    mu: Tensor,
    n_prompt: Tensor,
    n_frames: Tensor,
    prompt: Tensor,
    speaker: Tensor,
    noise: Tensor,
    n_new: int,
    n_steps: int,
) -> Tensor:
    """Mel [B, n_mels, n_new] of the speech, zero beyond its end.

    Args:
        context: flow and time grids.
        mu: [B, n_mels, F] of `encode_tokens`.
        n_prompt: [B] int64 mel frames of the prompt.
        n_frames: [B] int64 mel frames of prompt and speech.
        prompt: [B, n_mels, F] mel of the prompt, zero after it.
        speaker: [B, speaker_dim].
        noise: [B, n_mels, F] float32.
        n_new: frames of the longest speech of the bucket (static).
        n_steps: Euler steps (static).
    """
    mel = context.flow.solve(mu, n_frames, prompt, speaker, noise, context.grids[n_steps])
    # Beyond the bucket's end the last column repeats; such frames lie beyond the speech's end too, where mel is zero.
    column = (n_prompt[:, None] + torch.arange(n_new, device=mel.device)).clamp(max=mel.shape[2] - 1)
    inside = torch.arange(n_new, device=mel.device) < (n_frames - n_prompt)[:, None]
    speech = mel.gather(2, column[:, None].expand(-1, mel.shape[1], -1))
    return torch.where(inside[:, None], speech, 0)


def find_pitch(model: S3Gen, mel: Tensor, n_frames: Tensor) -> Tensor:
    """Pitch [B, T] float64 in Hz of mel [B, n_mels, T]; n_frames [B] int64."""
    return model.mel2wav.f0(mel, n_frames)


def decode_mel(context: DecodeContext, mel: Tensor, f0: Tensor, n_frames: Tensor, phase: Tensor) -> Tensor:
    """Sound [B, 480 T] of whole utterances; further arguments as `S3Gen.decode`."""
    return context.model.decode(mel, f0, n_frames, phase, context.backend)
