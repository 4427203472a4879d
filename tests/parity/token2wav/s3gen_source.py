"""The older excitation (`s3gen_source_*`): phase accumulated per sample, with a start phase for each harmonic."""

import torch

from models.layers.weights import assign_weights, on_meta
from models.token2wav.hift.source import HarmonicSource, phase_lines
from models.token2wav.settings import SAMPLES_PER_FRAME
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.parity.token2wav.hift import N_HARMONICS
from tests.parity.token2wav.noise import sine_noise


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("s3gen_source_"):
        tensors = golden.tensors(stem)
        if not report.has_inputs(stem, tensors, "in.f0_frames", "in.phase"):
            continue
        with on_meta():
            source = HarmonicSource()
        weights = {name.removeprefix("w."): tensor for name, tensor in tensors.items() if name.startswith("w.")}
        assign_weights(source, weights, "cpu", torch.float32)
        f0 = tensors["in.f0_frames"].double()
        B, T = f0.shape
        noise, n_frames = tensors.get("in.noise"), torch.full((B,), T)
        if noise is None:
            noise = sine_noise((B, N_HARMONICS, SAMPLES_PER_FRAME * T), golden.config(stem)["seed"])
        lines = phase_lines("cumsum", f0, n_frames, tensors["in.phase"].squeeze(-1))
        wave, voiced = source(f0, lines, source.mix(noise.transpose(1, 2)), n_frames)
        report.close_if(stem, "source", wave[..., None], tensors.get("out.source"), 1e-3)
        if (uv := tensors.get("out.uv")) is not None:
            off = voiced[..., None] != uv.view(B, T, -1).bool()
            report.equal(stem, "voiced samples off", int(off.sum()), 0)
