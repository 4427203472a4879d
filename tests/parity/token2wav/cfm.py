"""The flow's solver (`cfm_*`): time grid, whole solves with two numbers of steps, chunks, the caches of each step."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import REFERENCE_FLOW, ChunkSlots, FlowSizes, FlowState, SolveInputs, solve
from models.token2wav.flow.solver import time_grid
from models.token2wav.settings import EncoderConfig
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.parity.token2wav.build import flow_around, flow_config, packed_estimator_tails, seen_rows, weights_under

NO_ENCODER = EncoderConfig(width=2, heads=1, inner=1, n_layers=1, n_up_layers=1)
_OFFLINE = "out.offline_n"


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("cfm_"):
        tensors, settings = golden.tensors(stem), golden.config(stem)
        if not report.has_inputs(stem, tensors, "in.rand_noise", "in.spks"):
            continue
        sizes = {"encoder": NO_ENCODER, "cfg_rate": settings["cfg_rate"]}
        config = flow_config(settings["config"]).model_copy(update=sizes)
        weights = {f"decoder.{name}": weight for name, weight in weights_under(tensors, "w.").items()}
        flow, noise = flow_around(config, weights), tensors["in.rand_noise"][0].T.contiguous()
        report.close_if(stem, "time grid", time_grid(settings["n_timesteps"]), tensors.get("out.t_span"))
        _offline(stem, flow, tensors, noise, report)
        _chunks(stem, flow, tensors, noise, settings, report)


def _offline(stem: str, flow: Flow, tensors: dict[str, Tensor], noise: Tensor, report: Report) -> None:
    if not report.has_inputs(stem, tensors, "in.off_mu", "in.off_cond"):
        return
    mu, prompt = (tensors[f"in.off_{name}"].transpose(1, 2) for name in ("mu", "cond"))
    n_frames = torch.tensor([mu.shape[1]])
    for name in sorted(name for name in tensors if name.startswith(_OFFLINE)):
        schedule = flow.schedule(int(name.removeprefix(_OFFLINE)))
        mel = flow.solve_offline(mu, n_frames, prompt, tensors["in.spks"], noise[None, : mu.shape[1]], schedule)
        report.close(stem, name.removeprefix("out."), mel.transpose(1, 2), tensors[name])


def _chunks(
    stem: str, flow: Flow, tensors: dict[str, Tensor], noise: Tensor, settings: dict[str, Any], report: Report
) -> None:
    """The first chunk is the prompt with its mel; the others have no prompt mel."""
    n_steps, n_chunks = settings["n_timesteps"], 1 + len(settings["chunks"])
    if not report.has_inputs(
        stem, tensors, *(f"in.chunk{i}_{name}" for i in range(n_chunks) for name in ("mu", "cond"))
    ):
        return
    lengths = [tensors[f"in.chunk{i}_mu"].shape[2] for i in range(n_chunks)]
    bucket, total = max(lengths) + 4, 2 * sum(lengths)
    sizes = FlowSizes(n_sessions=1, n_voices=1, max_steps=n_steps, max_chunk=bucket, max_prompt=total, voice_frames=2)
    state, schedule, slots = FlowState(flow, sizes, REFERENCE_FLOW), flow.schedule(n_steps), torch.tensor([0])
    state.prompt.fill_(total)  # longer than the turn, so nothing is trimmed
    state.speaker[0] = tensors["in.spks"][0]
    for i, n in enumerate(lengths):
        mu, prompt = (
            F.pad(tensors[f"in.chunk{i}_{name}"].transpose(1, 2), (0, 0, 0, bucket - n)) for name in ("mu", "cond")
        )
        inputs = SolveInputs(schedule, noise, mu, torch.tensor([n]), prompt)
        mel = solve(flow, state, ChunkSlots(slots, sum(lengths)), inputs)
        case = f"{stem} chunk {i}"
        report.close_if(case, "mel", mel[:, :n].transpose(1, 2), tensors.get(f"out.chunk{i}"))
        rows = torch.stack([seen_rows(rows, state.dit_table, 0) for rows in state.dit_rows])
        report.close_if(case, "keys and values", rows, tensors.get(f"out.chunk{i}_att_cache"))
        tails = packed_estimator_tails(torch.stack([tails[0] for tails in state.dit_tails]))
        report.close_if(case, "tails", tails, tensors.get(f"out.chunk{i}_cnn_cache"))
