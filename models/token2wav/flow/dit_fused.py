"""The Euler solve as it runs on a GPU: matrix products and the kernels between them, nine to eleven launches a block.

Knows weights and order. Computes what `flow_state.solve` computes, to rounding: tests hold the two against each other.
Made to be captured as one CUDA graph; without one, launching it is what takes the time.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.dit import DiTBlock
from models.token2wav.flow.dit_kernels import StepKernels
from models.token2wav.flow.flow import Flow, Schedule
from models.token2wav.flow.flow_state import FlowState
from models.token2wav.flow.fused_linear import Norm, product

FEW_ROWS = 64  # measured on one H200: with a hundred, the library's products and separate norms are faster
_MAX_WIDTH = 1024  # a row that is normed before a product is one tile of it
_EPS = 1e-6


class _Block(NamedTuple):
    """One block's weights as its products take them."""

    qkv: tuple[Tensor, Tensor]
    q_norm: tuple[Tensor, Tensor]
    k_norm: tuple[Tensor, Tensor]
    proj: tuple[Tensor, Tensor]
    first: tuple[Tensor, Tensor]  # convolutions over windows of three frames: [D, 3 D]
    norm: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]
    fc1: tuple[Tensor, Tensor]
    fc2: tuple[Tensor, Tensor]


class FusedSolver:
    """Solves for one flow. Weights of joined products are copied once; all others are the flow's own."""

    def __init__(self, flow: Flow):
        self.flow = flow
        estimator = flow.decoder.estimator
        self.blocks = [_block(block) for block in estimator.blocks]
        self.entry = estimator.in_proj.weight[:, : flow.config.n_mels].contiguous()

    def __call__(
        self,
        state: FlowState,
        schedule: Schedule,
        noise: Tensor,
        slots: Tensor,
        mu: Tensor,
        n_frames: Tensor,
        width: int,
        prompt: Tensor | None = None,
        ring: int | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Shapes and effects as `flow_state.solve`."""
        flow, estimator = self.flow, self.flow.decoder.estimator
        B, T, n_mels = mu.shape
        plan = state.dit.plan(slots, n_frames, T, width, ring)
        column = plan.n_cached[:, None] + torch.arange(T, device=mu.device)
        x = noise[column.clamp(max=len(noise) - 1)].view(B * T, n_mels)
        prompt = torch.zeros_like(mu) if prompt is None else prompt.to(mu.dtype)
        condition = estimator.condition(mu, state.speaker[slots], prompt).flatten(0, 1)
        entering = x.to(flow.dtype)
        cached, fresh = plan.cached.contiguous(), plan.fresh.contiguous()
        # A slot that is written while it is read needs a place for what comes next.
        places = torch.arange(B, device=mu.device) if targets is None else targets
        velocity = self._few if 2 * B * T <= FEW_ROWS and estimator.config.width <= _MAX_WIDTH else self._many
        for k, (step_width, modulation) in enumerate(schedule.steps):
            pool, tails = state.dit_rows[k], state.dit_tails[k]
            new_tails = tails.new_empty((B, *tails.shape[1:])) if targets is None else tails
            kernels = StepKernels(slots, places, cached, plan.n_cached, fresh, n_frames, pool, tails, new_tails)
            out = velocity(kernels, entering, condition, modulation.blocks, modulation.final)
            kernels.euler(x, out, step_width, entering, flow.config.cfg_rate)
            if targets is None:
                tails.index_copy_(0, slots, new_tails)
        targets = slots if targets is None else targets
        state.dit.commit(plan, targets, state.prompt[slots], HISTORY_FRAMES, state.rules.dit)
        return x.view(B, T, n_mels)

    def _few(self, kernels: StepKernels, entering: Tensor, condition: Tensor, shifts: Tensor, final: Tensor) -> Tensor:
        """[B T, n_mels] entering -> [2 B T, n_mels] for few rows; shapes of the rest as `DiT.forward`."""
        M, D = kernels.M, kernels.width

        def empty(width: int) -> Tensor:
            return entering.new_empty(M, width)

        first = self.blocks[0]
        qkv, attended, hidden = (empty(len(weight)) for weight in (first.qkv[0], first.proj[0].T, first.fc1[0]))
        windows, more_windows, added, convolved = empty(3 * D), empty(3 * D), empty(D), empty(D)
        h = product(entering, self.entry, None, torch.empty_like(condition), base=condition)
        for block, kept, layer in zip(self.blocks, shifts, range(len(shifts)), strict=True):
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m, shift_c, scale_c, gate_c = kept
            product(h, *block.qkv, qkv, norm=Norm(scale_a, shift_a, _EPS, 1.0))
            kernels.attend(qkv, block.q_norm, block.k_norm, attended, layer)
            product(attended, *block.proj, added)
            kernels.residual_norm(h, added, gate_a, shift_c, scale_c, windows, layer)
            kernels.norm_mish(product(windows, *block.first, convolved), *block.norm, more_windows, layer)
            product(more_windows, *block.second, h, base=h, gate=gate_c)
            product(h, *block.fc1, hidden, norm=Norm(scale_m, shift_m, _EPS, 1.0), activation="gelu")
            product(hidden, *block.fc2, h, base=h, gate=gate_m)
        last = self.flow.decoder.estimator.final_layer.linear
        return product(h, *_pair(last), empty(len(last.weight)), norm=Norm(final[1], final[0], _EPS, 1.0))

    def _many(self, kernels: StepKernels, entering: Tensor, condition: Tensor, shifts: Tensor, final: Tensor) -> Tensor:
        """As `_few` for any number of rows."""
        estimator, D = self.flow.decoder.estimator, kernels.width
        inner = kernels.heads * kernels.head_dim
        modulated = entering.new_empty(kernels.M, D)
        windows, more_windows = (entering.new_empty(kernels.M, 3 * D) for _ in range(2))
        attended = entering.new_empty(kernels.M, inner)
        added = F.linear(entering, self.entry)
        h = kernels.residual_norm(condition, added, None, shifts[0, 0], shifts[0, 1], modulated)
        for i, block in enumerate(self.blocks):
            _, _, gate_a, shift_m, scale_m, gate_m, shift_c, scale_c, gate_c = shifts[i]
            qkv = F.linear(modulated, *block.qkv)
            kernels.attend(qkv, block.q_norm, block.k_norm, attended, i)
            kernels.residual_norm(h, F.linear(attended, *block.proj), gate_a, shift_c, scale_c, windows, i)
            kernels.norm_mish(F.linear(windows, *block.first), *block.norm, more_windows, i)
            kernels.residual_norm(h, F.linear(more_windows, *block.second), gate_c, shift_m, scale_m, modulated)
            weight, bias = block.fc1
            # The product's own epilogue, tanh approximation, saves a launch.
            hidden = torch._addmm_activation(bias, modulated, weight.T, use_gelu=True)
            shift, scale = final if i + 1 == len(self.blocks) else shifts[i + 1, :2]
            kernels.residual_norm(h, F.linear(hidden, *block.fc2), gate_m, shift, scale, modulated)
        return F.linear(modulated, estimator.final_layer.linear.weight, estimator.final_layer.linear.bias)


def _block(block: DiTBlock) -> _Block:
    attn, conv = block.attn, block.conv.block
    joined = (attn.to_q, attn.to_k, attn.to_v)
    return _Block(
        qkv=(torch.cat([part.weight for part in joined]), torch.cat([part.bias for part in joined])),
        q_norm=_pair(attn.q_norm),
        k_norm=_pair(attn.k_norm),
        proj=_pair(attn.proj),
        first=(_over_windows(conv["1"]), conv["1"].bias),
        norm=_pair(conv["3"]),
        second=(_over_windows(conv["6"]), conv["6"].bias),
        fc1=_pair(block.mlp.fc1),
        fc2=_pair(block.mlp.fc2),
    )


def _pair(layer: nn.Linear | nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias


def _over_windows(conv: nn.Conv1d) -> Tensor:
    """[D, D, 3] -> [D, 3 D], tap by tap."""
    return conv.weight.transpose(1, 2).flatten(1).contiguous()
