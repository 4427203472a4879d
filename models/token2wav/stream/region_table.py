"""The vocoder's table of regions: bucket sizes, example inputs and the compile targets.

Contains the inputs of every region. Does not contain sessions, nor how a region is compiled or captured
(`models.graphs.region_graphs`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from models.errors import SettingsError
from models.graphs.captured import Bucket, Example, StaticSettings
from models.graphs.region_graphs import Region, RegionTable
from models.graphs.shape_table import ShapeTable
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.conformer import ConformerLayer
from models.token2wav.flow.dit import DiTBlock
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.hift.hift import Hift, Snake
from models.token2wav.settings import FRAMES_PER_TOKEN, FlowConfig
from models.token2wav.stream import regions
from models.token2wav.stream.regions import FlowContext, HiftContext

COLUMN_STEP = 16  # attention kernels need multiples of eight columns, at token rate (half as many columns) too


@dataclass(frozen=True)
class VocoderShapes(ShapeTable):
    """Bucket sizes of the vocoder's axes."""

    # Tokens synthesized at once. The small size is for early sound and for the end of a turn with few tokens left.
    speech_tokens: tuple[int, ...] = (10, 25, 28)
    columns: tuple[int, ...] = (256, 512, 768, 1664)  # mel frames attended to, cached and new
    prompt: tuple[int, ...] = (300, 600, 1500)  # mel frames of a voice's prompt

    def __post_init__(self) -> None:
        super().__post_init__()
        least = HISTORY_FRAMES + FRAMES_PER_TOKEN * self.speech_tokens[-1]
        odd = [n for n in self.columns if n % COLUMN_STEP or n < least]
        odd += [n for n in self.prompt if n % FRAMES_PER_TOKEN]
        if odd:
            expected = f"columns in multiples of {COLUMN_STEP} from {least} on, and even prompts"
            raise SettingsError("vocoder shapes", expected=expected, got=odd)

    def fitted(self, sizes: FlowSizes) -> Self:
        """These sizes, limited to what slots of the given sizes can hold."""
        columns = columns_for(sizes.max_prompt, sizes.max_chunk)
        shapes = self.capped(speech_tokens=sizes.max_chunk, prompt=sizes.max_prompt, columns=columns)
        return shapes.capped(batch=sizes.n_sessions) if shapes.batch[-1] > sizes.n_sessions else shapes


def columns_for(n_prompt: int, n_speech_tokens: int) -> int:
    """The smallest `columns` for a chunk.

    Args:
        n_prompt: mel frames of the voice's prompt.
        n_speech_tokens: tokens that the chunk synthesizes.
    """
    return -(-(n_prompt + HISTORY_FRAMES + FRAMES_PER_TOKEN * n_speech_tokens) // COLUMN_STEP) * COLUMN_STEP


class VocoderParts(nn.Module):
    """Flow and HiFT under the names of the compile targets."""

    def __init__(self, flow: Flow, hift: Hift):
        super().__init__()
        self.flow, self.hift = flow, hift


class VocoderRegions(RegionTable):
    """All regions of the vocoder over its slots."""

    # All Euler steps share one compiled graph, from the input layer to the output of a step. HiFT runs best if compiled
    # as a whole. Smaller parts make the start shorter: single blocks, and HiFT's activation, which contains the sines.
    stacks: ClassVar = {
        "flow": ((Flow, ("euler_step",)), (ConformerLayer, ("forward",))),
        "flow.encoder": ((ConformerLayer, ("forward",)),),
        "flow.decoder.estimator": ((DiTBlock, ("forward",)),),
        "hift": ((Snake, ("forward",)),),
    }

    def __init__(self, parts: VocoderParts, flow: FlowContext, hift: HiftContext, shapes: VocoderShapes):
        """
        Args:
            parts: root of the compile targets.
            flow: what the regions `flow` and `voice` are bound to.
            hift: what the region `hift` is bound to.
            shapes: bucket sizes.
        """
        self.flow, self.hift = flow, hift
        # Regions that run on the project's own kernels.
        self.kernels = frozenset(
            name for name, backend in (("flow", flow.backend), ("hift", hift.backend)) if backend.is_fused
        )
        super().__init__(parts, _regions(flow, hift), shapes, device=parts.flow.device)

    def compile(self, names: Sequence[str] | None = None, *, by_layer: bool = False, **options: Any) -> None:
        """As `RegionTable.compile`; None = all but `voice`, which `Vocoder` always runs eagerly."""
        super().compile(self._serving() if names is None else names, by_layer=by_layer, **options)

    def warm_up(self, names: Sequence[str] | None = None) -> None:
        """As `RegionTable.warm_up`; None = all but `voice`."""
        super().warm_up(self._serving() if names is None else names)

    def capture(self, names: Sequence[str] | None = None) -> int:
        """As `RegionTable.capture`; None = all but `voice`."""
        return super().capture(self._serving() if names is None else names)

    def _serving(self) -> list[str]:
        return [name for name in self.table if name != "voice"]

    def clear_scratch(self) -> None:
        state = self.flow.state
        for table in state.tables:
            table.empty_scratch()
        self.hift.state.reset(torch.tensor([state.scratch], device=state.prompt.device))


@dataclass(frozen=True)
class _Examples:
    """Inputs of the regions at a bucket, on the scratch slot."""

    config: FlowConfig
    scratch: int
    device: torch.device
    static: StaticSettings  # settings of the flow's regions

    def slots(self, n: int) -> Tensor:
        return self._full(n, self.scratch)

    def begin(self, bucket: Bucket) -> Example:
        n = bucket["batch"]
        return (self.slots(n), self.slots(n)), {}

    def flow(self, bucket: Bucket) -> Example:
        n, count = bucket["batch"], bucket["speech_tokens"] + self.config.encoder.lookahead
        width = bucket["columns"] - FRAMES_PER_TOKEN * bucket["speech_tokens"]
        tensors = self.slots(n), self.slots(n), self._tokens(n, count), self._full(n, count), self._no(n)
        return tensors, {"width": width, **self.static}

    def hift(self, bucket: Bucket) -> Example:
        n, frames = bucket["batch"], FRAMES_PER_TOKEN * bucket["speech_tokens"]
        mel = torch.randn(n, frames, self.config.n_mels, device=self.device)
        return (self.slots(n), self.slots(n), mel, self._full(n, frames), self._no(n)), {}

    def voice(self, bucket: Bucket) -> Example:
        count, lookahead = bucket["prompt"] // FRAMES_PER_TOKEN, self.config.encoder.lookahead
        mel = torch.randn(1, bucket["prompt"], self.config.n_mels, device=self.device)
        speaker = torch.randn(1, self.config.speaker_dim, device=self.device)
        # The lookahead only, so no frames: the example must not write rows that belong to a voice.
        n_tokens = self._full(1, lookahead)
        return (
            (self.slots(1), self._full(1, 0), self._tokens(1, count + lookahead), n_tokens, mel, speaker),
            self.static,
        )

    def _full(self, n: int, value: int) -> Tensor:
        return torch.full((n,), value, dtype=torch.int64, device=self.device)

    def _no(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.bool, device=self.device)

    def _tokens(self, n: int, count: int) -> Tensor:
        return torch.randint(0, self.config.vocab_size, (n, count), device=self.device)


def _regions(flow: FlowContext, hift: HiftContext) -> Iterator[Region]:
    modules = flow.backend.flow
    steps: tuple[StaticSettings, ...] = tuple({"n_steps": n} for n in flow.schedules)
    examples = _Examples(modules.config, flow.state.scratch, modules.device, steps[0])
    states = (flow.state, hift.state)
    yield Region("begin", "state", regions.begin, states, {"batch": "batch"}, examples.begin)
    axes = {"batch": "batch", "speech_tokens": "speech_tokens", "columns": "columns"}
    yield Region("flow", "flow", regions.flow_chunk, (flow,), axes, examples.flow, steps)
    axes = {"batch": "batch", "speech_tokens": "speech_tokens"}
    yield Region("hift", "hift", regions.vocode_chunk, (hift,), axes, examples.hift)
    yield Region("voice", "flow", regions.prepare_voice, (flow,), {"prompt": "prompt"}, examples.voice, steps)
