"""Speech tokens of a sound of any length: what a voice conversion speaks in another voice.

The tokenizer reads at most 30 s. A longer sound is read in windows that overlap; of each, the tokens next to a cut are
those of the window that has two seconds of sound on both sides of them.
"""

import torch
from torch import Tensor

from models.inputs.audio import validate_audio
from models.token2wav.prompt.features import log_mel_128, resample
from models.token2wav.prompt.prompt_sound import MAX_SECONDS
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from models.token2wav.settings import RATE_16K

LOG_MEL_PER_TOKEN = 4  # frames
WINDOW_FRAMES = 100 * MAX_SECONDS
CONTEXT_FRAMES = 200  # read on each side of a cut, and not kept


def speech_tokens_of(tokenizer: S3Tokenizer, wave: object, rate: int, *, window: int = WINDOW_FRAMES) -> Tensor:
    """Speech tokens [n] int64 of a sound on the CPU, 25 a second.

    Args:
        tokenizer: on any device.
        wave: [n] mono float samples in [-1, 1], at least 25 ms.
        rate: Hz.
        window: log-mel frames that the tokenizer reads at once, a multiple of four above `2 * CONTEXT_FRAMES`.
    Raises: AudioError.
    """
    samples = resample(validate_audio(wave, what="sound"), rate, RATE_16K)
    log_mel = log_mel_128(samples, tokenizer.config.n_mels)
    device = tokenizer.encoder.conv1.weight.device
    n_frames, step = log_mel.shape[1], window - 2 * CONTEXT_FRAMES
    kept: list[Tensor] = []
    for start in range(0, n_frames, step):
        part = log_mel[None, :, start : start + window].to(device)
        with torch.no_grad():
            tokens, _ = tokenizer(part, torch.tensor([part.shape[2]], device=device))
        first = CONTEXT_FRAMES // LOG_MEL_PER_TOKEN if start else 0
        is_last = start + window >= n_frames
        end = None if is_last else (window - CONTEXT_FRAMES) // LOG_MEL_PER_TOKEN
        kept.append(tokens[0, first:end].cpu())
        if is_last:
            break
    return torch.cat(kept)
