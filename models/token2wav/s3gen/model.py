"""Chatterbox S3Gen: speech tokens and a prepared voice to 24 kHz sound, one utterance at a time.

Encoder, vocoder, speaker encoder and tokenizer are those of token2wav; the estimator is a U-Net. There are no caches:
prompt and speech are processed in one pass, and a streaming caller passes a longer prefix each time. Does not contain
files (`s3gen.load`) or text.

Lengths are rounded up to buckets of 64 mel frames. `UNetFlow.forward` and `S3Gen.vocode` are plain functions of padded
batches with static shapes; the other methods are host code around them.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.errors import ShapeError, TokenError
from models.inputs.audio import validate_audio
from models.layers.transformer import Derived
from models.token2wav.flow.flow import FlowFront
from models.token2wav.flow.solver import Grid, time_grid
from models.token2wav.hift.hift import Hift, HiftBackend
from models.token2wav.hift.source import N_HARMONICS, phase_lines
from models.token2wav.prompt.campplus import CampPlus
from models.token2wav.prompt.features import fbank, log_mel_128, prompt_mel, remove_mean, resample
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from models.token2wav.s3gen.unet import UNetConditions, UNetEstimator, solve
from models.token2wav.settings import (
    FRAMES_PER_TOKEN,
    RATE_16K,
    SAMPLE_RATE,
    SAMPLES_PER_FRAME,
    S3FlowConfig,
    S3GenConfig,
)

FINAL_SILENCE_TOKEN = 4299
FINAL_SILENCE = 3  # silence tokens that the public caller of the mean-flow variant appends to every utterance
BUCKET_FRAMES = 64
PROMPT_SECONDS = 10  # used part of a voice's sound
DEFAULT_STEPS, MEANFLOW_STEPS = 10, 2
MUTED_SAMPLES = FADED_SAMPLES = SAMPLE_RATE // 50  # 20 ms each, which may contain the decay of the prompt


class S3Voice(NamedTuple):
    """A prepared voice, on the CPU or on the model's device."""

    speech_tokens: Tensor  # [m] int64
    mel: Tensor  # [P, n_mels] float32, P = 2m or 2m + 1
    speaker: Tensor  # [speaker_dim] float32


class UNetFlow(FlowFront):
    """Module `flow` of the checkpoint: speech tokens to mel."""

    def __init__(self, config: S3FlowConfig):
        super().__init__(config, UNetEstimator(config.estimator))
        self.config = config

    @property
    def estimator(self) -> UNetEstimator:
        estimator = self.decoder.estimator
        assert isinstance(estimator, UNetEstimator)
        return estimator

    @property
    def meanflow(self) -> bool:
        return self.config.estimator.meanflow

    @property
    def grid_kind(self) -> Grid:
        """The time grid that the estimator is trained with."""
        return "linear" if self.meanflow else "cosine"

    def forward(
        self,
        speech_tokens: Tensor,
        n_speech_tokens: Tensor,
        n_frames: Tensor,
        prompt: Tensor,
        speaker: Tensor,
        noise: Tensor,
        grid: Tensor,
    ) -> Tensor:
        """Mel of prompt and speech.

        Args:
            speech_tokens: [B, T] int64 the prompt's tokens, then the speech's; any token is valid as padding.
            n_speech_tokens: [B] valid tokens, both counted.
            n_frames: [B] frames to make, at most 2 n_speech_tokens.
            prompt: [B, n_mels, 2T] mel of the prompt, zero after it.
            speaker: [B, speaker_dim].
            noise: [B, n_mels, 2T] float32.
            grid: [N + 1] float64 times, see `unet.solve`.
        Returns: [B, n_mels, 2T] float32, zero beyond n_frames.
        """
        mu = self.encode(speech_tokens, n_speech_tokens)
        return self.solve(mu, n_frames, prompt, speaker, noise, grid)

    def encode(self, speech_tokens: Tensor, n_speech_tokens: Tensor) -> Tensor:
        """The encoder's mel [B, n_mels, 2T], undefined beyond the valid tokens; arguments as `forward`."""
        hidden = self.encoder.offline(self.input_embedding(speech_tokens), n_speech_tokens)
        mu: Tensor = self.encoder_proj(hidden).transpose(1, 2)
        return mu

    def solve(
        self, mu: Tensor, n_frames: Tensor, prompt: Tensor, speaker: Tensor, noise: Tensor, grid: Tensor
    ) -> Tensor:
        """`forward` with the encoder's mel."""
        mask = torch.arange(prompt.shape[2], device=mu.device) < n_frames[:, None]
        mu = torch.where(mask[:, None], mu, 0)  # `where` instead of a product, because padding may be NaN
        conditions = UNetConditions(mask, mu, self.speaker(speaker).to(mu.dtype), prompt.to(mu.dtype))
        return solve(self.estimator, noise, conditions, grid, self.config.cfg_rate)


class S3Gen(Derived):
    """All modules under the checkpoint's names."""

    onset: Tensor  # [MUTED_SAMPLES + FADED_SAMPLES] float32 gain at the start of an utterance

    def __init__(self, config: S3GenConfig):
        super().__init__()
        self.config = config
        self.flow = UNetFlow(config.flow)
        self.mel2wav = Hift(config.vocoder)
        self.speaker_encoder = CampPlus(config.speaker_encoder)
        self.tokenizer = S3Tokenizer(config.tokenizer)
        self.register_buffer("onset", torch.empty(MUTED_SAMPLES + FADED_SAMPLES), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        turn = torch.linspace(math.pi, 0, FADED_SAMPLES, dtype=torch.float64)
        self.onset = F.pad((turn.cos() + 1) / 2, (MUTED_SAMPLES, 0)).float().to(device)

    @property
    def device(self) -> torch.device:
        return self.onset.device

    def prepare_voice(self, wave: Tensor, rate: int) -> S3Voice:
        """The voice of the first 10 s of a sound, on the model's device.

        Args:
            wave: [n] mono float in [-1, 1]; at least 80 ms.
            rate: Hz.
        Raises: AudioError.
        """
        mel, log_mel, energies = self.prompt_features(wave, rate)
        speech_tokens, _ = self.tokenizer(log_mel[None], torch.tensor([log_mel.shape[1]], device=self.device))
        return S3Voice(prompt_part(speech_tokens[0], mel), mel, self.speaker_encoder(energies[None])[0])

    def prompt_features(self, wave: Tensor, rate: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a voice is made of: mel [P, n_mels], log-mel [n_mels, F] of the tokenizer, energies [T, n_mels] of the
        speaker encoder; arguments as `prepare_voice`.
        """
        wave = validate_audio(wave, what="prompt sound")
        wave_16k, wave_24k = (
            resample(wave, rate, to)[: PROMPT_SECONDS * to].to(self.device) for to in (RATE_16K, SAMPLE_RATE)
        )
        energies = remove_mean(fbank(wave_16k, self.config.speaker_encoder.n_mels))
        log_mel = log_mel_128(wave_16k, self.config.tokenizer.n_mels)
        return prompt_mel(wave_24k, self.config.flow.n_mels), log_mel, energies

    def mel(
        self,
        speech_tokens: Tensor,
        voice: S3Voice,
        *,
        noise: Tensor,
        finalize: bool = True,
        n_steps: int | None = None,
    ) -> Tensor:
        """Mel of one utterance.

        Args:
            speech_tokens: [n] int64.
            voice: its tokens beyond the length of its mel are ignored.
            noise: [n_mels, L] float32; column f is the start of frame f of prompt and speech. Further columns are not
                read.
            finalize: the utterance ends here. Otherwise the last tokens are the lookahead only, 3 as released.
            n_steps: Euler steps; None = 10, or 2 for the mean flow.
        Returns: [n_mels, T] float32, T = 2n, less the lookahead, less 1 if the length of the prompt's mel is odd.
        Raises: TokenError for tokens out of range, no tokens, or none besides the lookahead; ShapeError;
            SettingsError.
        """
        config = self.config.flow
        lookahead = 0 if finalize else config.encoder.lookahead
        self.check(speech_tokens, voice, lookahead)

        parts = prompt_part(voice.speech_tokens, voice.mel), speech_tokens
        both = torch.cat([part.to(self.device) for part in parts])
        n_prompt, n_frames = len(voice.mel), FRAMES_PER_TOKEN * (len(both) - lookahead)
        n_padded = _bucket(FRAMES_PER_TOKEN * len(both))
        _check_shape("noise", noise, (config.n_mels, None))
        if noise.shape[1] < n_frames:
            raise ShapeError("noise", expected=f"at least {n_frames} columns", got=noise.shape[1])
        if n_steps is None:
            n_steps = MEANFLOW_STEPS if self.flow.meanflow else DEFAULT_STEPS
        grid = time_grid(n_steps, self.flow.grid_kind)

        out: Tensor = self.flow(
            _padded(both[None], n_padded // FRAMES_PER_TOKEN),
            torch.tensor([len(both)], device=self.device),
            torch.tensor([n_frames], device=self.device),
            _padded(voice.mel.T[None].to(self.device), n_padded),
            voice.speaker[None].to(self.device),
            _padded(noise[None, :, :n_frames].to(self.device), n_padded),
            grid.to(self.device),
        )
        return out[0, :, n_prompt:n_frames]

    def sound(
        self,
        speech_tokens: Tensor,
        voice: S3Voice,
        *,
        seed: int = 0,
        finalize: bool = True,
        n_steps: int | None = None,
    ) -> Tensor:
        """Sound of one utterance, [480 T] float32 at 24 kHz, within +-0.99.

        Arguments as `mel`; noise and phases are drawn from `seed`.
        """
        noise, phase = draw(seed, self.config.flow.n_mels, len(voice.mel) + FRAMES_PER_TOKEN * len(speech_tokens))
        mel = self.mel(speech_tokens, voice, noise=noise, finalize=finalize, n_steps=n_steps)
        n_frames = mel.shape[1]
        padded = _padded(mel[None], _bucket(n_frames))
        wave = self.vocode(padded, torch.tensor([n_frames], device=self.device), phase[None].to(self.device))
        return wave[0, : SAMPLES_PER_FRAME * n_frames]

    def vocode(self, mel: Tensor, n_frames: Tensor, phase: Tensor) -> Tensor:
        """Sound of the mel of whole utterances: 20 ms of silence, 20 ms of fade-in, the rest.

        Args:
            mel: [B, n_mels, T], T at least 2; undefined beyond n_frames.
            n_frames: [B] int64 valid frames.
            phase: [B, 9] start phases of the harmonics in radians; the fundamental's is ignored.
        Returns: [B, 480 T] float32 at 24 kHz, zero beyond 480 n_frames.
        """
        return self.decode(mel, self.mel2wav.f0(mel, n_frames), n_frames, phase)

    def decode(
        self, mel: Tensor, f0: Tensor, n_frames: Tensor, phase: Tensor, backend: HiftBackend | None = None
    ) -> Tensor:
        """`vocode` with the pitch of each frame.

        Args:
            mel: this, n_frames and phase as `vocode`.
            f0: [B, T] float64 in Hz.
            backend: of `mel2wav`; None = the plain one.
        """
        lines = phase_lines("cumsum", f0, n_frames, phase)
        noise = self.mel2wav.m_source.mixed_noise(torch.zeros_like(n_frames), SAMPLES_PER_FRAME * mel.shape[2])
        source, _ = self.mel2wav.m_source(f0, lines, noise, n_frames)
        wave = (self.mel2wav if backend is None else backend).decode(mel, source, n_frames)
        n = len(self.onset)
        return torch.cat((wave[:, :n] * self.onset, wave[:, n:]), dim=1)

    def check(self, speech_tokens: Tensor, voice: S3Voice, lookahead: int = 0) -> None:
        """Check an utterance. Raises: TokenError, ShapeError; see `mel`."""
        config = self.config.flow
        _check_shape("prompt mel", voice.mel, (None, config.n_mels))
        _check_shape("speaker vector", voice.speaker, (config.speaker_dim,))
        self._check_tokens("prompt tokens", voice.speech_tokens)
        self._check_tokens("speech tokens", speech_tokens)
        if len(speech_tokens) <= lookahead:
            raise TokenError("speech tokens", expected=f"more than {lookahead}", got=len(speech_tokens))

    def _check_tokens(self, what: str, speech_tokens: Tensor) -> None:
        _check_shape(what, speech_tokens, (None,))
        if speech_tokens.dtype != torch.int64:
            raise TokenError(what, expected="int64", got=speech_tokens.dtype)
        top = self.config.flow.vocab_size - 1
        odd = speech_tokens[(speech_tokens < 0) | (speech_tokens > top)]
        if len(odd):
            raise TokenError(what, expected=f"tokens in 0..{top}", got=odd.tolist())


def draw(seed: int, n_mels: int, n_frames: int) -> tuple[Tensor, Tensor]:
    """Noise [n_mels, at least n_frames] and phases [9] of an utterance, on the CPU.

    Equal seeds give equal values, and the noise of a longer utterance starts with the noise of a shorter one.
    """
    generator = torch.Generator().manual_seed(seed)
    phase = (torch.rand(N_HARMONICS, generator=generator) * 2 - 1) * math.pi
    # Frame by frame and in whole buckets, because the generator fills the last block of a tensor differently.
    return torch.randn(_bucket(n_frames), n_mels, generator=generator).T, phase


def end_with_silence(speech_tokens: Tensor) -> Tensor:
    """Speech tokens [n] and three silence tokens, which the mean-flow variant's public caller always appends."""
    return F.pad(speech_tokens, (0, FINAL_SILENCE), value=FINAL_SILENCE_TOKEN)


def prompt_part(speech_tokens: Tensor, mel: Tensor) -> Tensor:
    """The tokens of the prompt that its mel covers; a mel of odd length has one more frame."""
    n = len(mel) // FRAMES_PER_TOKEN
    if len(speech_tokens) < n:
        raise ShapeError("prompt tokens", expected=f"at least {n} for {len(mel)} mel frames", got=len(speech_tokens))
    return speech_tokens[:n]


def _bucket(n_frames: int) -> int:
    return -(-n_frames // BUCKET_FRAMES) * BUCKET_FRAMES


def _padded(x: Tensor, length: int) -> Tensor:
    return F.pad(x, (0, length - x.shape[-1]))


def _check_shape(what: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    fits = tensor.ndim == len(shape) and all(n in (None, got) for n, got in zip(shape, tensor.shape, strict=True))
    if not fits:
        expected = ["any" if n is None else n for n in shape]
        raise ShapeError(what, expected=f"shape {expected}", got=list(tensor.shape))
