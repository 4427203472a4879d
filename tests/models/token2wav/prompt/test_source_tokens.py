"""Speech tokens of sounds of any length."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.errors import AudioError
from models.token2wav.load.parts import load_voice_parts
from models.token2wav.prompt import source_tokens
from models.token2wav.prompt.features import log_mel_128
from models.token2wav.prompt.source_tokens import CONTEXT_FRAMES, LOG_MEL_PER_TOKEN, speech_tokens_of
from tests.models.token2wav.prompt.prompt_sounds import prompt


class Numbering(nn.Module):
    """Stands for the tokenizer: a token is the number of its first frame, which the log-mel contains, by four."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.conv1 = nn.Conv1d(1, 1, 1)
        self.config = type("Config", (), {"n_mels": 1})
        self.lengths: list[int] = []

    def forward(self, log_mel: Tensor, n_frames: Tensor) -> tuple[Tensor, Tensor]:
        self.lengths.append(log_mel.shape[2])
        assert n_frames.tolist() == [log_mel.shape[2]]
        return log_mel[:, 0, ::LOG_MEL_PER_TOKEN].long() // LOG_MEL_PER_TOKEN, n_frames


@pytest.mark.parametrize("n_frames", [8, 500, 501, 599, 600, 601, 700, 799, 800, 801, 1003, 1995])
def test_windows_join_without_gap(monkeypatch: pytest.MonkeyPatch, n_frames: int) -> None:
    frames = torch.arange(n_frames, dtype=torch.float32)[None]
    monkeypatch.setattr(source_tokens, "log_mel_128", lambda *_: frames)
    tokenizer, window = Numbering(), 600
    tokens = speech_tokens_of(tokenizer, np.zeros(800, np.float32), 16_000, window=window)
    assert tokens.tolist() == list(range(-(-n_frames // LOG_MEL_PER_TOKEN)))
    assert max(tokenizer.lengths) <= window
    assert len(tokenizer.lengths) == 1 + max(0, -(-(n_frames - window) // (window - 2 * CONTEXT_FRAMES)))


def test_short_sound_is_read_at_once(tiny) -> None:
    tokenizer = load_voice_parts(tiny / "assets/token2wav").speech_tokenizer
    sound = torch.from_numpy(prompt(1.3))[0].float()
    log_mel = log_mel_128(sound, tokenizer.config.n_mels)
    expected, _ = tokenizer(log_mel[None], torch.tensor([log_mel.shape[1]]))
    assert speech_tokens_of(tokenizer, sound, 16_000).tolist() == expected[0].tolist()
    with pytest.raises(AudioError, match="sound: expected finite samples"):
        speech_tokens_of(tokenizer, torch.full((800,), torch.nan), 16_000)
