"""The launches of the project's kernels at the released sizes, as its functions make them on a target, without a GPU.

Contains the calls, on tensors without data, and what stands for the device in them. Does not contain the kernels of
quantised weights, whose types depend on the target, nor the compiler (`targets`).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

from benchmarks.kernels.attention import SHAPES, AttentionShape, Operands
from benchmarks.kernels.rows import EPS, N_SPEECH_TOKENS, N_TOKENS
from benchmarks.kernels.timing import Meter
from models.kernels import frame_state, launch
from models.kernels.attention import AttentionInputs, slot_attention_pairs
from models.kernels.bf12 import GROUP, GROUP_WORDS, LEAST_ENTRIES, Bf12Matrix
from models.kernels.bf12_gemm import bf12_gated_linear, bf12_parts
from models.kernels.lookup import newest_rows, store_rows, table_rows
from models.kernels.moved_rows import close_gaps, restore_keys
from models.kernels.new_rows import new_rows
from models.kernels.paired_rows import paired_rows
from models.kernels.rows import (
    CacheRows,
    HeadNorms,
    add_layer_norm,
    add_rms_norm,
    add_rms_norm_pairs,
    qkv_rows,
    silu_mul,
)
from models.kernels.samplers.code_sampler import CodeSamplerSettings, draw_code
from models.kernels.samplers.speech_sampler import draw_speech_tokens
from models.kernels.samplers.text_sampler import choose_tokens
from models.kernels.skinny_gemm import MAX_ROWS, TILE_SIZES, skinny_gated_linear, skinny_linear
from models.layers.kv_cache import KVCache
from models.layers.speech_state import SpeechState
from models.qwen3_tts.state import GROUPS as CODES
from models.sampling.text import SamplerState, TokenSet, TokenSets
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_fused import FusedFlow
from models.token2wav.flow.flow_state import ChunkSlots, ChunkTokens, FlowSizes, FlowState, SolveInputs
from models.token2wav.hift.hift import Hift
from models.token2wav.hift.hift_fused import FusedHift
from models.token2wav.hift.spectral import N_BINS
from models.token2wav.settings import FRAMES_PER_TOKEN, FlowConfig, HiftConfig

META, GPU = torch.device("meta"), torch.device("cuda", 0)
BF16 = torch.bfloat16
Call = tuple[str, Callable[[], object]]
# Packed gate and up weights (N, K): of the language model, the `tts` model, and Qwen3-TTS of 1.7B and 0.6B.
GATED = ((24576, 4096), (6144, 768), (12288, 2048), (6144, 1024))
TALKER_HEAD = (3072, 2048)  # of Qwen3-TTS 1.7B, with the tiles of other weights
# Heads, key heads, head width, with head norms: of the language model, the `tts` model and Qwen3-TTS.
HEADS = ((32, 8, 128, True), (12, 12, 64, False), (16, 8, 128, True))
QWEN_DECODE = AttentionShape("talker", 1, H=16, KV=8, D=128, L=4096)
CODE_VOCABULARIES = ((3072, 2048), (2048, 1024))  # codes, width of their rows
CHUNKS = ((1, 8), (1, 16), (1, 17), (2, 17), (32, 28))  # sessions and speech tokens of one call of the vocoder
KEYS = 400  # cached mel frames that a chunk attends to


class KernelLaunch(NamedTuple):
    """A call of a kernel. args: with a `MockTensor` for each tensor."""

    name: str
    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> Any:
        """The kernel for the target of `compiling_for`; the same object for the same types and constants."""
        return self.kernel.warmup(*self.args, grid=(1,), **self.options)


class TargetDriver:
    """Stands for Triton's driver of a device of one capability. Its number is the capability: caches are by device."""

    def __init__(self, capability: int):
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Inside, Triton compiles for a target and launches are impossible."""
    with patch.object(type(triton.runtime.driver), "active", TargetDriver(capability)):
        yield


@contextmanager
def _standing_for(capability: int, shared_bytes: int) -> Iterator[None]:
    """Inside, tensors without data are on a device of this capability for the functions of `models.kernels.launch`."""

    def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda device, *args: function(GPU if device.type == "meta" else device, *args)

    with ExitStack() as stack:
        stack.enter_context(patch.object(launch, "_capability", lambda index: divmod(capability, 10)))
        stack.enter_context(patch.object(launch, "_shared_memory", lambda index: shared_bytes))
        stack.enter_context(patch.object(launch, "_has_pdl", lambda index: capability >= 90))
        for name in ("launch_options", "has_large_tiles", "has_native_fp8", "multiplies_pairs"):
            function = getattr(launch, name)
            for module in [one for one in sys.modules.values() if getattr(one, name, None) is function]:
                stack.enter_context(patch.object(module, name, on_gpu(function)))
        yield


def launches(group: str, capability: int, shared_bytes: int) -> list[KernelLaunch]:
    """The launches of one of GROUPS on a target, in their order; some compile to the same kernel."""
    found: list[KernelLaunch] = []
    name = ""

    def record(kernel: JITFunction[Any], *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        mocked = tuple(MockTensor(one.dtype) if isinstance(one, Tensor) else one for one in args)
        columns = "".join(f", {options[key]} columns" for key in ("K", "C") if key in options)
        short = kernel.__name__.strip("_").removesuffix("_kernel")
        found.append(KernelLaunch(f"{short} {name}{columns}", kernel, mocked, options))

    with torch.no_grad(), _standing_for(capability, shared_bytes), patch.object(JITFunction, "run", record):
        for call_name, call in GROUPS[group](capability):
            name = call_name
            call()
    return found


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _products(capability: int) -> Iterator[Call]:
    for N, K in (*TILE_SIZES, TALKER_HEAD):
        for rows in (1, MAX_ROWS):
            if (N, K) not in GATED:
                yield f"{N} x {K}, {rows} rows", partial(skinny_linear, _empty(rows, K), _empty(N, K))
    for N, K in GATED:
        for rows in (1, MAX_ROWS):
            yield f"gate and up {N} x {K}, {rows} rows", partial(skinny_gated_linear, _empty(rows, K), _empty(N, K))


def _copies(capability: int) -> Iterator[Call]:
    """Products with the language model's weights in 12 bits."""
    for N, K in ((24576, 4096), (4096, 12288)):
        weight = Bf12Matrix(
            _empty(N, K // GROUP * GROUP_WORDS, dtype=torch.int32),
            _empty(N, dtype=torch.uint8),
            _empty(LEAST_ENTRIES, N, dtype=torch.int32),
        )
        for rows in (1, 16, 32, 64):
            if N > K:
                yield f"gate and up in 12 bits, {rows} rows", partial(bf12_gated_linear, _empty(rows, K), weight)
            else:
                yield f"down in 12 bits, {rows} rows", partial(bf12_parts, _empty(rows, K), weight)


def _attention(capability: int) -> Iterator[Call]:
    meter = Meter(META)
    pool = _empty(2**32)
    for shape, *sizes in (*SHAPES, (QWEN_DECODE, 1, 512, 512)):
        operands = Operands(meter, pool, shape, *sizes)
        yield f"{shape.name} of {shape.T} rows", partial(operands.ours, 0)
        if operands.pages is not None:
            yield f"pages, {shape.name} of {shape.T} rows", partial(operands.paged, 0)
        if capability == 90 and shape.D == 128:
            inputs = AttentionInputs(operands.q[0], *operands.kv[0], operands.slots, None, operands.last)
            for kind in ("int8", "fp8"):
                pairs = partial(slot_attention_pairs, inputs, kind, most=operands.most)
                yield f"{kind} pairs, {shape.name} of {shape.T} rows", pairs


def _rows(capability: int) -> Iterator[Call]:
    for width in (4096, 2048, 1024, 768):
        x, weight = _empty(1, width), _empty(width)
        for parts in (0, 1, 4, 6, 8):
            added = _empty(parts, 1, width, dtype=torch.float32) if parts > 1 else x if parts else None
            yield f"{width} columns, {parts} parts", partial(add_rms_norm, x, added, weight, EPS)
            if capability == 90 and width == 4096:
                yield (
                    f"{width} columns, {parts} parts, pairs",
                    partial(add_rms_norm_pairs, x, added, weight, EPS, "fp8"),
                )
    for width in (1152, 1024):
        x, weight = _empty(1, width), _empty(width)
        yield f"layer norm, {width} columns", partial(add_layer_norm, x, x, weight, weight, EPS)
    places = _empty(1, 1, dtype=torch.int64)
    for heads, kv_heads, D, has_norms in HEADS:
        cache = CacheRows(places, places, *(_empty(2, kv_heads, 4096, D) for _ in range(2)))
        cos = _empty(1, 1, D // 2, dtype=torch.float32)
        norms = HeadNorms(_empty(D), _empty(D), EPS) if has_norms else None
        for parts in (1, 2, 3, 4, 8):
            qkv = _empty(1, 1, (heads + 2 * kv_heads) * D)
            qkv = qkv if parts == 1 else qkv.float().expand(parts, -1, -1, -1)
            name = f"{heads} heads of {D}, {parts} parts"
            yield name, partial(qkv_rows, qkv, heads, kv_heads, cache, (cos, cos), norms)
    cache = CacheRows(places, places, *(_empty(2, 16, 1501, 64) for _ in range(2)))
    yield "16 heads of 64", partial(qkv_rows, _empty(1, 1, 48 * 64), 16, 16, cache)
    yield "12288 columns", partial(silu_mul, _empty(96, 2 * 12288))


def _samplers(capability: int) -> Iterator[Call]:
    slots, active = _empty(1, dtype=torch.int64), _empty(1, dtype=torch.bool)
    sets = TokenSets.build([TokenSet()], N_TOKENS, META)
    logits, sampler = _empty(1, N_TOKENS, dtype=torch.float32), SamplerState.allocate(1, device=META)
    yield "text", partial(choose_tokens, sampler, sets, slots, logits, active, active)
    cache = KVCache(n_layers=1, n_slots=1, max_len=8, kv_heads=1, head_dim=64, dtype=BF16, device=META)
    state = SpeechState.allocate(cache)
    yield "speech", partial(draw_speech_tokens, state, slots, _empty(1, N_SPEECH_TOKENS), active)
    flags, numbers, fractions = (_empty(2, 2, dtype=one) for one in (torch.bool, torch.int64, torch.float32))
    settings = CodeSamplerSettings(_empty(2, dtype=torch.int64), flags, fractions, numbers, fractions)
    for n_codes, width in CODE_VOCABULARIES:
        for table in (None, _empty(n_codes, width)):
            name = f"{n_codes} codes" + ("" if table is None else f", rows of {width}")
            yield name, partial(draw_code, _empty(1, n_codes), slots, settings, slots, 0, table)


def _steps(capability: int) -> Iterator[Call]:
    """Between the passes of a step: lookups, and addresses of new and moved rows."""
    slots, flags = _empty(1, dtype=torch.int64), _empty(2, dtype=torch.bool)
    for V, W in ((N_TOKENS, 4096), (N_SPEECH_TOKENS, 768)):
        table = _empty(V, W)
        yield f"{W} columns", partial(table_rows, table, slots)
        yield f"{W} columns", partial(newest_rows, table, slots, _empty(2, dtype=torch.int64), flags)
    target = _empty(2, 64, 4096)
    yield "4096 columns", partial(store_rows, target, slots, slots, flags[:1], _empty(1, 4096))
    for _, kv_heads, D, _ in HEADS:
        cache = KVCache(
            n_layers=1, n_slots=1, max_len=4096, kv_heads=kv_heads, head_dim=D, dtype=BF16, device=META
        )  # fmt: skip
        frequencies = _empty(D // 2, dtype=torch.float32)
        name = f"{kv_heads} heads of {D}"
        yield name, partial(new_rows, cache, slots, slots, 1, 2048, frequencies)
        yield name, partial(close_gaps, cache, slots, slots, slots)
        yield name, partial(restore_keys, cache, 0, _empty(1, kv_heads, 4096, D), 64, 64, frequencies)
    for kind in ("int8", "fp8") if capability == 90 else ():
        yield f"of 4096 columns, {kind}", partial(paired_rows, _empty(1, 4096), kind)


def _frames(capability: int) -> Iterator[Call]:
    """Of a frame of Qwen3-TTS 1.7B, whose code predictor is as wide as the talker of 0.6B."""

    def whole(*shape: int) -> Tensor:
        return _empty(*shape, dtype=torch.int64)

    def flags(*shape: int) -> Tensor:
        return _empty(*shape, dtype=torch.bool)

    (V, W), (K, _) = CODE_VOCABULARIES
    state = SimpleNamespace(
        hidden=_empty(2, W), row=_empty(2, W), frames=whole(2), limit=whole(2), seen=flags(2, V), done=flags(2),
        text=whole(2, 4096), text_len=whole(2), text_open=flags(2),
        repetition_penalty=_empty(2, dtype=torch.float32),
    )  # fmt: skip
    cache = KVCache(n_layers=1, n_slots=1, max_len=16, kv_heads=8, head_dim=128, dtype=BF16, device=META)
    slots, hidden, rows, drawn, active = whole(1), _empty(1, W), _empty(V, W), (whole(1), flags(1)), flags(1)
    tables = rows, _empty(CODES - 1, K, W)
    yield "frame", partial(frame_state.begin_frame, state, slots, _empty(N_TOKENS, W), 0)
    yield "frame", partial(frame_state.keep_hidden, state, slots, hidden, slots)
    yield "frame", partial(frame_state.first_scores, state, slots, _empty(1, V), 1, 2, 2, CODES)
    yield "frame", partial(frame_state.begin_codes, cache, slots, hidden, rows, drawn, active, 1)
    codes, usable = whole(1, CODES), flags(1)
    yield "frame", partial(frame_state.end_frame, state, slots, codes, slots, active, drawn, usable, tables, 1)


def _flow(capability: int) -> Iterator[Call]:
    with META:
        flow = Flow(FlowConfig()).to(BF16)
        schedule = flow.schedule(1)
    backend = FusedFlow(flow)
    for n, n_tokens in CHUNKS:
        state = FlowState(flow, FlowSizes(n, 1, max_steps=1))
        slots, counts = ChunkSlots(_empty(n, dtype=torch.int64), KEYS), _empty(n, dtype=torch.int64)
        ids = _empty(n, n_tokens + flow.config.encoder.lookahead, dtype=torch.int64)
        tokens = ChunkTokens(ids, counts, _empty(n, dtype=torch.bool))
        name = f"{n} x {n_tokens} speech tokens"
        yield f"encoder, {name}", partial(backend.encode, state, slots, tokens)
        noise = _empty(4096, flow.config.n_mels, dtype=torch.float32)
        mu = _empty(n, FRAMES_PER_TOKEN * n_tokens, flow.config.n_mels)
        yield f"solve, {name}", partial(backend.solve, state, slots, SolveInputs(schedule, noise, mu, counts))


def _hift(capability: int) -> Iterator[Call]:
    with META:
        hift = Hift(HiftConfig()).to(BF16)
    backend = FusedHift(hift)
    for n, n_tokens in CHUNKS:
        T = FRAMES_PER_TOKEN * n_tokens
        mel, waves = _empty(n, 80, T, dtype=torch.float32), _empty(n, 2 * N_BINS, 120 * T + 1, dtype=torch.float32)
        counts = _empty(n, dtype=torch.int64)
        yield f"{n} x {n_tokens} speech tokens", partial(backend.spectrum, mel, waves, counts)


GROUPS: dict[str, Callable[[int], Iterator[Call]]] = {
    "products": _products,
    "copies": _copies,
    "attention": _attention,
    "rows": _rows,
    "samplers": _samplers,
    "steps": _steps,
    "frames": _frames,
    "flow": _flow,
    "hift": _hift,
}
