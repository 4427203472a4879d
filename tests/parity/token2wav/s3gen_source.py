"""The older excitation (`s3gen_source_*`): phase summed up sample by sample, a start phase for each harmonic."""

import torch

from models.token2wav.source import HarmonicSource, phase_lines
from models.weights import assign_weights
from tests.parity.golden import GoldenDir
from tests.parity.report import Report


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("s3gen_source_"):
        tensors = golden.tensors(stem)
        if not report.has_inputs(stem, tensors, "in.f0_frames", "in.noise", "in.phase"):
            continue
        with torch.device("meta"):
            source = HarmonicSource()
        weights = {name.removeprefix("w."): tensor for name, tensor in tensors.items() if name.startswith("w.")}
        assign_weights(source, weights, "cpu", torch.float32)
        f0 = tensors["in.f0_frames"].double()
        n_frames = torch.full((len(f0),), f0.shape[1])
        lines = phase_lines("cumsum", f0, n_frames, tensors["in.phase"].squeeze(-1))
        wave, voiced = source(f0, lines, source.mix(tensors["in.noise"].transpose(1, 2)), n_frames)
        if (expected := tensors.get("out.source")) is not None:
            report.close(stem, "source", wave, expected.squeeze(-1), 1e-3)
        if (uv := tensors.get("out.uv")) is not None:
            off = voiced[..., None] != uv.view(*f0.shape, -1).bool()
            report.equal(stem, "voiced samples off", int(off.sum()), 0)
