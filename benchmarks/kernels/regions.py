"""Whole captured regions with kernels on: time of a replay and its number of kernels.

Contains the regions, buckets and slot states. Only the token choice is compiled, as in a worker that uses kernels.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.kernels.timing import Case, Figures, Meter
from benchmarks.model.occupied_slots import LLM_REGIONS, OccupiedSlots, new_rows
from benchmarks.timing import DeviceClock
from models.checkpoint.config import load_config
from models.checkpoint.precision import UNQUANTIZED, Precision
from models.graphs.captured import Bucket, Captured
from models.inputs.audio import LogMel
from models.kernels import fused_decoder
from models.layers.kv_cache import KVCache
from models.omni import OmniModel
from models.random_weights import random_model
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Regions, Shapes
from models.stages.state import SlotState
from models.token2wav.flow import dit_fused
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.load.parts import load_flow_and_hift
from models.token2wav.load.random_weights import random_parts
from models.token2wav.settings import FRAMES_PER_TOKEN
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk, Vocoder
from models.token2wav.voice.voice import Voice
from worker.assembly.backend_flags import apply_backend_flags
from worker.config.compile import CompileConfig

ROOT = Path(__file__).resolve().parents[2]
TINY, RELEASED = ROOT / "assets" / "tiny", ROOT / "tests" / "data" / "released_config.json"
BATCH = (1, 8, 32)
CONTEXT, SPOKEN = 2000, 300  # rows held after the call, of the language model and of the TTS model
KV, SPEECH_KV = {"kv": 2048}, {"kv": 512}
SPEECH_TOKENS = (8, 17, 28)
COLUMNS, PROMPT_TOKENS, N_STEPS = 512, 150, 10  # PROMPT_TOKENS: six seconds of a voice
TINY_COLUMNS = 144
WARM_UP, REPEATS = 3, 20

Variant = dict[str, Any]
Call = tuple[str, Bucket, Variant]
# Batch 1 first: the compiled function is then specialized once for one row and once for any number of rows.
CALLS: tuple[Call, ...] = (
    *(("unit_step", {"batch": n, **KV}, {}) for n in BATCH),
    *(("unit_prefill", {"batch": n, "rows": 96, **KV}, {}) for n in (1, 8)),
    *(("speech_step", {"batch": n, **SPEECH_KV}, {"n_steps": steps}) for n in BATCH for steps in (1, 5)),
    *(("vision", {"slices": n, "patches": 1088}, {}) for n in (1, 4)),
    *(("audio_unit", {"batch": n}, {}) for n in (1, 8)),
    ("mel_unit", {"batch": 1, "samples": 16640}, {}),
)
# The same calls with the library's GEMMs for all numbers of rows.
LIBRARY_CALLS: tuple[Call, ...] = tuple(
    call for call in CALLS if call[0] == "unit_step" or (call[0] == "speech_step" and call[2]["n_steps"] > 1)
)
TINY_CALLS: tuple[Call, ...] = (
    ("unit_step", {"batch": 1, "kv": 64}, {}),
    ("speech_step", {"batch": 1, "kv": 64}, {"n_steps": 1}),
)


def cases(meter: Meter) -> Iterator[Case]:
    """The omni model's regions, then the vocoder's."""
    apply_backend_flags(CompileConfig(), meter.device)  # as in a worker
    # Gigabytes, so created when their first row starts.
    regions = cache(tiny_regions if meter.is_tiny else partial(released_regions, meter))
    clock = DeviceClock(meter.device)
    for name, bucket, variant in TINY_CALLS if meter.is_tiny else CALLS:
        yield Case(name, {**bucket, **variant}, partial(measure_region, regions, clock, name, bucket, variant))
    for name, bucket, variant in TINY_CALLS[-1:] if meter.is_tiny else LIBRARY_CALLS:
        run = partial(measure_region, regions, clock, name, bucket, variant)
        yield Case(f"{name}, library", {**bucket, **variant}, partial(_with_library_gemm, run))
    del regions, run
    vocoder = cache(_tiny_vocoder if meter.is_tiny else partial(_released_vocoder, meter))
    batch, counts, columns = ((1,), (10,), TINY_COLUMNS) if meter.is_tiny else (BATCH, SPEECH_TOKENS, COLUMNS)
    for name, axes in (("flow", {"columns": columns}), ("hift", {})):
        for n, count in ((n, count) for count in counts for n in batch):
            bucket = {"batch": n, "speech_tokens": count, **axes}
            yield Case(name, bucket, partial(_measure_vocoder_region, vocoder, clock, name, bucket))
    bucket = {"batch": batch[0], "speech_tokens": counts[0], "columns": columns}
    yield Case(
        "flow, library",
        bucket,
        partial(_with_library_gemm, partial(_measure_vocoder_region, vocoder, clock, "flow", bucket)),
    )


def _with_library_gemm(run: Callable[[], Figures]) -> Figures:
    with patch.object(fused_decoder, "MAX_ROWS", 0), patch.object(dit_fused, "FEW_ROWS", 0):
        return run()


def measure_region(
    make: Callable[[], Regions], clock: DeviceClock, name: str, bucket: Bucket, variant: Variant
) -> Figures:
    """Time a region's replay; on a CPU it runs once."""
    regions = make()
    occupied, state = OccupiedSlots(regions, name, bucket), regions.state

    def restore() -> None:
        occupied.restore()
        if clock.is_cuda and name in LLM_REGIONS:
            _set_length(state.llm, CONTEXT - new_rows(name, bucket))
        if clock.is_cuda and name == "speech_step":
            _set_length(state.speech.cache, SPOKEN - variant["n_steps"])

    if not clock.is_cuda:
        regions(name, *occupied.tensors, **{**occupied.static, **variant})
        return {}
    regions.clear_scratch()  # the runs before capture append to the scratch slot
    captured = Captured(regions, name, bucket, variant)
    restore()
    captured(*occupied.tensors)
    return _time_replay(clock, captured.graph.replay, restore)


def _set_length(cache: KVCache, n_rows: int) -> None:
    cache.lengths.fill_(n_rows)
    cache.positions.fill_(n_rows)


def _measure_vocoder_region(make: Callable[[], Vocoder], clock: DeviceClock, name: str, bucket: Bucket) -> Figures:
    """Time a vocoder region. A call reads and writes different slots, so that all replays have the same input."""
    vocoder = make()
    inputs, static = vocoder.regions.table[name].example(bucket)
    slots = torch.arange(bucket["batch"], device=vocoder.device)  # state of the sessions after two chunks
    inputs = (slots, slots + vocoder.sizes.n_sessions, *inputs[2:])
    if not clock.is_cuda:
        vocoder.regions(name, *inputs, **static)
        return {}
    captured = Captured(vocoder.regions, name, bucket)
    captured(*inputs)
    return _time_replay(clock, captured.graph.replay, lambda: None)


def _time_replay(clock: DeviceClock, replay: Callable[[], Any], restore: Callable[[], None]) -> Figures:
    for _ in range(WARM_UP):
        clock.sample(replay, restore)
    timing = clock.measure(replay, restore, REPEATS, head_start=True)
    restore()
    return asdict(timing) | _kernels(clock, replay)


def _kernels(clock: DeviceClock, replay: Callable[[], Any]) -> Figures:
    """Number of kernels and the sum of their times, including waits of kernels that start early."""
    from torch.profiler import ProfilerActivity, profile

    clock.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        replay()
        clock.wait()
    events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"kernels": len(events), "busy_ms": sum(event.device_time for event in events) / 1e3}


def released_regions(meter: Meter, precision: Precision = UNQUANTIZED) -> Regions:
    """Regions of the released size with random weights."""
    model = random_model(load_config(RELEASED), device=meter.device, dtype=meter.dtype, precision=precision)
    shapes = Shapes(
        batch=BATCH,
        slices=(1, 4),
        patches=(1088,),
        rows=(96,),
        kv=(KV["kv"],),
        spoken=(24,),
        tokens=(24,),
        speech_kv=(SPEECH_KV["kv"],),
    )
    return _table(model, shapes, llm_len=2 * KV["kv"], tts_len=2 * SPEECH_KV["kv"])


def tiny_regions(precision: Precision = UNQUANTIZED) -> Regions:
    """Regions with the embedded checkpoint's widths and one layer."""
    config = load_config(TINY)
    tts = config.tts_config.model_copy(update={"num_hidden_layers": 1})
    model = random_model(config.model_copy(update={"num_hidden_layers": 1, "tts_config": tts}), precision=precision)
    shapes = Shapes(batch=(1,), rows=(16,), kv=(64,), tokens=(24,), speech_kv=(64,))
    return _table(model, shapes, llm_len=64, tts_len=64)


def _table(model: OmniModel, shapes: Shapes, *, llm_len: int, tts_len: int) -> Regions:
    model.use_kernels(True)
    state = SlotState.allocate(model, n_slots=shapes.batch[-1], llm_len=llm_len, tts_len=tts_len)
    log_mel = LogMel(model.device, model.config.audio_config.num_mel_bins)
    sets = TokenSets.build([TokenSet()], model.config.vocab_size, model.device)
    return Regions(model, state, log_mel, sets, shapes)


def _tiny_vocoder() -> Vocoder:
    """The embedded checkpoint's vocoder, which has no kernels on a CPU."""
    parts = load_flow_and_hift(TINY / "assets" / "token2wav")
    sizes = FlowSizes(n_sessions=1, n_voices=1, max_steps=1, max_chunk=10, max_prompt=20)
    return Vocoder(parts.flow, parts.hift, sizes=sizes, steps=(1,))


def _released_vocoder(meter: Meter) -> Vocoder:
    """A vocoder whose sessions attend to the largest context: a voice's prompt and the frames of two chunks."""
    parts = random_parts(device=meter.device, dtype=meter.dtype, hift_dtype=meter.dtype)
    sizes = FlowSizes(n_sessions=BATCH[-1], n_voices=1, max_steps=N_STEPS, max_chunk=SPEECH_TOKENS[-1])
    shapes = VocoderShapes(batch=BATCH, speech_tokens=SPEECH_TOKENS, columns=(COLUMNS,))
    vocoder = Vocoder(parts.flow, parts.hift, sizes=sizes, shapes=shapes, steps=(N_STEPS,), kernels="fused")
    config = parts.flow.config
    voice = Voice(
        torch.randint(0, config.vocab_size, (PROMPT_TOKENS,)),
        torch.randn(FRAMES_PER_TOKEN * PROMPT_TOKENS, config.n_mels),
        torch.randn(config.speaker_dim),
    )
    speech_tokens = torch.randint(0, config.vocab_size, (SPEECH_TOKENS[-1] + vocoder.lookahead,)).tolist()
    chunks = [Chunk(vocoder.open(voice), speech_tokens) for _ in range(BATCH[-1])]
    for _ in range(2):
        vocoder.speak(chunks)
    return vocoder
