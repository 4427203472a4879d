"""The vocoder's table of regions: sizes, examples and what compiles as one piece.

Knows every region's inputs. Does not know sessions, nor how a region is compiled or captured
(`models.graphs.region_graphs`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from models.errors import SettingsError
from models.graphs.captured import Bucket
from models.graphs.region_graphs import Region, RegionTable, ShapeTable
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.conformer import ConformerLayer, RunLayers
from models.token2wav.flow.dit import DiTBlock
from models.token2wav.flow.flow import Flow, Schedule
from models.token2wav.flow.flow_state import FlowSizes, FlowState, solve
from models.token2wav.hift.hift import Hift, Snake
from models.token2wav.settings import FRAMES_PER_TOKEN
from models.token2wav.stream import regions as stages
from models.token2wav.stream.vocode import VocodeRules, VocodeState

if TYPE_CHECKING:
    from models.token2wav.hift.hift_fused import FusedHift
    from models.token2wav.stream.fused_choice import FusedFlow

COLUMN_STEP = 16  # attention kernels want their columns in multiples of eight, at code rate too


@dataclass(frozen=True)
class VocoderShapes(ShapeTable):
    """Sizes of the vocoder's axes."""

    speech_tokens: tuple[int, ...] = (
        10,
        25,
        28,
    )  # codes voiced at once; few where sound should leave early, and at the end
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
        """The same up to what slots of these sizes can hold, and no further."""
        columns = columns_for(sizes.max_prompt, sizes.max_chunk)
        shapes = self.capped(speech_tokens=sizes.max_chunk, prompt=sizes.max_prompt, columns=columns)
        return shapes.capped(batch=sizes.n_sessions) if shapes.batch[-1] > sizes.n_sessions else shapes


def columns_for(n_prompt: int, n_speech_tokens: int) -> int:
    """The least size of `columns` that holds everything a chunk of `n_speech_tokens` sees after `n_prompt` mel
    frames.
    """
    return -(-(n_prompt + HISTORY_FRAMES + FRAMES_PER_TOKEN * n_speech_tokens) // COLUMN_STEP) * COLUMN_STEP


class VocoderParts(nn.Module):
    """Flow and HiFT under the names that compile targets use."""

    def __init__(self, flow: Flow, hift: Hift):
        super().__init__()
        self.flow, self.hift = flow, hift


class VocoderRegions(RegionTable):
    """Every region of the vocoder over its slots."""

    # One Euler step serves all of them; a step is one graph from its input layer to its output. HiFT is best compiled
    # whole. For a short start there are smaller parts: single blocks, and HiFT's activation, which holds the sines.
    stacks: ClassVar = {
        "flow": ((Flow, ("euler_step",)), (ConformerLayer, ("forward",))),
        "flow.encoder": ((ConformerLayer, ("forward",)),),
        "flow.decoder.estimator": ((DiTBlock, ("forward",)),),
        "hift": ((Snake, ("forward",)),),
    }

    def __init__(
        self,
        parts: VocoderParts,
        flow_state: FlowState,
        vocode_state: VocodeState,
        schedules: dict[int, Schedule],
        noise: Tensor,
        rules: VocodeRules,
        shapes: VocoderShapes,
        flow: "FusedFlow | None" = None,
        hift: "FusedHift | None" = None,
    ):
        """flow, hift: what takes the place of the plain ones for speech; `kernels` names the regions that have it."""
        self.flow_state, self.vocode_state = flow_state, vocode_state
        self.kernels = frozenset(name for name, fused in (("flow", flow), ("hift", hift)) if fused is not None)
        solver = partial(solve, parts.flow) if flow is None else flow.solver
        run, hift = flow and flow.layers, hift or parts.hift
        rows = _table(parts.flow, hift, flow_state, vocode_state, schedules, noise, rules, solver, run)
        super().__init__(parts, rows, shapes, device=parts.flow.device)

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
        scratch = torch.tensor([self.flow_state.scratch], device=self.root.flow.device)
        for views in (self.flow_state.code, self.flow_state.mel, self.flow_state.dit):
            views.empty_scratch()
        self.vocode_state.reset(scratch)


def _table(
    flow: Flow,
    hift: "Hift | FusedHift",
    state: FlowState,
    vocode_state: VocodeState,
    schedules: dict[int, Schedule],
    noise: Tensor,
    rules: VocodeRules,
    solver: stages.Solver,
    run: RunLayers | None,
) -> Iterator[Region]:
    config, device = flow.config, flow.device
    lookahead = config.encoder.lookahead
    steps = tuple({"n_steps": n} for n in schedules)

    def scratch(n: int) -> Tensor:
        return torch.full((n,), state.scratch, device=device)

    def full(n: int, value: int) -> Tensor:
        return torch.full((n,), value, dtype=torch.int64, device=device)

    def no(n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.bool, device=device)

    def speech_tokens(n: int, count: int) -> Tensor:
        return torch.randint(0, config.vocab_size, (n, count), device=device)

    def begin_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (scratch(b["batch"]), scratch(b["batch"])), {}

    bound = (state, vocode_state)
    yield Region("begin", "state", stages.begin, bound, {"batch": "batch"}, begin_example)

    def flow_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n, count = b["batch"], b["speech_tokens"] + lookahead
        width = b["columns"] - FRAMES_PER_TOKEN * b["speech_tokens"]
        return (scratch(n), scratch(n), speech_tokens(n, count), full(n, count), no(n)), {"width": width, **steps[0]}

    bound = (flow, run, solver, state, schedules, noise)
    axes = {"batch": "batch", "speech_tokens": "speech_tokens", "columns": "columns"}
    yield Region("flow", "flow", stages.flow_chunk, bound, axes, flow_example, steps)

    def hift_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n, frames = b["batch"], FRAMES_PER_TOKEN * b["speech_tokens"]
        mel = torch.randn(n, frames, config.n_mels, device=device)
        return (scratch(n), scratch(n), mel, full(n, frames), no(n)), {"rules": rules}

    axes = {"batch": "batch", "speech_tokens": "speech_tokens"}
    yield Region("hift", "hift", stages.vocode_chunk, (hift, vocode_state), axes, hift_example)

    def voice_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        count = b["prompt"] // FRAMES_PER_TOKEN
        mel = torch.randn(1, b["prompt"], config.n_mels, device=device)
        speaker = torch.randn(1, config.speaker_dim, device=device)
        # No frames of its own: the example must not write to rows that belong to a voice.
        return (scratch(1), full(1, 0), speech_tokens(1, count + lookahead), full(1, lookahead), mel, speaker), steps[0]

    bound = (flow, solver, state, schedules, noise)
    yield Region("voice", "flow", stages.prepare_voice, bound, {"prompt": "prompt"}, voice_example, steps)
