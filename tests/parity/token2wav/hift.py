"""Vocoder stages (`hift_*`): frequency, excitation, spectra and sound, each from the reference's input."""

import torch
from torch import Tensor

from models.layers.weights import assign_weights, on_meta
from models.token2wav.hift.hift import Hift
from models.token2wav.hift.source import phase_lines
from models.token2wav.load.weight_norm import fold_weight_norm
from models.token2wav.settings import SAMPLES_PER_FRAME, HiftConfig
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.parity.token2wav.noise import sine_noise

N_HARMONICS = 9


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("hift_"):
        tensors, settings = golden.tensors(stem), golden.config(stem)
        if not report.has_inputs(stem, tensors, "in.mel"):
            continue
        hift, mel = golden_hift(tensors, "w."), tensors["in.mel"]
        B, _, T = mel.shape
        noise = tensors.get("in.sine_noise")
        if noise is None:
            noise = sine_noise((B, SAMPLES_PER_FRAME * T, N_HARMONICS), settings["noise_seed"])

        n_frames = torch.full((B,), T)
        f0 = hift.f0(mel, n_frames)
        report.close_if(stem, "f0", f0, tensors.get("out.f0"), 1e-3)
        wave = hift.decode(mel, excite(hift, f0, noise)[0], n_frames)
        report.close_if(stem, "wav, end to end", wave, tensors.get("out.wav"), 5e-3)
        if (given := tensors.get("out.f0")) is not None:
            source, voiced = excite(hift, given.double(), noise)
            report.close_if(stem, "source", source[:, None], tensors.get("out.source"), 1e-3)
            if (uv := tensors.get("out.uv")) is not None:
                off = voiced[..., None] != uv.view(B, T, -1).bool()
                report.equal(stem, "voiced samples off", int(off.sum()), 0)
        if (given := tensors.get("out.source")) is not None:
            _with_source(stem, hift, given.squeeze(1), tensors, report)


def _with_source(stem: str, hift: Hift, source: Tensor, tensors: dict[str, Tensor], report: Report) -> None:
    """The stages after the excitation, from the reference's source [B, N]."""
    mel = tensors["in.mel"]
    n_frames = torch.full((len(mel),), mel.shape[2])
    stft = hift.spectral.stft(source, SAMPLES_PER_FRAME * n_frames)
    magnitude, phase = hift.spectrum(mel, tensors.get("out.source_stft", stft), n_frames)
    results = {
        "source_stft": (stft, 5e-5),
        "magnitude": (magnitude, 5e-5),
        "phase": (phase, 1e-4),  # a sine of possibly large arguments
        "wav": (hift.decode(mel, source, n_frames), 5e-5),
    }
    if "in.cache_source" in tensors:
        cached = tensors["in.cache_source"].squeeze(1)
        pasted = torch.cat((cached, source[:, cached.shape[1] :]), dim=1)
        results["wav_cached_source"] = hift.decode(mel, pasted, n_frames), 5e-5
    elif "out.wav_cached_source" in tensors:
        report.fail(stem, "input", "missing: in.cache_source")
    for name, (got, tolerance) in results.items():
        report.close_if(stem, name, got, tensors.get(f"out.{name}"), tolerance)


def golden_hift(tensors: dict[str, Tensor], prefix: str) -> Hift:
    """The vocoder with the weights under `prefix` in a golden file; their shapes determine its sizes."""
    weights = fold_weight_norm({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    base, n_mels, _ = weights["conv_pre.weight"].shape
    config = HiftConfig(n_mels=n_mels, base_channels=base, f0_channels=len(weights["f0_predictor.condnet.0.weight"]))
    with on_meta():
        hift = Hift(config)
    return assign_weights(hift, weights, "cpu", torch.float32)


def excite(hift: Hift, f0: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Excitation and voiced frames of rows without padding."""
    n_frames = torch.full((len(f0),), f0.shape[1])
    return hift.m_source(f0, phase_lines("interp", f0, n_frames), hift.m_source.mix(noise), n_frames)
