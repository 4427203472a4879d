"""The omni model's table of regions: sizes, example inputs and the repeated layers.

Contains every region's inputs. Does not contain sessions, compilation or capture (`models.graphs`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from models.graphs.captured import Bucket, Example, StaticSettings
from models.graphs.region_graphs import Region, RegionTable
from models.graphs.shape_table import ShapeTable
from models.graphs.shared_function import SharedFunction
from models.inputs.audio import UNIT_COLUMNS, LogMel
from models.inputs.audio_sizes import UNIT_SAMPLES
from models.layers import speech_loop
from models.layers.apm import UNIT_ROWS, AudioLayer
from models.layers.resampler import Resampler
from models.layers.transformer import DecoderLayer
from models.layers.vpm import VisionLayer
from models.omni import OmniModel
from models.sampling.text import TokenSets
from models.stages import regions
from models.stages.state import SlotState

FED_AT_ONCE = 6144  # rows of one prefill over all slots: units of every slot, or long prompts of a few slots
EVICTED_AT_ONCE = 4  # slots of one eviction, which without the kernels copies each slot's cache
# Speech tokens drawn by one call of `speech_step`: one, a slice, and a part of what a window of sound still needs. A
# graph of more tokens saves a few launches of graphs, and takes a tenth of a second to capture for each batch size.
SPEECH_STEPS = (1, 5, 6)


@dataclass(frozen=True)
class Shapes(ShapeTable):
    """Sizes of the omni model's axes."""

    slices: tuple[int, ...] = (1, 2, 4, 8, 10)  # image slices encoded at once
    patches: tuple[int, ...] = (1088, 4096)  # the first size holds every ordinary frame
    clip_frames: tuple[int, ...] = (200, 1000, 3000)
    samples: tuple[int, ...] = (16640,)  # of a unit, the longer first one included
    # LLM rows fed at once: a unit of sound, one with a picture, the same after another unit, two pictures, prompts.
    rows: tuple[int, ...] = (16, 80, 96, 160, 512)
    kv: tuple[int, ...] = (512, 2048, 8192)  # LLM cache rows read
    spoken: tuple[int, ...] = (24, 64)  # text tokens of a unit spoken at once
    tokens: tuple[int, ...] = (24, 256, 1024)  # text tokens of an answer spoken at once
    speech_kv: tuple[int, ...] = (512, 4096)

    def max_slices(self, n_patches: int) -> int:
        """Largest number of slices of `n_patches` (a size of `patches`) that one call encodes."""
        most = self.slices[-1] * self.patches[0]
        return max([size for size in self.slices if size * n_patches <= most], default=self.slices[0])

    def max_prefill_batch(self, n_rows: int) -> int:
        """Largest number of slots in one prefill of `n_rows` rows each."""
        return max([size for size in self.batch if size * n_rows <= FED_AT_ONCE], default=self.batch[0])


class Regions(RegionTable):
    """All regions of the omni model over its slots."""

    stacks: ClassVar = {
        "vpm": ((VisionLayer, ("forward",)),),
        "resampler": ((Resampler, ("forward",)),),
        "apm": ((AudioLayer, ("forward", "stream")),),
        "llm.model": ((DecoderLayer, ("forward",)),),
        "tts.model": ((DecoderLayer, ("forward",)),),
    }

    def __init__(self, model: OmniModel, state: SlotState, log_mel: LogMel, sets: TokenSets, shapes: Shapes):
        # Sampling is hundreds of small operations: eager between compiled layers, it would take longer than they do.
        functions: dict[str, SharedFunction[..., Tensor]] = {
            "choose": SharedFunction(regions.choose),
            "draw": SharedFunction(speech_loop.draw_speech_tokens),
        }
        table = _table(_TableInputs(model, state, log_mel, sets, shapes, functions))
        super().__init__(model, table, shapes, functions, device=model.device)
        self.model, self.state = model, state

    def clear_scratch(self) -> None:
        """Empty the scratch slot."""
        self.state.reset(torch.tensor([self.state.scratch], device=self.state.llm.lengths.device))


def _fits(shapes: Shapes, axis: str, bucket: Bucket) -> bool:
    """Whether the table has this prefill bucket: not both a large batch and many rows."""
    return bucket["batch"] <= shapes.max_prefill_batch(bucket[axis])


def _fits_vision(shapes: Shapes, bucket: Bucket) -> bool:
    """Whether the table has this vision bucket: not both many slices and long ones."""
    return bucket["slices"] <= shapes.max_slices(bucket["patches"])


def _fits_eviction(smallest_batch: int, bucket: Bucket) -> bool:
    return bucket["batch"] <= max(smallest_batch, EVICTED_AT_ONCE)


@dataclass(frozen=True)
class _TableInputs:
    """What the regions are bound to."""

    model: OmniModel
    state: SlotState
    log_mel: LogMel
    sets: TokenSets
    shapes: Shapes
    functions: dict[str, SharedFunction[..., Tensor]]


def _table(given: _TableInputs) -> Iterator[Region]:
    """The rows of the table. Example inputs are random: zeros would hide unwritten outputs and run faster."""
    model, state, shapes, functions = given.model, given.state, given.shapes, given.functions
    config, device = model.config, model.device
    width, patch = config.hidden_size, config.vision_config.patch_size

    def scratch(n: int) -> Tensor:
        return torch.full((n,), state.scratch, device=device)

    def full(n: int, value: int) -> Tensor:
        return torch.full((n,), value, dtype=torch.int64, device=device)

    def yes(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool, device=device)

    def noise(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def vision_example(b: Bucket) -> Example:
        n, length = b["slices"], b["patches"]
        pixels = torch.randint(0, 256, (n, length, 3 * patch * patch), dtype=torch.uint8, device=device)
        ids = torch.randint(0, config.vision_config.table_side**2, (n, length), device=device)
        coords = torch.randint(0, config.vision_config.table_side, (n, length, 2), device=device)
        return (pixels, ids, coords, yes(n, length)), {}

    if config.init_vision:
        axes = {"slices": "slices", "patches": "patches"}
        few = partial(_fits_vision, shapes)
        yield Region("vision", "vpm, resampler", regions.vision, (model,), axes, vision_example, has=few)

    def clips_example(b: Bucket) -> Example:
        n, frames = b["batch"], b["frames"]
        mel = noise(n, config.audio_config.num_mel_bins, frames, dtype=torch.float32)
        chunk = int(config.audio_chunk_length * UNIT_ROWS)
        return (mel, full(n, frames), full(n, (frames + 1) // 2)), {"chunk": chunk}

    def mel_example(b: Bucket) -> Example:
        n = b["batch"]
        samples = 0.1 * noise(n, b["samples"], dtype=torch.float32)
        n_new = full(n, min(UNIT_SAMPLES, b["samples"]))
        return (scratch(n), samples, n_new, yes(n), ~yes(n)), {"redundancy": 2, "clip": "auto"}

    def audio_example(b: Bucket) -> Example:
        n = b["batch"]
        mel = noise(n, config.audio_config.num_mel_bins, UNIT_COLUMNS, dtype=torch.float32)
        return (scratch(n), mel, full(n, 0), full(n, UNIT_COLUMNS)), {}

    def overlap_example(b: Bucket) -> Example:
        return (scratch(b["batch"]), yes(b["batch"])), {}

    if config.init_audio:
        yield Region(
            "clips", "apm", regions.clips, (model,), {"batch": "batch", "frames": "clip_frames"}, clips_example
        )
        axes = {"batch": "batch", "samples": "samples"}
        yield Region("mel_unit", "apm", regions.mel_unit, (given.log_mel, state), axes, mel_example)
        yield Region("audio_unit", "apm", regions.audio_unit, (model, state), {"batch": "batch"}, audio_example)
        yield Region("audio_overlap", "apm", regions.audio_overlap, (model, state), {"batch": "batch"}, overlap_example)

    def prefill_example(b: Bucket) -> Example:
        n, rows = b["batch"], b["rows"]
        ids = torch.randint(0, config.vocab_size, (n, rows), device=device)
        is_row = torch.rand(n, rows, device=device) < 0.5
        return (scratch(n), ids, noise(n, rows, width), is_row, full(n, rows), yes(n)), {"kv_len": b["kv"]}

    def step_example(b: Bucket) -> Example:
        n = b["batch"]
        ids = torch.randint(0, config.vocab_size, (n,), device=device)
        return (scratch(n), ids, yes(n), full(n, 0), yes(n)), {"kv_len": b["kv"]}

    def evict_example(b: Bucket) -> Example:
        n = b["batch"]
        return (scratch(n), full(n, 0), full(n, 0)), {"rotates": True}

    axes = {"batch": "batch", "rows": "rows", "kv": "kv"}
    few = partial(_fits, shapes, "rows")
    bound = (model, state, given.sets, functions["choose"])
    yield Region("unit_prefill", "llm.model, choose", regions.unit_prefill, bound, axes, prefill_example, has=few)
    axes = {"batch": "batch", "kv": "kv"}
    yield Region("unit_step", "llm.model, choose", regions.unit_step, bound, axes, step_example)
    variants: tuple[StaticSettings, ...] = ({"rotates": True}, {"rotates": False})
    axes, some = {"batch": "batch"}, partial(_fits_eviction, shapes.batch[0])
    yield Region("llm_evict", "llm.model", regions.llm_evict, (model, state), axes, evict_example, variants, some)

    def reset_example(b: Bucket) -> Example:
        return (scratch(b["batch"]),), {}

    yield Region("reset", "state", regions.reset, (state,), {"batch": "batch"}, reset_example)

    def spoken_example(b: Bucket) -> Example:
        n, tokens = b["batch"], b["spoken"]
        ids = torch.randint(0, config.tts_config.num_text_tokens, (n, tokens), device=device)
        return (scratch(n), ids, full(n, tokens), ~yes(n)), {}

    def begin_example(b: Bucket) -> Example:
        n, rows = b["batch"], b["tokens"] + 2
        hidden = noise(n, rows, config.tts_config.hidden_size)
        return (scratch(n), hidden, full(n, rows), full(n, 26), full(n, 26)), {"kv_len": b["kv"]}

    def speech_step_example(b: Bucket) -> Example:
        return (scratch(b["batch"]),), {"kv_len": b["kv"], "n_steps": 1}

    if config.init_tts:
        axes = {"batch": "batch", "spoken": "spoken"}
        yield Region("spoken_rows", "tts", regions.spoken_rows, (model, state), axes, spoken_example)
        axes = {"batch": "batch", "tokens": "tokens", "kv": "speech_kv"}
        draws = (model, state, functions["draw"])
        few = partial(_fits, shapes, "tokens")
        yield Region("speech_begin", "tts.model, draw", regions.speech_begin, draws, axes, begin_example, has=few)
        axes = {"batch": "batch", "kv": "speech_kv"}
        loops: tuple[StaticSettings, ...] = tuple({"n_steps": n_steps} for n_steps in SPEECH_STEPS)
        yield Region("speech_step", "tts.model, draw", regions.speech_step, draws, axes, speech_step_example, loops)
