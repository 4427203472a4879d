"""Tokens to sound in one pass, for tests of weights: no voice, no chunks, no caches."""

import torch
from torch import Tensor

from models.token2wav.hift.source import phase_lines
from models.token2wav.load.parts import FlowAndHift, Token2WavParts
from models.token2wav.settings import FRAMES_PER_TOKEN, SAMPLES_PER_FRAME


@torch.inference_mode()
def offline_sound(
    parts: FlowAndHift | Token2WavParts, speech_tokens: Tensor, n_steps: int = 4
) -> tuple[Tensor, Tensor]:
    """Pitch [B, 2T] in Hz and sound [B, 960 T] of tokens [B, T], with the same noise and speaker in every row."""
    flow, hift = parts.flow, parts.hift
    n_rows, n_speech_tokens = speech_tokens.shape
    n_frames = FRAMES_PER_TOKEN * n_speech_tokens
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, n_frames, flow.config.n_mels, generator=generator).expand(n_rows, -1, -1)
    speaker = flow.speaker(torch.randn(1, flow.config.speaker_dim, generator=generator)).expand(n_rows, -1)
    lengths = torch.full((n_rows,), n_speech_tokens)
    mel = flow.offline(speech_tokens, lengths, torch.zeros_like(noise), speaker, noise, flow.schedule(n_steps))
    mel, lengths = mel.transpose(1, 2).float(), FRAMES_PER_TOKEN * lengths
    f0 = hift.f0(mel, lengths)
    tape = hift.m_source.mixed_noise(torch.zeros(n_rows, dtype=torch.int64), SAMPLES_PER_FRAME * n_frames)
    source, _ = hift.m_source(f0, phase_lines("interp", f0, lengths), tape, lengths)
    return f0, hift.decode(mel, source, lengths)
