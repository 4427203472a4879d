"""Vocoder stages (`hift_*`): frequency, excitation, spectra and sound, each from the reference's own input."""

import torch
from torch import Tensor

from models.token2wav.hift import Hift
from models.token2wav.settings import SAMPLES_PER_FRAME, HiftConfig
from models.token2wav.source import phase_lines
from models.token2wav.weight_norm import fold_weight_norm
from models.weights import assign_weights
from tests.parity.golden import GoldenDir
from tests.parity.report import Report


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("hift_"):
        tensors = golden.tensors(stem)
        if not report.has_inputs(stem, tensors, "in.mel", "in.sine_noise", "out.f0", "out.source"):
            continue
        hift = golden_hift(tensors, "w.")
        mel, noise = tensors["in.mel"], tensors["in.sine_noise"]
        B, _, T = mel.shape
        n_frames = torch.full((B,), T)

        f0 = hift.f0(mel, n_frames)
        given_f0, given_source = tensors["out.f0"].double(), tensors["out.source"].squeeze(1)
        source, voiced = excite(hift, given_f0, noise)
        stft = hift.spectral.stft(given_source, SAMPLES_PER_FRAME * n_frames)
        magnitude, phase = hift.spectrum(mel, tensors.get("out.source_stft", stft), n_frames)
        results = {
            "f0": (f0, 1e-3),
            "source": (source[:, None], 1e-3),
            "source_stft": (stft, 5e-5),
            "magnitude": (magnitude, 5e-5),
            "phase": (phase, 1e-4),  # a sine: of arguments that may be large
            "wav": (hift.decode(mel, given_source, n_frames), 5e-5),
        }
        if "in.cache_source" in tensors:
            cached = tensors["in.cache_source"].squeeze(1)
            pasted = torch.cat((cached, given_source[:, cached.shape[1] :]), dim=1)
            results["wav_cached_source"] = hift.decode(mel, pasted, n_frames), 5e-5
        for name, (got, tolerance) in results.items():
            if f"out.{name}" in tensors:
                report.close(stem, name, got, tensors[f"out.{name}"], tolerance)
        if "out.wav" in tensors:
            wave = hift.decode(mel, excite(hift, f0, noise)[0], n_frames)
            report.close(stem, "wav, end to end", wave, tensors["out.wav"], 5e-3)
        if (uv := tensors.get("out.uv")) is not None:
            off = voiced[..., None] != uv.view(B, T, -1).bool()
            report.equal(stem, "voiced samples off", int(off.sum()), 0)


def golden_hift(tensors: dict[str, Tensor], prefix: str) -> Hift:
    """The vocoder whose weights are in a golden file under `prefix`, sized by their shapes."""
    weights = fold_weight_norm({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    base, n_mels, _ = weights["conv_pre.weight"].shape
    config = HiftConfig(n_mels=n_mels, base_channels=base, f0_channels=len(weights["f0_predictor.condnet.0.weight"]))
    with torch.device("meta"):
        hift = Hift(config)
    return assign_weights(hift, weights, "cpu", torch.float32)


def excite(hift: Hift, f0: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Excitation and voiced frames of rows without padding."""
    n_frames = torch.full((len(f0),), f0.shape[1])
    return hift.m_source(f0, phase_lines("interp", f0, n_frames), hift.m_source.mix(noise), n_frames)
