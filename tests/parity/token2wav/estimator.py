"""The flow's estimator (`estimator_*`): one call with a key mask, then two consecutive chunks.

A case has two unrelated rows at two times. Here they are the two halves of one session, in one call per time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.layers.weights import on_meta
from models.token2wav.flow.dit import CONV_TAIL, N_CONVS, DiT, DiTContext, Modulation
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.parity.token2wav.build import filled, flow_config, packed_estimator_tails, weights_under


class Called(NamedTuple):
    velocity: Tensor  # [2, T, n_mels]
    rows: Tensor  # [depth, 2 (k, v), 2, T, H, hd] new keys and values
    tails: Tensor  # [depth, 2, convs, frames, D]


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("estimator_"):
        tensors, config = golden.tensors(stem), flow_config(golden.config(stem)["config"])
        if not report.has_inputs(stem, tensors, *(f"in.{name}" for name in ("x", "mu", "spks", "cond", "t"))):
            continue
        with on_meta():
            dit = DiT(config.estimator, config.n_mels)
        dit = filled(dit, weights_under(tensors, "w."))
        report.close_if(stem, "time", dit.t_embedder(tensors["in.t"]), tensors.get("out.t_embed"))

        T = tensors["in.x"].shape[2]
        nothing = torch.zeros(config.estimator.depth, 2, 2, 0, config.estimator.heads, config.estimator.head_dim)
        tails = torch.zeros(config.estimator.depth, 2, N_CONVS, CONV_TAIL, config.estimator.width)
        if (expected := tensors.get("out.offline")) is not None and report.has_inputs(stem, tensors, "in.mask"):
            mask = tensors["in.mask"][:, 0].bool()
            got = _call(dit, tensors, "", mask, nothing, tails)
            report.close(stem, "masked", got.velocity[mask], expected.transpose(1, 2)[mask])

        first = _call(dit, tensors, "", torch.ones(2, T, dtype=torch.bool), nothing, tails)
        _compare(f"{stem} chunk 0", first, first.rows, tensors, "out.chunk0", report)
        if report.has_inputs(stem, tensors, *(f"in.{name}1" for name in ("x", "mu", "cond"))):
            mask = torch.ones(2, T + tensors["in.x1"].shape[2], dtype=torch.bool)
            second = _call(dit, tensors, "1", mask, first.rows, first.tails)
            cached = torch.cat((second.rows, first.rows), dim=3)  # newest first, as in the reference
            _compare(f"{stem} chunk 1", second, cached, tensors, "out.chunk1", report)


def _compare(
    case: str, called: Called, cached: Tensor, tensors: dict[str, Tensor], prefix: str, report: Report
) -> None:
    report.close_if(case, "velocity", called.velocity.transpose(1, 2), tensors.get(prefix))
    keys_and_values = torch.cat(cached.unbind(1), dim=-1).transpose(2, 3)
    report.close_if(case, "keys and values", keys_and_values, tensors.get(f"{prefix}_att_cache"))
    report.close_if(case, "tails", packed_estimator_tails(called.tails), tensors.get(f"{prefix}_cnn_cache"))


def _call(dit: DiT, tensors: dict[str, Tensor], suffix: str, mask: Tensor, cache: Tensor, tails: Tensor) -> Called:
    """Both rows, each at its own time; mask [2, cached + T]. All rows of `cache` are attended to."""
    x, mu, cond = (tensors[f"in.{name}{suffix}"].transpose(1, 2) for name in ("x", "mu", "cond"))
    condition = dit.condition(mu, tensors["in.spks"], cond)[: len(x)]
    rows = torch.arange(cache.shape[3])[None]
    n = mask[:, len(rows[0]) :].sum(1)
    parts = []
    for row, time in enumerate(tensors["in.t"].split(1)):
        modulation = Modulation(*(part[0] for part in dit.modulation(time)))
        context = DiTContext(condition, n, rows, mask[:, None, None])
        velocity, new, new_tails = dit(x, modulation, context, cache, tails)
        parts.append((velocity[row], new[:, :, row, 0], new_tails[:, row]))
    velocity, new, new_tails = zip(*parts, strict=True)
    return Called(torch.stack(velocity), torch.stack(new, dim=2), torch.stack(new_tails, dim=1))
