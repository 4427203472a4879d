"""The Euler solve on a GPU: matrix products and the kernels between them, nine to eleven launches per block.

Contains the order of the launches; the kernels are in `dit_kernels`. Results equal `flow_state.solve` up to rounding,
which tests verify. Intended for capture as one CUDA graph: without one, the time is spent on launches. Requires Triton.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.kernels.launch import has_large_tiles
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.dit import DiTBlock
from models.token2wav.flow.dit_kernels import StepKernels
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import ChunkSlots, FlowState, SolveInputs
from models.token2wav.flow.fused_linear import MAX_ROWS, Epilogue, LinearWeights, Norm, product

# Most rows of the products that contain norm and epilogue; LESS_ROWS with small tiles or weights of 32 bits. With more
# rows the library's products and separate norms take less time, measured on one H200.
FEW_ROWS, LESS_ROWS = MAX_ROWS, 64
_MAX_WIDTH = 1024  # a row that is normalized before a product is one tile of it
_EPS = 1e-6


class _Block(NamedTuple):
    """One block's weights in the form that its kernels read."""

    qkv: LinearWeights  # packed
    q_norm: tuple[Tensor, Tensor]  # weight, bias
    k_norm: tuple[Tensor, Tensor]
    proj: LinearWeights
    conv1: LinearWeights  # a convolution as a linear layer over windows of three frames: [D, 3 D]
    norm: tuple[Tensor, Tensor]
    conv2: LinearWeights
    fc1: LinearWeights
    fc2: LinearWeights


class FusedSolver:
    """The Euler solve of one flow. Packed weights are copied at construction; all others belong to the flow."""

    def __init__(self, flow: Flow):
        self.flow = flow
        estimator = flow.estimator
        self.blocks = [_block(block) for block in estimator.typed_blocks()]
        # Input layer without the columns of the condition, and output layer.
        self.entry = LinearWeights(estimator.in_proj.weight[:, : flow.config.n_mels].contiguous(), None)
        self.last = LinearWeights.of(estimator.final_layer.linear)
        self._is_large = has_large_tiles(flow.device) and flow.dtype.itemsize == 2

    def __call__(self, state: FlowState, slots: ChunkSlots, inputs: SolveInputs) -> Tensor:
        """Arguments and results as `flow_state.solve`."""
        flow, estimator = self.flow, self.flow.estimator
        mu, n_frames, noise, targets = inputs.mu, inputs.n_frames, inputs.noise, slots.targets
        B, T, n_mels = mu.shape
        mapping = state.dit_table.slot_mapping(slots.slots, n_frames, T, slots.width, slots.ring)
        column = mapping.n_cached[:, None] + torch.arange(T, device=mu.device)
        x = noise[column.clamp(max=len(noise) - 1)].view(B * T, n_mels)
        prompt = torch.zeros_like(mu) if inputs.prompt is None else inputs.prompt.to(mu.dtype)
        condition = estimator.condition(mu, state.speaker[slots.slots], prompt).flatten(0, 1)
        entering = x.to(flow.dtype)
        addresses = mapping._replace(cached=mapping.cached.contiguous(), fresh=mapping.fresh.contiguous())
        # A slot that is read and written in the same call needs a separate buffer for its next tails.
        places = torch.arange(B, device=mu.device) if targets is None else targets
        n_rows, most = 2 * B * T, FEW_ROWS if self._is_large else min(FEW_ROWS, LESS_ROWS)
        velocity = self._few if n_rows <= most and estimator.config.width <= _MAX_WIDTH else self._many
        for k, (step_width, modulation) in enumerate(inputs.schedule.steps):
            pool, tails = state.dit_rows[k], state.dit_tails[k]
            new_tails = tails.new_empty((B, *tails.shape[1:])) if targets is None else tails
            kernels = StepKernels(addresses, places, pool, tails, new_tails)
            out = velocity(kernels, entering, condition, modulation.blocks, modulation.final)
            kernels.euler(x, out, step_width, entering, flow.config.cfg_rate)
            if targets is None:
                tails.index_copy_(0, slots.slots, new_tails)
        state.dit_table.commit(mapping, slots.written, state.prompt[slots.slots], HISTORY_FRAMES, state.rules.dit)
        return x.view(B, T, n_mels)

    def _few(self, kernels: StepKernels, entering: Tensor, condition: Tensor, shifts: Tensor, final: Tensor) -> Tensor:
        """Velocity [2 B T, n_mels] of `entering` [B T, n_mels] for few rows; other shapes as `DiT.forward`."""
        M, D = kernels.M, kernels.width

        def empty(width: int) -> Tensor:
            return entering.new_empty(M, width)

        first = self.blocks[0]
        widths = len(first.qkv.weight), first.proj.weight.shape[1], len(first.fc1.weight)
        qkv, attended, hidden = (empty(width) for width in widths)
        windows, more_windows, added, convolved = empty(3 * D), empty(3 * D), empty(D), empty(D)
        h = product(entering, self.entry, torch.empty_like(condition), epilogue=Epilogue(base=condition))
        for block, block_shifts, layer in zip(self.blocks, shifts, range(len(shifts)), strict=True):
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m, shift_c, scale_c, gate_c = block_shifts
            product(h, block.qkv, qkv, norm=Norm(scale_a, shift_a, _EPS, 1.0))
            kernels.attend(qkv, block.q_norm, block.k_norm, attended, layer)
            product(attended, block.proj, added)
            kernels.residual_norm(h, added, gate_a, shift_c, scale_c, windows, layer)
            kernels.norm_mish(product(windows, block.conv1, convolved), *block.norm, more_windows, layer)
            product(more_windows, block.conv2, h, epilogue=Epilogue(base=h, gate=gate_c))
            product(h, block.fc1, hidden, norm=Norm(scale_m, shift_m, _EPS, 1.0), epilogue=Epilogue("gelu"))
            product(hidden, block.fc2, h, epilogue=Epilogue(base=h, gate=gate_m))
        return product(h, self.last, empty(len(self.last.weight)), norm=Norm(final[1], final[0], _EPS, 1.0))

    def _many(self, kernels: StepKernels, entering: Tensor, condition: Tensor, shifts: Tensor, final: Tensor) -> Tensor:
        """As `_few`, for any number of rows."""
        D, inner = kernels.width, kernels.heads * kernels.head_dim
        modulated = entering.new_empty(kernels.M, D)
        windows, more_windows = (entering.new_empty(kernels.M, 3 * D) for _ in range(2))
        attended = entering.new_empty(kernels.M, inner)
        added = self.entry.product(entering)
        h = kernels.residual_norm(condition, added, None, shifts[0, 0], shifts[0, 1], modulated)
        for i, block in enumerate(self.blocks):
            _, _, gate_a, shift_m, scale_m, gate_m, shift_c, scale_c, gate_c = shifts[i]
            qkv = block.qkv.product(modulated)
            kernels.attend(qkv, block.q_norm, block.k_norm, attended, i)
            kernels.residual_norm(h, block.proj.product(attended), gate_a, shift_c, scale_c, windows, i)
            kernels.norm_mish(block.conv1.product(windows), *block.norm, more_windows, i)
            kernels.residual_norm(h, block.conv2.product(more_windows), gate_c, shift_m, scale_m, modulated)
            hidden = block.fc1.product_with_gelu(modulated)
            shift, scale = final if i + 1 == len(self.blocks) else shifts[i + 1, :2]
            kernels.residual_norm(h, block.fc2.product(hidden), gate_m, shift, scale, modulated)
        return self.last.product(modulated)


def _block(block: DiTBlock) -> _Block:
    attn = block.attn
    conv1, norm, conv2 = block.conv.layers()
    return _Block(
        qkv=LinearWeights.of(attn.to_q, attn.to_k, attn.to_v),
        q_norm=(attn.q_norm.weight, attn.q_norm.bias),
        k_norm=(attn.k_norm.weight, attn.k_norm.bias),
        proj=LinearWeights.of(attn.proj),
        conv1=_over_windows(conv1),
        norm=(norm.weight, norm.bias),
        conv2=_over_windows(conv2),
        fc1=LinearWeights.of(block.mlp.fc1),
        fc2=LinearWeights.of(block.mlp.fc2),
    )


def _over_windows(conv: nn.Conv1d) -> LinearWeights:
    """The kernel [D, D, 3] as a matrix [D, 3 D], tap by tap."""
    return LinearWeights(conv.weight.transpose(1, 2).flatten(1).contiguous(), conv.bias)
