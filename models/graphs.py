"""The table of regions: which shapes each may be called with, and how it runs (eager, compiled, captured).

Knows buckets, examples, torch.compile and CUDA graphs. Does not know sessions; a caller pads to a bucket
with `Shapes.fit` and calls `Regions`. After `warm_up` no call compiles anything.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from models import regions as stages
from models.apm import UNIT_ROWS, AudioLayer
from models.audio import UNIT_COLUMNS, UNIT_SAMPLES, LogMel
from models.errors import SettingsError, ShapeError
from models.layers import DecoderLayer
from models.omni import OmniModel
from models.sampling import TokenSets
from models.state import SlotState
from models.vpm import VisionLayer

Bucket = dict[str, int]


@dataclass(frozen=True)
class Shapes:
    """Allowed sizes per axis, ascending; every region's buckets are products of these."""

    batch: tuple[int, ...] = (1, 2, 4)
    slices: tuple[int, ...] = (1, 2, 4, 10)  # image slices encoded at once
    patches: tuple[int, ...] = (1088, 4096)  # the first holds every ordinary frame
    clip_frames: tuple[int, ...] = (200, 1000, 3000)
    samples: tuple[int, ...] = (16640,)  # a unit's sound, the longer first one included
    rows: tuple[int, ...] = (16, 96, 512)  # LLM rows fed at once
    kv: tuple[int, ...] = (512, 2048, 8192)  # LLM context looked at
    tokens: tuple[int, ...] = (24, 256, 1024)  # text tokens spoken at once
    speech_kv: tuple[int, ...] = (512, 4096)

    def __post_init__(self) -> None:
        for field in fields(self):
            sizes = getattr(self, field.name)
            if not sizes or list(sizes) != sorted(set(sizes)) or min(sizes) < 1:
                raise SettingsError(f"shapes.{field.name}", expected="ascending positive sizes", got=sizes)

    def capped(self, **limits: int) -> "Shapes":
        """The same with axes cut at a limit, which becomes the axis's largest size."""
        cut = {axis: (*(s for s in getattr(self, axis) if s < limit), limit) for axis, limit in limits.items()}
        return replace(self, **cut)

    def fit(self, region: str, axis: str, size: int) -> int:
        """The smallest allowed size that holds `size`. Raises: ShapeError naming region, axis and the sizes."""
        for allowed in getattr(self, axis):
            if size <= allowed:
                return allowed
        raise ShapeError(f"{region}: {axis}", expected=f"at most one of {getattr(self, axis)}", got=size)


@dataclass(frozen=True)
class Region:
    """One row of the table.

    run: plain function called as run(*bound, *tensors, **static). part: the compile target(s) it holds.
    axes: bucket axis -> name in `Shapes`. example: inputs of one bucket on scratch slots, as (tensors, static).
    variants: further settings of `static` that serving uses; each is a graph of its own.
    """

    name: str
    part: str
    run: Callable[..., Any]
    bound: tuple[Any, ...]
    axes: dict[str, str]
    example: Callable[[Bucket], tuple[tuple[Tensor, ...], dict[str, Any]]]
    variants: tuple[dict[str, Any], ...] = ({},)

    def buckets(self, shapes: Shapes) -> Iterator[Bucket]:
        for sizes in product(*(getattr(shapes, axis) for axis in self.axes.values())):
            yield dict(zip(self.axes, sizes, strict=True))


class Regions:
    """All regions of one model and its slots. Call one by name: `regions("llm_decode", slots, ids, ...)`."""

    def __init__(self, model: OmniModel, state: SlotState, log_mel: LogMel, sets: TokenSets, shapes: Shapes):
        self.model, self.state, self.shapes = model, state, shapes
        self.table = {region.name: region for region in _table(model, state, log_mel, sets)}
        self._runners = {name: region.run for name, region in self.table.items()}

    def __call__(self, name: str, *tensors: Tensor, **static: Any) -> Any:
        # Strides are part of a compiled graph's key: a transposed input would compile once more.
        assert all(tensor.is_contiguous() for tensor in tensors), f"{name}: inputs must be contiguous"
        with torch.no_grad():
            return self._runners[name](*self.table[name].bound, *tensors, **static)

    def compile(self, names: list[str] | None = None, *, by_layer: bool = False, **options: Any) -> None:
        """Wrap regions with torch.compile, one graph per bucket; nothing compiles before `warm_up`.

        Args:
            names: which regions; None = all.
            by_layer: compile one transformer layer and let all layers of a stack share it, which is what makes
                start-up short at full size; what stands between layers stays eager.
            options: for torch.compile (mode, backend, ...).
        Raises: SettingsError for an unknown name.
        """
        chosen = self._chosen(names)
        # Each bucket is one more graph of the same code, and a layer's code serves several regions; the default
        # limit would refuse late ones.
        most = sum(len(region.variants) for region in self.table.values() for _ in region.buckets(self.shapes))
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, most)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 4 * most)
        options = {"fullgraph": True, "dynamic": False, **options}
        if by_layer:
            self._compile_layers({part for region in chosen for part in region.part.split(", ")}, options)
            return
        for region in chosen:
            self._runners[region.name] = torch.compile(region.run, **options)

    def _chosen(self, names: list[str] | None) -> list[Region]:
        for name in names or ():
            if name not in self.table:
                raise SettingsError("region", expected=f"one of {sorted(self.table)}", got=name)
        return list(self.table.values()) if names is None else [self.table[name] for name in names]

    def _compile_layers(self, parts: set[str], options: dict[str, Any]) -> None:
        stacks = {
            "vpm": (VisionLayer, ("forward",)),
            "apm": (AudioLayer, ("forward", "stream")),
            "llm.model": (DecoderLayer, ("forward",)),
            "tts.model": (DecoderLayer, ("forward",)),
        }
        for part in parts & stacks.keys():
            kind, methods = stacks[part]
            for layer in self.model.get_submodule(part).modules():
                if isinstance(layer, kind):
                    for method in methods:
                        layer.__dict__.pop(method, None)  # compiled before: start from the plain method again
                        setattr(layer, method, torch.compile(getattr(layer, method), **options))

    def uncompile(self) -> None:
        """Back to eager for every region and layer."""
        self._runners = {name: region.run for name, region in self.table.items()}
        for layer in self.model.modules():
            for method in ("forward", "stream"):
                layer.__dict__.pop(method, None)

    def warm_up(self, names: list[str] | None = None) -> None:
        """Run every bucket of every region once, on scratch slots; sessions' slots stay as they are."""
        for region in self._chosen(names):
            for bucket, variant in product(region.buckets(self.shapes), region.variants):
                tensors, static = region.example(bucket)
                self(region.name, *tensors, **{**static, **variant})
                self.clear_scratch()

    def clear_scratch(self) -> None:
        """Empty the scratch slot: an example advances its counters like any session's."""
        self.state.reset(torch.tensor([self.state.scratch], device=self.state.llm.lengths.device))


class Captured:
    """One region at one bucket as a CUDA graph: static inputs, replay, static outputs."""

    def __init__(self, regions: Regions, name: str, bucket: Bucket):
        self.name = name
        self.inputs, static = regions.table[name].example(bucket)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile, then settle lazily created handles before the capture
                regions(name, *self.inputs, **static)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = regions(name, *self.inputs, **static)

    def __call__(self, *tensors: Tensor) -> Any:
        """Copy inputs in and replay. Returns: the static outputs, overwritten by the next call."""
        for index, (given, static) in enumerate(zip(tensors, self.inputs, strict=True)):
            if given.shape != static.shape or given.dtype != static.dtype:
                expected, got = (f"{tuple(t.shape)} {t.dtype}" for t in (static, given))
                raise ShapeError(f"captured {self.name}: input {index}", expected=expected, got=got)
            static.copy_(given)
        self.graph.replay()
        return self.outputs


def compile_counters() -> dict[str, int]:
    """Graph breaks and graphs compiled so far in this process; compare before and after."""
    return {
        "graph_breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "frames": counters["frames"]["total"],
    }


def _table(model: OmniModel, state: SlotState, log_mel: LogMel, sets: TokenSets) -> Iterator[Region]:
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
        yield Region("vision", "vpm, resampler", stages.vision, (model,), axes, vision_example)

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

    if config.init_audio:
        yield Region("clips", "apm", stages.clips, (model,), {"batch": "batch", "frames": "clip_frames"}, clips_example)
        axes = {"batch": "batch", "samples": "samples"}
        half_duplex = {"redundancy": 0}
        yield Region("mel_unit", "apm", stages.mel_unit, (log_mel, state), axes, mel_example, ({}, half_duplex))
        yield Region("audio_unit", "apm", stages.audio_unit, (model, state), {"batch": "batch"}, audio_example)

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

    def evict_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n = b["batch"]
        return (scratch(n), full(n, 0), full(n, 0)), {}

    axes = {"batch": "batch", "rows": "rows", "kv": "kv"}
    yield Region("llm_prefill", "llm.model", stages.llm_prefill, (model, state), axes, prefill_example)
    axes = {"batch": "batch", "kv": "kv"}
    yield Region("llm_decode", "llm.model", stages.llm_decode, (model, state), axes, decode_example)
    yield Region("sample_text", "sampling", stages.sample_text, (state, sets), {"batch": "batch"}, sample_example)
    yield Region("llm_evict", "llm.model", stages.llm_evict, (model, state), {"batch": "batch"}, evict_example)

    def reset_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (scratch(b["batch"]),), {}

    yield Region("reset", "state", stages.reset, (state,), {"batch": "batch"}, reset_example)

    def condition_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n, tokens = b["batch"], b["tokens"]
        ids = torch.randint(0, config.tts_config.num_text_tokens, (n, tokens), device=device)
        return (ids, noise(n, tokens, width), full(n, tokens), ~yes(n)), {}

    def begin_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n, rows = b["batch"], b["tokens"] + 2
        hidden = noise(n, rows, config.tts_config.hidden_size)
        return (scratch(n), hidden, full(n, rows), full(n, 26), full(n, 26)), {"kv_len": b["kv"]}

    def step_example(b: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (scratch(b["batch"]),), {"kv_len": b["kv"]}

    if config.init_tts:
        axes = {"batch": "batch", "tokens": "tokens"}
        yield Region("speech_condition", "tts", stages.speech_condition, (model,), axes, condition_example)
        axes = {"batch": "batch", "tokens": "tokens", "kv": "speech_kv"}
        yield Region("speech_begin", "tts.model", stages.speech_begin, (model, state), axes, begin_example)
        axes = {"batch": "batch", "kv": "speech_kv"}
        yield Region("speech_step", "tts.model", stages.speech_step, (model, state), axes, step_example)
