"""Prompt sound to a voice: its speech tokens, its mel and its speaker vector.

Contains the channel, rate and number of frames of each part. Does not contain files, caches or model state.
"""

import torch
from torch import Tensor, nn

from models.errors import CheckpointError
from models.token2wav.load.parts import Token2WavParts, VoiceParts
from models.token2wav.prompt.features import fbank, log_mel_128, prompt_mel, remove_mean, resample
from models.token2wav.prompt.prompt_sound import check_prompt
from models.token2wav.settings import FRAMES_PER_TOKEN, RATE_16K, SAMPLE_RATE, FlowConfig
from models.token2wav.voice.voice import Voice
from models.token2wav.voice.voice_regions import VoiceRegions


class VoiceMaker:
    """The networks that prepare a voice. Stateless, so several threads may share one instance.

    Each sound is processed at its own length. With regions it is padded to one of their buckets, which compile and are
    captured; only one thread may use the maker then.
    """

    def __init__(self, parts: VoiceParts | Token2WavParts, flow: FlowConfig, *, is_bucketed: bool = False):
        """
        Args:
            is_bucketed: run the networks as `regions`.
        Raises: CheckpointError if the speaker encoder does not match the flow.
        """
        self.speaker_encoder, self.speech_tokenizer, self.flow = parts.speaker_encoder, parts.speech_tokenizer, flow
        expected, got = flow.speaker_dim, self.speaker_encoder.config.embedding
        if got != expected:
            raise CheckpointError("speaker vector", expected=f"{expected} values", got=got)
        self.regions = VoiceRegions(self.speech_tokenizer, self.speaker_encoder) if is_bucketed else None

    def make(self, wave: object, rate: int) -> Voice:
        """The voice of this sound, on the CPU.

        Tokens and speaker vector come from the first channel, the mel from the mean of all channels, as in training.

        Args:
            wave: NumPy array or tensor of floats, [n] or [channels, n], in [-1, 1]; 0.5 to 30 s.
            rate: Hz.
        Raises: AudioError for a sound of another form or duration.
        """
        samples = check_prompt(wave, rate)
        first = resample(samples[0], rate, RATE_16K)
        speech_tokens = self._speech_tokens(first)
        mel = prompt_mel(resample(samples.mean(0), rate, SAMPLE_RATE), self.flow.n_mels)
        voice = Voice(speech_tokens, fit_frames(mel, FRAMES_PER_TOKEN * len(speech_tokens)), self._speaker(first))
        voice.check(self.flow)
        return voice

    def _speech_tokens(self, wave: Tensor) -> Tensor:
        device = _device(self.speech_tokenizer)
        log_mel = log_mel_128(wave, self.speech_tokenizer.config.n_mels)
        if self.regions is not None:
            return self.regions.tokens(log_mel).cpu()
        n_frames = torch.tensor([log_mel.shape[1]], device=device)
        speech_tokens: Tensor = self.speech_tokenizer(log_mel[None].to(device), n_frames)[0]
        return speech_tokens[0].cpu()

    def _speaker(self, wave: Tensor) -> Tensor:
        energies = remove_mean(fbank(wave, self.speaker_encoder.config.n_mels))
        if self.regions is not None:
            return self.regions.speaker(energies).cpu()
        speakers: Tensor = self.speaker_encoder(energies[None].to(_device(self.speaker_encoder)))
        return speakers[0].cpu()


def fit_frames(mel: Tensor, n_frames: int) -> Tensor:
    """[n_frames, n_mels]: a longer mel is cut off at the end, a shorter one is extended by its last frame."""
    missing = max(n_frames - len(mel), 0)
    return torch.cat((mel[:n_frames], mel[-1:].expand(missing, -1)))


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
