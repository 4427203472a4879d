"""Starts an engine with random weights in the same steps as a worker, and times each step.

The same seed on the same device gives every process the same weights. Does not contain measurements of units.
"""

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import report
from benchmarks.compile_options import WAYS
from benchmarks.duplex.memory_table import held_parts, phase_memory, start_peak
from benchmarks.duplex.region_errors import exact_float32
from benchmarks.timing import Ceilings, DeviceClock
from models.checkpoint.config import load_config, load_preprocessor_config
from models.checkpoint.precision import PRESETS
from models.checkpoint.precision import Weights as Preset
from models.inputs.tokens import Tokenizer
from models.layers.weights import assign_weights, on_meta
from models.load import build_on_meta, load_model, weight_dtype
from models.omni import OmniModel
from models.random_weights import random_model
from models.stages.region_table import Shapes
from models.stages.state import held_bytes
from models.token2wav.flow.flow import Flow
from models.token2wav.hift import hift as hift_module
from models.token2wav.hift.hift import Hift
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from models.token2wav.load.random_weights import random_parts
from models.token2wav.settings import FRAMES_PER_TOKEN, MEL_RATE, FlowConfig
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.voice.voice import Voice
from worker.assembly.backend_flags import uses_kernels
from worker.assembly.parts import EngineParts, assemble
from worker.compile.cache import CompileCache, cache_facts
from worker.compile.compile_engine import compile_engine, count
from worker.compile.prefetch import prefetch_compiler, prefetch_triton
from worker.compile.state import CompileCounts, CompileResult
from worker.compile.targets import SERVING
from worker.config.compile import Target
from worker.config.service import ServiceSection
from worker.config.session import EngineConfig, SessionConfig, WindowConfig
from worker.config.weights import KVLayout
from worker.engine import Engine
from worker.loop.observer import Observer
from worker.media import MediaError
from worker.start.memory import freeze_heap
from worker.start.warmup import WarmUpMedia, extract, warm_up
from worker.start.warmup_session import WarmUpUnit

TINY, REAL = Path("assets/tiny"), Path("tests/data/released_config.json")
VIDEO, REF_AUDIO = Path("assets/warmup.mp4"), Path("assets/ref_audio")
WARM_UP_UNITS = ServiceSection.model_fields["max_warmup_chunks"].default  # as a worker has it
PROMPT_TOKENS = 75  # three seconds
WINDOW = WindowConfig()
UNITS_ROWS = 256  # of a slot above the mark at which its window moves


@dataclass(frozen=True)
class EngineSpec:
    """The engine to build.

    Attributes:
        config: `tiny` or `real`.
        way: key of `compile_options.WAYS`.
        slots: maximum sessions.
        llm_len: context rows of a slot.
        voices_s: seconds of voice prompts that fit; all sessions share one voice.
        steps: Euler steps; None = the way's.
        dtype: as in `EngineConfig`.
        plain: the vocoder runs without our kernels too, and float32 products use float32 from construction on.
        unit_shapes: only the buckets of units with one image, for one session and for all slots at once.
        targets: compile targets; None = the way's.
        warms_up: run the worker's warm-up conversation at the start.
        early_prefill: pictures that come before their units are fed before them, too; as in `EngineConfig`.
        kv_layout: as in `EngineConfig`.
        decode_copy: as in `EngineConfig`, without its default.
        weights: key of `models.checkpoint.precision.PRESETS`, as `model.weights`.
        session: further session settings.
    """

    config: str = "tiny"
    device: str = "cpu"
    way: str = "ours"
    slots: int = 1
    llm_len: int = 4608
    voices_s: float = 12.0
    steps: int | None = None
    dtype: str = "auto"
    plain: bool = False
    unit_shapes: bool = False
    targets: tuple[Target, ...] | None = None
    warms_up: bool = True
    early_prefill: bool | Literal["auto"] = "auto"
    kv_layout: KVLayout = "slots"
    decode_copy: bool = False
    weights: Preset = "bf16"
    session: dict[str, Any] = field(default_factory=dict)

    @property
    def n_steps(self) -> int:
        """Euler steps."""
        return self.steps or WAYS[self.way].steps

    def engine_config(self) -> EngineConfig:
        high = min(WINDOW.high_tokens, max(self.llm_len - UNITS_ROWS, self.llm_len // 2))
        window = WindowConfig(high_tokens=high, low_tokens=high * WINDOW.low_tokens // WINDOW.high_tokens)
        session = {
            "force_listen_count": 0,
            "seed": 1,
            "window": window,
            **self.session,
        }
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            max_sessions=self.slots,
            llm_len=self.llm_len,
            voices_s=self.voices_s,
            euler_steps=self.n_steps,
            early_prefill=self.early_prefill,
            kv_layout=self.kv_layout,
            decode_copy=self.decode_copy,
            weights=self.weights,
            compile=WAYS[self.way].config(self.targets),
            session=SessionConfig(**session),
        )


@dataclass(frozen=True)
class Weights:
    """Weights of the model and of the vocoder."""

    model: OmniModel
    flow: FlowAndHift

    @classmethod
    def create(cls, spec: EngineSpec) -> "Weights":
        device = torch.device(spec.device)
        dtype = _dtype(spec)
        if spec.config == "tiny":
            flow = load_flow_and_hift(TINY / "assets/token2wav", device=device, dtype=dtype, hift_dtype=dtype)
            return cls(load_model(TINY, device=device, dtype=dtype, precision=PRESETS[spec.weights]), flow)
        flow = random_parts(device=device, dtype=dtype, hift_dtype=dtype)
        model = random_model(load_config(REAL), device=device, dtype=dtype, precision=PRESETS[spec.weights])
        return cls(model, flow)

    def copy_as(self, dtype: torch.dtype) -> "Weights":
        """The same values in `dtype`, converted as when a checkpoint is loaded, in separate modules."""
        model, device = self.model, self.model.device
        # With kernels some weights are on the host.
        tensors = {name: _copy(t.to(device), weight_dtype(name, dtype)) for name, t in model.state_dict().items()}
        twin = assign_weights(build_on_meta(model.config), tensors, device, dtype)
        flow, hift = self.flow.flow, self.flow.hift
        with on_meta():
            copies = Flow(flow.config), Hift(hift.config)
        flows = {name: _copy(t, dtype) for name, t in flow.state_dict().items()}
        hifts = {name: _copy(t, hift_module.weight_dtype(name, dtype)) for name, t in hift.state_dict().items()}
        sound = FlowAndHift(
            assign_weights(copies[0], flows, device, dtype), assign_weights(copies[1], hifts, device, dtype)
        )
        return Weights(twin, sound)

    def float32_copy(self) -> "Weights":
        """`copy_as` float32."""
        return self.copy_as(torch.float32)

    def parts(self, spec: EngineSpec, config: EngineConfig) -> EngineParts:
        """Assemble an engine's parts with these weights."""
        shapes = vocoder_shapes = None
        if spec.unit_shapes:
            # As in the worker: kernels read only valid rows, compiled layers read the whole bucket.
            lengths = {"kv": (8192,), "speech_kv": (4096,)}
            if not uses_kernels(config.compile, self.model.device):
                lengths = {"kv": (2048, 8192), "speech_kv": (512, 4096)}
            batch = tuple(sorted({1, spec.slots}))
            shapes = Shapes(batch=batch, slices=batch, patches=(1088,), spoken=(24,), tokens=(24,), **lengths)
            vocoder_shapes = VocoderShapes(batch=batch, columns=(512,))
        tokenizer, preprocessor = Tokenizer.load(TINY), load_preprocessor_config(TINY)
        with exact_float32() if spec.plain else nullcontext():
            return assemble(
                self.model,
                tokenizer,
                preprocessor,
                self.flow,
                config,
                shapes=shapes,
                vocoder_shapes=vocoder_shapes,
                vocoder_kernels="plain" if spec.plain else None,
            )


@dataclass
class RunningEngine:
    """A started engine.

    start: seconds of each phase and the compile result; `total_s` excludes loading weights. counts: compile counts when
    the engine became ready.
    """

    spec: EngineSpec
    parts: EngineParts
    engine: Engine
    voice: Voice
    start: dict[str, Any]
    counts: CompileCounts

    @property
    def device(self) -> torch.device:
        return self.parts.model.device

    def compile_counts_since_ready(self) -> dict[str, int]:
        """Compile counts added since the engine became ready."""
        return asdict(count(self.parts).since(self.counts))

    def wait_idle(self) -> None:
        """Wait until the engine has run all earlier commands, including closing units."""
        self.engine.submit(lambda: None).result()


def measure_ceilings(spec: EngineSpec) -> Ceilings:
    """Copy and matmul throughput of the device, in the dtype of the spec."""
    return DeviceClock(torch.device(spec.device)).ceilings(_dtype(spec))


def start(
    spec: EngineSpec, launched: float, cache: Path, *, observer: Observer | None = None, weights: Weights | None = None
) -> RunningEngine:
    """Build and start an engine.

    Args:
        launched: `time.time()` at the start of the process.
        cache: folder of torch's kernel cache.
        weights: None = created here.
    """
    config = spec.engine_config()
    seconds, memory = {"process": time.time() - launched}, dict[str, dict[str, int]]()
    lap_start = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal lap_start
        if spec.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds[phase], lap_start = now - lap_start, now
        memory[phase] = phase_memory(torch.device(spec.device))

    prefetch_triton(config.compile, torch.device(spec.device))  # as in a worker, before the weights are loaded
    prefetch_compiler(config.compile, torch.device(spec.device))
    lap("head_start")
    weights = weights or Weights.create(spec)
    lap("weights")
    parts = weights.parts(spec, config)
    lap("slots")
    engine = Engine(parts, config, observer=observer)
    engine.start()
    compiling = engine.submit(_compile, parts, config, cache)
    units, note = _warm_up_units(spec)
    result = compiling.result()
    lap("compile")
    voice = make_voice(parts.vocoder.parts.flow.config)
    if units:
        _warm_up(engine, voice, units)
    lap("warm_up")
    facts = {
        "seconds": seconds,
        "total_s": sum(seconds.values()) - seconds["weights"],
        "max_sessions": parts.n_slots,
        "n_graphs": result.n_graphs,
        "hits": result.hits,
        "misses": result.misses,
        "regions_s": result.seconds,
        "targets": {
            name: {"phase": str(state.phase), "seconds": state.seconds, "error": state.error}
            for name, state in result.targets.items()
        },
        "fell_back": [name for name, state in result.targets.items() if state.has_failed],
        "toggles": result.backend_flags,
        "notes": [*result.notes, *([f"warm-up: {note}"] if note else [])],
        "counts": asdict(count(parts)),
        "not_captured": _not_captured(parts) if result.n_graphs else [],
        "compile_config": config.compile.model_dump(mode="json"),
        "n_weights": sum(p.numel() for p in parts.model.parameters()),
        "slot_bytes": parts.unit_steps.state.nbytes(),
        "vocoder_slot_bytes": parts.vocoder.n_bytes,
        "bytes_of_1000_rows": 1000 * _row_bytes(parts),
        "bytes_of_a_voice_second": MEL_RATE * _voice_frame_bytes(parts),
        "peak_memory": {**report.peak_memory(parts.model.device), **start_peak(memory)},
        "phase_memory": memory,
        "held_parts": held_parts(parts, result),
        "llm_len": spec.llm_len,
    }
    return RunningEngine(spec, parts, engine, voice, facts, count(parts))


def device_used(device: torch.device) -> int | None:
    """Bytes in use on the whole device, including the driver's; None without a GPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def make_voice(config: FlowConfig, seed: int = 0) -> Voice:
    """A random voice with a prompt of three seconds."""
    generator = torch.Generator().manual_seed(seed)
    speech_tokens = torch.randint(0, config.vocab_size, (PROMPT_TOKENS,), generator=generator)
    mel = torch.randn(2 * PROMPT_TOKENS, config.n_mels, generator=generator)
    return Voice(speech_tokens, mel, torch.randn(config.speaker_dim, generator=generator))


def _compile(parts: EngineParts, config: EngineConfig, folder: Path) -> CompileResult:
    if not config.compile.enabled:
        return compile_engine(parts, config)
    started_at = time.perf_counter()
    cache = CompileCache.open(folder, cache_facts(parts, config.compile))
    result = compile_engine(parts, config, is_warm=cache.has_everything)
    freeze_heap()
    cache.record(result.hits, result.misses, time.perf_counter() - started_at, is_whole=result.is_whole)
    return result


def _warm_up_units(spec: EngineSpec) -> tuple[list[WarmUpUnit], str]:
    """Input of the worker's warm-up conversation. Returns: units, and why there are none, or empty."""
    if not spec.warms_up:
        return [], "skipped"
    try:
        return extract(VIDEO, WARM_UP_UNITS), ""
    except MediaError as error:
        return [], str(error)


def _warm_up(engine: Engine, voice: Voice, units: list[WarmUpUnit]) -> None:
    """Run the worker's warm-up conversation."""
    sound = next(iter(sorted(REF_AUDIO.glob("*.wav"))), None)
    warm_up(engine, WarmUpMedia(VIDEO, sound), voice=lambda _: voice, units=units)


def _not_captured(parts: EngineParts) -> list[str]:
    """Regions that units call and that were not captured."""
    tables = (parts.unit_steps.regions, parts.vocoder.regions)
    return [name for name in SERVING for table in tables if name in table.table and name not in table.captured]


def _row_bytes(parts: EngineParts) -> int:
    """Bytes of one more context row in every slot, including the scratch slot."""
    cache = parts.unit_steps.state.llm
    return held_bytes((*cache.k, *cache.v)) // cache.max_len


def _voice_frame_bytes(parts: EngineParts) -> int:
    """Bytes of one more mel frame in the storage that all voices share."""
    state = parts.vocoder.state
    dit_bytes = sum(rows.nbytes for rows in state.dit_rows) // state.dit_table.n_rows
    token_bytes = state.token_rows.nbytes // state.token_table.n_rows // FRAMES_PER_TOKEN
    return dit_bytes + state.mel_rows.nbytes // state.mel_table.n_rows + token_bytes


def _dtype(spec: EngineSpec) -> torch.dtype:
    if spec.dtype == "auto":
        return torch.bfloat16 if spec.device == "cuda" else torch.float32
    return getattr(torch, spec.dtype)


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype, copy=True)
