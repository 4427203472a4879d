"""Speech tokens of a sound of any length: what a voice conversion speaks in another voice.

The tokenizer reads at most 30 s. A longer sound is read in windows that overlap; of each, the tokens next to a cut are
those of the window that has sound on both sides of them.
"""

from collections.abc import Iterator
from typing import NamedTuple

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


class TokenWindow(NamedTuple):
    """One window of a sound.

    Attributes:
        start, end: its log-mel frames.
        first, last: the range of its tokens that is kept.
    """

    start: int
    end: int
    first: int
    last: int


def token_windows(n_frames: int, window: int, context: int = CONTEXT_FRAMES) -> Iterator[TokenWindow]:
    """Windows whose kept tokens are all tokens of a sound.

    Args:
        n_frames: log-mel frames of the sound.
        window: frames of a window, a multiple of four above `2 * context`.
        context: frames that are read on each side of a cut and not kept, a multiple of four.
    """
    for start in range(0, n_frames, window - 2 * context):
        end, is_last = min(start + window, n_frames), start + window >= n_frames
        last = token_count(end - start) if is_last else (window - context) // LOG_MEL_PER_TOKEN
        yield TokenWindow(start, end, context // LOG_MEL_PER_TOKEN if start else 0, last)
        if is_last:
            return


def token_count(n_frames: int) -> int:
    """Speech tokens of log-mel frames, which two convolutions halve."""
    return ((n_frames + 1) // 2 + 1) // 2


def source_log_mel(wave: object, rate: int, n_mels: int) -> Tensor:
    """What the tokenizer reads of a sound, [n_mels, F]. Arguments and errors as `speech_tokens_of`."""
    return log_mel_128(resample(validate_audio(wave, what="sound"), rate, RATE_16K), n_mels)


def speech_tokens_of(tokenizer: S3Tokenizer, wave: object, rate: int, *, window: int = WINDOW_FRAMES) -> Tensor:
    """Speech tokens [n] int64 of a sound on the CPU, 25 a second.

    Args:
        tokenizer: on any device.
        wave: [n] mono float samples in [-1, 1], at least 25 ms.
        rate: Hz.
        window: log-mel frames that the tokenizer reads at once, a multiple of four above `2 * CONTEXT_FRAMES`.
    Raises: AudioError.
    """
    log_mel = source_log_mel(wave, rate, tokenizer.config.n_mels)
    device = tokenizer.encoder.conv1.weight.device
    kept: list[Tensor] = []
    for part in token_windows(log_mel.shape[1], window):
        frames = log_mel[None, :, part.start : part.end].to(device)
        with torch.no_grad():
            tokens, _ = tokenizer(frames, torch.tensor([frames.shape[2]], device=device))
        kept.append(tokens[0, part.first : part.last].cpu())
    return torch.cat(kept)
