"""How the flow runs: the interface of its two backends, and the plain one.

Contains the modules' own implementation. The fused backend, which needs Triton, is in `flow_fused`. Does not contain
the choice between the two (`token2wav.backends`).
"""

from typing import ClassVar, Protocol

from torch import Tensor

from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import ChunkSlots, ChunkTokens, FlowState, SolveInputs, encode, solve


class FlowBackend(Protocol):
    """Speech tokens to mel over slots, by one flow's weights."""

    is_fused: ClassVar[bool]  # runs on the project's own kernels

    @property
    def flow(self) -> Flow:
        """The modules whose weights are used."""

    def encode(self, state: FlowState, slots: ChunkSlots, tokens: ChunkTokens) -> Tensor:
        """As `flow_state.encode`."""

    def solve(self, state: FlowState, slots: ChunkSlots, inputs: SolveInputs) -> Tensor:
        """As `flow_state.solve`."""


class PlainFlow:
    """Runs the modules as they are."""

    is_fused: ClassVar[bool] = False

    def __init__(self, flow: Flow):
        self.flow = flow

    def encode(self, state: FlowState, slots: ChunkSlots, tokens: ChunkTokens) -> Tensor:
        return encode(self.flow, state, slots, tokens)

    def solve(self, state: FlowState, slots: ChunkSlots, inputs: SolveInputs) -> Tensor:
        return solve(self.flow, state, slots, inputs)
