"""Training of the vocoder: mel frames to sound.

The losses are distances of spectrograms of several resolutions and of the mel, then adversarial ones in addition. The
fundamental frequency of the mel is learned beside them from the pitch of the recordings; the excitation is made of the
recorded pitch at first and of the predicted pitch later, as in serving.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.inputs.audio import mel_filters
from models.token2wav.hift.f0 import F0Predictor, WideConv
from models.token2wav.hift.hift import Hift, Snake
from models.token2wav.hift.source import HarmonicSource, harmonic_rates, held_lines
from models.token2wav.hift.spectral import Spectral
from models.token2wav.prompt.features import MEL_FLOOR, MEL_WINDOW
from models.token2wav.settings import FRAMES_PER_TOKEN, SAMPLE_RATE, SAMPLES_PER_FRAME
from training.discriminators import Discriminators, discriminator_loss, feature_loss, generator_loss
from training.loop import RunPlan, Trainer, WeightGroup
from training.segments import SegmentSampler
from training.sizes import HIFT
from training.speech.corpus import Corpus
from training.speech.features import mel_80, pitch
from training.weights import derive, new_hift

TOKENS = 16  # of one piece: 0.64 s
BATCH = 32
ADVERSARIAL_FROM = 0.22  # progress
RECORDED_PITCH_UNTIL = 0.1
DISCRIMINATORS_ALONE = 0.05  # share of a run that starts from weights, whose discriminators are new
RESOLUTIONS = ((2048, 512), (1024, 256), (512, 128), (256, 64))  # window and hop
MEL_WEIGHT, SPECTRUM_WEIGHT, ADVERSARIAL_WEIGHT, FEATURE_WEIGHT = 10.0, 3.0, 1.0, 4.0
FIRST_F0_SCALE = 100.0  # Hz per unit of the predictor's first outputs


class SoundLoss(nn.Module):
    """Distances between sounds: of the mel that serving uses, and of spectrograms."""

    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filters", mel_filters(80, MEL_WINDOW, SAMPLE_RATE).float(), persistent=False)
        self.register_buffer("mel_window", torch.hann_window(MEL_WINDOW), persistent=False)
        for window, _ in RESOLUTIONS:
            self.register_buffer(f"window_{window}", torch.hann_window(window), persistent=False)

    def mel(self, wave: Tensor) -> Tensor:
        """[B, T, 80] log-mel of wave [B, 480 T]."""
        outside = (MEL_WINDOW - SAMPLES_PER_FRAME) // 2
        padded = F.pad(wave[:, None], (outside, outside), mode="reflect")[:, 0]
        window = cast(Tensor, self.mel_window)
        spectrum = torch.stft(padded, MEL_WINDOW, SAMPLES_PER_FRAME, window=window, center=False, return_complex=True)
        magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
        return (magnitude.transpose(1, 2) @ self.filters).clamp_min(MEL_FLOOR).log()

    def forward(self, got: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Mean distance of the log-mels and of the spectrograms, for waves [B, 480 T]."""
        mel = (self.mel(got) - self.mel(expected)).abs().mean()
        distances = []
        for n_fft, hop in RESOLUTIONS:
            a, b = (self._magnitude(wave, n_fft, hop) for wave in (got, expected))
            distances.append((a.log() - b.log()).abs().mean() + (a - b).norm() / b.norm())
        return mel, torch.stack(distances).mean()

    def _magnitude(self, wave: Tensor, n_fft: int, hop: int) -> Tensor:
        window = getattr(self, f"window_{n_fft}")
        spectrum = torch.stft(wave, n_fft, hop, window=window, return_complex=True)
        return (spectrum.real.square() + spectrum.imag.square() + 1e-7).sqrt()


def predict_pitch(predictor: F0Predictor, mel: Tensor) -> Tensor:
    """[B, T] Hz for mel [B, T, 80], as the program computes it, in float32 and with gradients."""
    x = mel.transpose(1, 2)
    for layer in predictor.condnet:
        x = F.conv1d(x, layer.weight, layer.bias, padding=1) if isinstance(layer, WideConv) else layer(x)
    hertz: Tensor = predictor.classifier(x.transpose(1, 2))
    return hertz[..., 0].abs()


def synthesize(hift: Hift, mel: Tensor, f0: Tensor) -> Tensor:
    """[B, 480 T] sound of mel [B, T, 80] with the pitch f0 [B, T], with gradients to all weights but the pitch's."""
    derive(hift, Snake)
    B, T, _ = mel.shape
    n_frames = torch.full((B,), T, device=mel.device)
    lines = held_lines(harmonic_rates(f0.double()), n_frames)
    noise = torch.randn(B, SAMPLES_PER_FRAME * T, device=mel.device) * hift.m_source.l_linear.weight.norm()
    source, _ = hift.m_source(f0, lines, noise, n_frames)
    return hift.decode(mel.transpose(1, 2), source, n_frames)


def train_hift(corpus: Corpus, plan: RunPlan) -> Trainer:
    """Train for the time of the plan. Returns: the trainer, whose averaged weights are the result."""
    device, batch = plan.device, plan.batch or BATCH
    samples = torch.from_numpy(corpus.samples).to(device)
    wave = samples.float() / 32_768
    mels, f0s = mel_80(wave), pitch(wave)
    del wave
    plan.log_setup("features")
    sampler = SegmentSampler(corpus, TOKENS, device)
    hift = new_hift(HIFT).to(device)
    with torch.no_grad():
        for weight in hift.f0_predictor.classifier.parameters():
            weight.mul_(FIRST_F0_SCALE)
        derive(hift, (Snake, Spectral, HarmonicSource))
    discriminators, loss = Discriminators().to(device), SoundLoss().to(device)
    groups = {
        "generator": WeightGroup(list(hift.parameters()), 6e-4, betas=(0.8, 0.99), clip=5.0),
        "discriminators": WeightGroup(list(discriminators.parameters()), 3e-4, betas=(0.8, 0.99), clip=5.0),
    }
    trainer = Trainer(plan, {"hift": hift, "discriminators": discriminators}, groups, averaged=("hift",))
    new_discriminators = plan.start >= ADVERSARIAL_FROM and not trainer.checkpoint.exists()
    alone_until = plan.start + (plan.end - plan.start) * DISCRIMINATORS_ALONE if new_discriminators else 0.0
    frame = torch.arange(TOKENS * FRAMES_PER_TOKEN, device=device)
    sample = torch.arange(len(frame) * SAMPLES_PER_FRAME, device=device)

    def step(phase: str) -> dict[str, Tensor]:
        start = sampler.draw(batch)[:, None] * FRAMES_PER_TOKEN
        mel, f0 = mels[start + frame], f0s[start + frame]
        real = samples[start * SAMPLES_PER_FRAME + sample].float() / 32_768
        if phase == "discriminators":
            with torch.no_grad():
                generated = synthesize(hift, mel, predict_pitch(hift.f0_predictor, mel))
            against = discriminator_loss(discriminators(real), discriminators(generated))
            norm = trainer.descend("discriminators", against)
            return {"against": against.detach(), "norm": norm}
        predicted = predict_pitch(hift.f0_predictor, mel)
        f0_loss = (predicted - f0).abs().mean() / 20
        recorded = phase == "recorded-pitch"
        generated = synthesize(hift, mel, f0 if recorded else predicted.detach())
        mel_loss, spectrum_loss = loss(generated, real)
        total = MEL_WEIGHT * mel_loss + SPECTRUM_WEIGHT * spectrum_loss + f0_loss
        told = {"mel": mel_loss.detach(), "spectrum": spectrum_loss.detach(), "f0": 20 * f0_loss.detach()}
        if phase == "adversarial":
            of_real = discriminators(real)
            against = discriminator_loss(of_real, discriminators(generated.detach()))
            trainer.descend("discriminators", against)
            outputs = discriminators(generated)
            adversarial, features = generator_loss(outputs), feature_loss(of_real, outputs)
            total = total + ADVERSARIAL_WEIGHT * adversarial + FEATURE_WEIGHT * features
            told |= {"against": against.detach(), "fooled": adversarial.detach(), "features": features.detach()}
        told["norm"] = trainer.descend("generator", total)
        return told

    def phase_at(progress: float) -> str:
        if progress < alone_until:
            return "discriminators"
        if progress < RECORDED_PITCH_UNTIL:
            return "recorded-pitch"
        return "spectrum" if progress < ADVERSARIAL_FROM else "adversarial"

    trainer.run(step, phase_at)
    return trainer
