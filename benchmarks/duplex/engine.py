"""An engine with random weights, started as a worker starts one: slots, compiling, warm-up, each with its seconds.

The same seed on the same device gives every process the same weights. Knows what is built and in which order. Does not
know what is measured on it afterwards.
"""

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.compile_options import WAYS
from benchmarks.duplex.region_errors import exact
from benchmarks.timing import Ceilings, DeviceClock
from models.checkpoint.config import load_config, load_preprocessor_config
from models.inputs.tokens import Tokenizer
from models.layers.weights import assign_weights, on_meta
from models.load import build_on_meta, load_model, weight_dtype
from models.omni import OmniModel
from models.random_weights import random_model
from models.stages.region_table import Shapes
from models.stages.state import held_bytes
from models.token2wav.flow.flow import Flow
from models.token2wav.hift import hift as hift_room
from models.token2wav.hift.hift import Hift
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from models.token2wav.load.random_weights import random_parts
from models.token2wav.settings import FRAMES_PER_TOKEN, FlowConfig
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.voice.voice import Voice
from worker.assembly.backend_flags import wants_kernels
from worker.assembly.parts import FRAMES_PER_SECOND, EngineParts, assemble
from worker.compile.cache import CompileCache, cache_facts
from worker.compile.compile_engine import compile_engine, count
from worker.compile.prefetch import prefetch_compiler, prefetch_triton
from worker.compile.state import CompileCounts, CompileResult
from worker.compile.targets import SERVING
from worker.config.compile import Target
from worker.config.service import ServiceSection
from worker.config.session import EngineConfig, SessionConfig, WindowConfig
from worker.engine import Engine
from worker.loop.observer import Observer
from worker.media import MediaError
from worker.start.memory import freeze_heap
from worker.start.warmup import WarmUpMedia, WarmUpUnit, extract, warm_up

TINY, REAL = Path("assets/tiny"), Path("tests/data/released_config.json")
VIDEO, REF_AUDIO = Path("assets/warmup.mp4"), Path("assets/ref_audio")
WARM_UP_UNITS = ServiceSection.model_fields["max_warmup_chunks"].default  # as a worker has it
PROMPT_TOKENS = 75  # three seconds of a voice's prompt
WINDOW = WindowConfig()


@dataclass(frozen=True)
class EngineSpec:
    """What to build.

    config: `tiny` or `real`. way: of `compile_options.WAYS`. slots: sessions at most. llm_len: context rows of a slot.
    voices_s: room for prompts of voices; all sessions have one. steps: Euler steps; None: the way's. dtype: as
    `EngineConfig`'s. plain: no kernels of ours in the vocoder either, float32 products in float32 from the beginning.
    unit_shapes: only the sizes that units with one picture meet, of one session or of all slots at once, where many
    ways are compared. targets: of compiling; None: the way's.
    warms_up: hold the worker's conversation at the start. session: further settings of sessions.
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
    session: dict[str, Any] = field(default_factory=dict)

    @property
    def n_steps(self) -> int:
        """Euler steps."""
        return self.steps or WAYS[self.way].steps

    def engine_config(self) -> EngineConfig:
        window = min(WINDOW.high_tokens, self.llm_len // 2), min(WINDOW.low_tokens, self.llm_len // 3)
        fits = self.llm_len >= WINDOW.high_tokens + 256
        session = {
            "force_listen_count": 0,
            "seed": 1,
            "window": WINDOW if fits else WindowConfig(high_tokens=window[0], low_tokens=window[1]),
            **self.session,
        }
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            max_sessions=self.slots,
            llm_len=self.llm_len,
            voices_s=self.voices_s,
            euler_steps=self.n_steps,
            compile=WAYS[self.way].config(self.targets),
            session=SessionConfig(**session),
        )


@dataclass(frozen=True)
class Weights:
    """Those of the model and of the vocoder."""

    model: OmniModel
    flow: FlowAndHift

    @classmethod
    def of(cls, spec: EngineSpec) -> "Weights":
        device = torch.device(spec.device)
        dtype = _dtype(spec)
        if spec.config == "tiny":
            flow = load_flow_and_hift(TINY / "assets/token2wav", device=device, dtype=dtype, hift_dtype=dtype)
            return cls(load_model(TINY, device=device, dtype=dtype), flow)
        flow = random_parts(device=device, dtype=dtype, hift_dtype=dtype)
        return cls(random_model(load_config(REAL), device=device, dtype=dtype), flow)

    def copied(self, dtype: torch.dtype) -> "Weights":
        """The same numbers in this type, as a checkpoint is loaded in it, in modules that share nothing with these."""
        model, device = self.model, self.model.device
        # Kernels keep some of them on the host.
        tensors = {name: _copy(t.to(device), weight_dtype(name, dtype)) for name, t in model.state_dict().items()}
        twin = assign_weights(build_on_meta(model.config), tensors, device, dtype)
        flow, hift = self.flow.flow, self.flow.hift
        with on_meta():
            copies = Flow(flow.config), Hift(hift.config)
        flows = {name: _copy(t, dtype) for name, t in flow.state_dict().items()}
        hifts = {name: _copy(t, hift_room.weight_dtype(name, dtype)) for name, t in hift.state_dict().items()}
        sound = FlowAndHift(
            assign_weights(copies[0], flows, device, dtype), assign_weights(copies[1], hifts, device, dtype)
        )
        return Weights(twin, sound)

    def wide(self) -> "Weights":
        """`copied` in float32."""
        return self.copied(torch.float32)

    def parts(self, spec: EngineSpec, config: EngineConfig) -> EngineParts:
        """Slots around them."""
        shapes = vocoder_shapes = None
        if spec.unit_shapes:
            # As the worker has them: kernels read what is valid, compiled layers all of a size.
            lengths = {"kv": (8192,), "speech_kv": (4096,)}
            if not wants_kernels(config.compile, self.model.device):
                lengths = {"kv": (2048, 8192), "speech_kv": (512, 4096)}
            batch = tuple(sorted({1, spec.slots}))
            shapes = Shapes(batch=batch, slices=batch, patches=(1088,), spoken=(24,), tokens=(24,), **lengths)
            vocoder_shapes = VocoderShapes(batch=batch, columns=(512,))
        tokenizer, pictures = Tokenizer.load(TINY), load_preprocessor_config(TINY)
        with exact() if spec.plain else nullcontext():
            return assemble(
                self.model,
                tokenizer,
                pictures,
                self.flow,
                config,
                shapes=shapes,
                vocoder_shapes=vocoder_shapes,
                vocoder_kernels="plain" if spec.plain else None,
            )


@dataclass
class Running:
    """An engine that serves. start: seconds of each phase and what compiling came to; its `total_s` leaves the weights
    out. counts: when it was ready.
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

    def late(self) -> dict[str, int]:
        """What compiling has added since the engine was ready."""
        return asdict(count(self.parts).since(self.counts))

    def settle(self) -> None:
        """Until all that was asked of the engine is done, closing of units included."""
        self.engine.submit(lambda: None).result()


def measure_ceilings(spec: EngineSpec) -> Ceilings:
    """What the device copies and multiplies in a second, in the type of the spec."""
    return DeviceClock(torch.device(spec.device)).ceilings(_dtype(spec))


def start(
    spec: EngineSpec, launched: float, cache: Path, *, observer: Observer | None = None, weights: Weights | None = None
) -> Running:
    """Build and start an engine.

    Args:
        launched: `time.time()` when the process began. cache: where torch was told to keep kernels. weights: None:
            made here.
    """
    config = spec.engine_config()
    seconds = {"process": time.time() - launched}
    begun = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal begun
        if spec.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds[phase], begun = now - begun, now

    prefetch_triton(config.compile, torch.device(spec.device))  # both as a worker does, before it loads weights
    prefetch_compiler(config.compile, torch.device(spec.device))
    lap("head_start")
    weights = weights or Weights.of(spec)
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
        "slot_bytes": parts.duplex.state.nbytes(),
        "vocoder_slot_bytes": parts.vocoder.n_bytes,
        "bytes_of_1000_rows": 1000 * _row_bytes(parts),
        "bytes_of_a_voice_second": FRAMES_PER_SECOND * _voice_frame_bytes(parts),
        "peak_memory": report.peak_memory(parts.model.device),
    }
    return Running(spec, parts, engine, voice, facts, count(parts))


def device_used(device: torch.device) -> int | None:
    """Bytes in use on the whole device, the driver's own included; None without a GPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def make_voice(config: FlowConfig, seed: int = 0) -> Voice:
    """Nobody's."""
    generator = torch.Generator().manual_seed(seed)
    speech_tokens = torch.randint(0, config.vocab_size, (PROMPT_TOKENS,), generator=generator)
    mel = torch.randn(2 * PROMPT_TOKENS, config.n_mels, generator=generator)
    return Voice(speech_tokens, mel, torch.randn(config.speaker_dim, generator=generator))


def _compile(parts: EngineParts, config: EngineConfig, folder: Path) -> CompileResult:
    if not config.compile.enabled:
        return compile_engine(parts, config)
    begun = time.perf_counter()
    cache = CompileCache.open(folder, cache_facts(parts, config.compile))
    result = compile_engine(parts, config, is_warm=cache.has_everything)
    freeze_heap()
    cache.record(result.hits, result.misses, time.perf_counter() - begun, is_whole=result.is_whole)
    return result


def _warm_up_units(spec: EngineSpec) -> tuple[list[WarmUpUnit], str]:
    """What the worker's own conversation hears. Returns: why it is not held too, if it is not."""
    if not spec.warms_up:
        return [], "left out"
    try:
        return extract(VIDEO, WARM_UP_UNITS), ""
    except MediaError as error:
        return [], str(error)


def _warm_up(engine: Engine, voice: Voice, units: list[WarmUpUnit]) -> None:
    """The worker's own conversation."""
    sound = next(iter(sorted(REF_AUDIO.glob("*.wav"))), None)
    warm_up(engine, WarmUpMedia(VIDEO, sound), voice=lambda _: voice, units=units)


def _not_captured(parts: EngineParts) -> list[str]:
    """Regions that units call and that have no CUDA graph."""
    tables = (parts.duplex.runner.regions, parts.vocoder.regions)
    return [name for name in SERVING for table in tables if name in table.table and name not in table.captured]


def _row_bytes(parts: EngineParts) -> int:
    """Of one more context row in every slot, scratch slots included."""
    cache = parts.duplex.state.llm
    return held_bytes((*cache.k, *cache.v)) // cache.k[0].shape[2]


def _voice_frame_bytes(parts: EngineParts) -> int:
    """Of one more mel frame for voices, which all of them share."""
    state = parts.vocoder.state
    of_dit = sum(rows.nbytes for rows in state.dit_rows) // state.dit_table.n_rows
    of_tokens = state.token_rows.nbytes // state.token_table.n_rows // FRAMES_PER_TOKEN
    return of_dit + state.mel_rows.nbytes // state.mel_table.n_rows + of_tokens


def _dtype(spec: EngineSpec) -> torch.dtype:
    if spec.dtype == "auto":
        return torch.bfloat16 if spec.device == "cuda" else torch.float32
    return getattr(torch, spec.dtype)


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype, copy=True)
