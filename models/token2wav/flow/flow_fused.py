"""The flow on the project's own kernels: fused encoder layers and fused Euler solve.

Contains the composition only; the layers are in `conformer_fused` and the solve in `dit_fused`. Requires Triton.
"""

from typing import ClassVar

from torch import Tensor

from models.token2wav.flow.conformer_fused import FusedLayers
from models.token2wav.flow.dit_fused import FusedSolver
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import ChunkSlots, ChunkTokens, FlowState, SolveInputs, encode


class FusedFlow:
    """A `FlowBackend` of kernels. Packed weights are copied at construction; all others belong to the flow."""

    is_fused: ClassVar[bool] = True

    def __init__(self, flow: Flow):
        self.flow = flow
        self._run_layers, self._solver = FusedLayers(flow.encoder), FusedSolver(flow)

    def encode(self, state: FlowState, slots: ChunkSlots, tokens: ChunkTokens) -> Tensor:
        return encode(self.flow, state, slots, tokens, self._run_layers)

    def solve(self, state: FlowState, slots: ChunkSlots, inputs: SolveInputs) -> Tensor:
        return self._solver(state, slots, inputs)
