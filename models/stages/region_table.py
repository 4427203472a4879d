"""The omni model's table of regions: sizes, examples and which layers repeat.

Knows every region's inputs. Does not know sessions, nor how a region is compiled or captured (`graphs`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.graphs.captured import Bucket
from models.graphs.region_graphs import Region, RegionTable, ShapeTable, SharedFunction
from models.inputs.audio import UNIT_COLUMNS, LogMel
from models.inputs.audio_sizes import UNIT_SAMPLES
from models.layers import speech_loop as speech
from models.layers.apm import UNIT_ROWS, AudioLayer
from models.layers.resampler import Resampler
from models.layers.transformer import DecoderLayer
from models.layers.vpm import VisionLayer
from models.omni import OmniModel
from models.sampling.text import TokenSets
from models.stages import regions as stages
from models.stages.state import SlotState

FED_AT_ONCE = 6144  # rows of one prefill, over all slots: units of as many as there may be, long prompts of a few
EVICTED_AT_ONCE = 4  # slots; each is copied
# Codes drawn by one call of `speech_step`: one, a slice, early sound, the rest of a second.
SPEECH_STEPS = (1, 5, 9, 16)


@dataclass(frozen=True)
class Shapes(ShapeTable):
    """Sizes of the omni model's axes."""

    slices: tuple[int, ...] = (1, 2, 4, 10)  # image slices encoded at once
    patches: tuple[int, ...] = (1088, 4096)  # the first holds every ordinary frame
    clip_frames: tuple[int, ...] = (200, 1000, 3000)
    samples: tuple[int, ...] = (16640,)  # a unit's sound, the longer first one included
    rows: tuple[int, ...] = (16, 96, 512)  # LLM rows fed at once
    kv: tuple[int, ...] = (512, 2048, 8192)  # LLM context looked at
    spoken: tuple[int, ...] = (24, 64)  # text tokens of a unit spoken at once
    tokens: tuple[int, ...] = (24, 256, 1024)  # text tokens of an answer spoken at once
    speech_kv: tuple[int, ...] = (512, 4096)

    def most_seen(self, n_patches: int) -> int:
        """Slices of `n_patches` (one of `patches`) each that are encoded at once."""
        most = self.slices[-1] * self.patches[0]
        return max([size for size in self.slices if size * n_patches <= most], default=self.slices[0])

    def most_fed(self, n_rows: int) -> int:
        """Slots that a prefill of `n_rows` rows each holds at once."""
        return max([size for size in self.batch if size * n_rows <= FED_AT_ONCE], default=self.batch[0])


class Regions(RegionTable):
    """Every region of the omni model over its slots."""

    stacks: ClassVar = {
        "vpm": ((VisionLayer, ("forward",)),),
        "resampler": ((Resampler, ("forward",)),),
        "apm": ((AudioLayer, ("forward", "stream")),),
        "llm.model": ((DecoderLayer, ("forward",)),),
        "tts.model": ((DecoderLayer, ("forward",)),),
    }

    def __init__(self, model: OmniModel, state: SlotState, log_mel: LogMel, sets: TokenSets, shapes: Shapes):
        # Sampling is hundreds of small operations: left eager between compiled layers, it would outweigh them.
        functions: dict[str, SharedFunction[..., Tensor]] = {
            "choose": SharedFunction(stages.choose),
            "draw": SharedFunction(speech.draw_speech_tokens),
        }
        table = _table(model, state, log_mel, sets, shapes, functions)
        super().__init__(model, table, shapes, functions, device=model.device)
        self.model, self.state = model, state

    def clear_scratch(self) -> None:
        self.state.reset(torch.tensor([self.state.scratch], device=self.state.llm.lengths.device))


def _fits(shapes: Shapes, axis: str, bucket: Bucket) -> bool:
    """Whether a prefill's batch and rows are not both large."""
    return bucket["batch"] <= shapes.most_fed(bucket[axis])


def _sees(shapes: Shapes, bucket: Bucket) -> bool:
    """Whether there are not both many slices and long ones."""
    return bucket["slices"] <= shapes.most_seen(bucket["patches"])


def _is_among(least: int, most: int, bucket: Bucket) -> bool:
    return bucket["batch"] <= max(least, most)


def _table(
    model: OmniModel,
    state: SlotState,
    log_mel: LogMel,
    sets: TokenSets,
    shapes: Shapes,
    functions: dict[str, SharedFunction[..., Tensor]],
) -> Iterator[Region]:
    """The table itself. Examples carry random data: zeros hide unwritten outputs and run faster than real ones."""
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

    def vision_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n, length = b["slices"], b["patches"]
        pixels = torch.randint(0, 256, (n, length, 3 * patch * patch), dtype=torch.uint8, device=device)
        ids = torch.randint(0, config.vision_config.table_side**2, (n, length), device=device)
        coords = torch.randint(0, config.vision_config.table_side, (n, length, 2), device=device)
        return (pixels, ids, coords, yes(n, length)), {}

    if config.init_vision:
        axes = {"slices": "slices", "patches": "patches"}
        few = partial(_sees, shapes)
        yield Region("vision", "vpm, resampler", stages.vision, (model,), axes, vision_example, has=few)

    def clips_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n, frames = b["batch"], b["frames"]
        mel = noise(n, config.audio_config.num_mel_bins, frames, dtype=torch.float32)
        chunk = int(config.audio_chunk_length * UNIT_ROWS)
        return (mel, full(n, frames), full(n, (frames + 1) // 2)), {"chunk": chunk}

    def mel_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n = b["batch"]
        samples = 0.1 * noise(n, b["samples"], dtype=torch.float32)
        n_new = full(n, min(UNIT_SAMPLES, b["samples"]))
        return (scratch(n), samples, n_new, yes(n), ~yes(n)), {"redundancy": 2, "clip": "auto"}

    def audio_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n = b["batch"]
        mel = noise(n, config.audio_config.num_mel_bins, UNIT_COLUMNS, dtype=torch.float32)
        return (scratch(n), mel, full(n, 0), full(n, UNIT_COLUMNS)), {}

    def overlap_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (scratch(b["batch"]), yes(b["batch"])), {}

    if config.init_audio:
        yield Region("clips", "apm", stages.clips, (model,), {"batch": "batch", "frames": "clip_frames"}, clips_example)
        axes = {"batch": "batch", "samples": "samples"}
        half_duplex = {"redundancy": 0}
        yield Region("mel_unit", "apm", stages.mel_unit, (log_mel, state), axes, mel_example, ({}, half_duplex))
        yield Region("audio_unit", "apm", stages.audio_unit, (model, state), {"batch": "batch"}, audio_example)
        yield Region("audio_overlap", "apm", stages.audio_overlap, (model, state), {"batch": "batch"}, overlap_example)

    def prefill_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n, rows = b["batch"], b["rows"]
        ids = torch.randint(0, config.vocab_size, (n, rows), device=device)
        is_row = torch.rand(n, rows, device=device) < 0.5
        return (scratch(n), ids, noise(n, rows, width), is_row, full(n, rows)), {"kv_len": b["kv"]}

    def decode_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n = b["batch"]
        return (scratch(n), torch.randint(0, config.vocab_size, (n,), device=device), yes(n)), {"kv_len": b["kv"]}

    def sample_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n = b["batch"]
        return (scratch(n), noise(n, config.vocab_size, dtype=torch.float32), yes(n)), {"candidates": None}

    def unit_prefill_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        tensors, static = prefill_example(b)
        return (*tensors, yes(b["batch"])), static

    def unit_step_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        (slots, ids, active), static = decode_example(b)
        return (slots, ids, active, full(b["batch"], 0), yes(b["batch"])), static

    def evict_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n = b["batch"]
        return (scratch(n), full(n, 0), full(n, 0)), {"turn": True}

    axes = {"batch": "batch", "rows": "rows", "kv": "kv"}
    few = partial(_fits, shapes, "rows")
    yield Region("llm_prefill", "llm.model", stages.llm_prefill, (model, state), axes, prefill_example, has=few)
    chooses = (model, state, sets, functions["choose"])
    yield Region("unit_prefill", "llm.model, choose", stages.unit_prefill, chooses, axes, unit_prefill_example, has=few)
    axes = {"batch": "batch", "kv": "kv"}
    yield Region("llm_decode", "llm.model", stages.llm_decode, (model, state), axes, decode_example)
    yield Region("unit_step", "llm.model, choose", stages.unit_step, chooses, axes, unit_step_example)
    yield Region("sample_text", "sampling", stages.sample_text, (state, sets), {"batch": "batch"}, sample_example)
    ways = ({"turn": True}, {"turn": False})
    axes, some = {"batch": "batch"}, partial(_is_among, shapes.batch[0], EVICTED_AT_ONCE)
    yield Region("llm_evict", "llm.model", stages.llm_evict, (model, state), axes, evict_example, ways, some)

    def reset_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (scratch(b["batch"]),), {}

    yield Region("reset", "state", stages.reset, (state,), {"batch": "batch"}, reset_example)

    def condition_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n, tokens = b["batch"], b["tokens"]
        ids = torch.randint(0, config.tts_config.num_text_tokens, (n, tokens), device=device)
        return (ids, noise(n, tokens, width), full(n, tokens), ~yes(n)), {}

    def spoken_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n, tokens = b["batch"], b["spoken"]
        ids = torch.randint(0, config.tts_config.num_text_tokens, (n, tokens), device=device)
        return (scratch(n), ids, full(n, tokens), ~yes(n)), {}

    def begin_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n, rows = b["batch"], b["tokens"] + 2
        hidden = noise(n, rows, config.tts_config.hidden_size)
        return (scratch(n), hidden, full(n, rows), full(n, 26), full(n, 26)), {"kv_len": b["kv"]}

    def step_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (scratch(b["batch"]),), {"kv_len": b["kv"], "n_steps": 1}

    if config.init_tts:
        axes = {"batch": "batch", "tokens": "tokens"}
        yield Region("speech_condition", "tts", stages.speech_condition, (model,), axes, condition_example)
        spoken_axes = {"batch": "batch", "spoken": "spoken"}
        yield Region("spoken_rows", "tts", stages.spoken_rows, (model, state), spoken_axes, spoken_example)
        axes = {"batch": "batch", "tokens": "tokens", "kv": "speech_kv"}
        draws = (model, state, functions["draw"])
        few = partial(_fits, shapes, "tokens")
        yield Region("speech_begin", "tts.model, draw", stages.speech_begin, draws, axes, begin_example, has=few)
        axes = {"batch": "batch", "kv": "speech_kv"}
        loops = tuple({"n_steps": n_steps} for n_steps in SPEECH_STEPS)
        yield Region("speech_step", "tts.model, draw", stages.speech_step, draws, axes, step_example, loops)
