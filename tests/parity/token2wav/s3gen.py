"""The U-Net estimator of Chatterbox S3Gen (`s3gen_estimator_*`): one call, and whole solves from the file's noise."""

import torch
from torch import Tensor

from models.layers.weights import on_meta
from models.token2wav.flow.solver import time_grid
from models.token2wav.s3gen.unet import UNetConditions, UNetEstimator, config_of, solve
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

TOLERANCE = 1e-4  # the reference in float32 differs from itself in float64 by 1e-5
_SOLVE = "out.solve_n"


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("s3gen_estimator_"):
        tensors, settings = golden.tensors(stem), golden.config(stem)
        estimator = _load(tensors, settings["attention_head_dim"])
        meanflow = estimator.config.meanflow
        report.equal(stem, "mean flow", meanflow, settings["meanflow"])
        names = ("x", "mask", "mu", "t", "spks", "cond", *(["r"] if meanflow else []))
        if report.has_inputs(stem, tensors, *(f"in.{name}" for name in names)):
            mask, mu, spks, cond = (tensors[f"in.{name}"] for name in ("mask", "mu", "spks", "cond"))
            conditions = UNetConditions(mask[:, 0] > 0, mu, spks, cond)
            velocity = estimator(tensors["in.x"], conditions, tensors["in.t"], tensors["in.r"] if meanflow else None)
            report.close_if(stem, "velocity", velocity, tensors.get("out.estimator"))
        for name in sorted(name for name in tensors if name.startswith(_SOLVE)):
            inputs = [f"in.{part}" for part in ("z", "mu1", "spks1", "cond1")]
            if report.has_inputs(stem, tensors, *inputs):
                noise, mu, spks, cond = (tensors[part] for part in inputs)
                grid = time_grid(int(name.removeprefix(_SOLVE)), "linear" if meanflow else "cosine")
                mask = torch.ones(len(noise), noise.shape[2], dtype=torch.bool)
                conditions = UNetConditions(mask, mu, spks, cond)
                got = solve(estimator, noise, conditions, grid, settings["cfg_rate"])
                report.close(stem, name.removeprefix("out."), got, tensors[name], TOLERANCE)


def _load(tensors: dict[str, Tensor], head_dim: int) -> UNetEstimator:
    weights = {name.removeprefix("w."): tensor for name, tensor in tensors.items() if name.startswith("w.")}
    with on_meta():
        estimator = UNetEstimator(config_of(weights, head_dim))
    estimator.load_state_dict(weights, assign=True)
    estimator.requires_grad_(False).eval()
    estimator.derive("cpu", torch.float32)
    return estimator
