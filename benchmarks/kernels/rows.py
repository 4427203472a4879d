"""Row kernels between a layer's GEMMs compared with plain modules, and sampling kernels with plain operations.

Inputs stay in the L2 cache, because in a model the kernel before has just written them.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.kernels.timing import Case, Figures, Meter, relative_error
from models.kernels.fused_decoder import STEP_WARPS
from models.kernels.rows import CacheRows, HeadNorms, add_layer_norm, add_rms_norm, qkv_rows, silu_mul
from models.kernels.samplers import speech_sampler as speech_kernels
from models.kernels.samplers import text_sampler as token_kernels
from models.layers import speech_loop as speech
from models.layers.kv_cache import KVCache
from models.layers.rotary import rotary_angles, rotary_frequencies, rotate
from models.layers.speech_state import SPEECH_TOKENS_PER_CALL, SpeechState
from models.layers.transformer import RMSNorm
from models.sampling.settings import CHAT_TEXT, DUPLEX_SPEECH, DUPLEX_TEXT, TextSampling
from models.sampling.text import SamplerState, TokenSet, TokenSets
from models.stages import regions

EPS, THETA = 1e-6, 1e6
CALLS = 24  # in one graph
MAX_STEP_ROWS = 32  # with up to as many rows, one of each slot, norms run as in a step
N_SPEECH_TOKENS, N_TOKENS = 6562, 151748

Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]  # a kernel and the plain operation it replaces


def row_cases(meter: Meter) -> Iterator[Case]:
    norms = ((1, 4096, 0), (1, 4096, 4), (32, 4096, 0), (96, 4096, 0), (1, 768, 0), (32, 768, 0))
    layer_norms = ((1088, 1152), (50, 1024))
    heads = ((1, 1, 32, 8, 128), (32, 1, 32, 8, 128), (1, 96, 32, 8, 128), (1, 1, 12, 12, 64), (32, 1, 12, 12, 64))
    gates = ((1, 12288), (32, 12288), (96, 12288), (1, 3072), (32, 3072))
    if meter.is_tiny:
        norms, layer_norms, heads, gates = ((2, 48, 0), (2, 48, 3)), ((3, 40),), ((1, 2, 2, 1, 16),), ((2, 40),)
    for rows, width, parts in norms:
        sizes = {"rows": rows, "width": width} | ({"parts": parts} if parts else {})
        yield Case("add_rms_norm", sizes, partial(_measure_pair, meter, _rms_norm, rows, width, parts))
    for rows, width in layer_norms:
        yield Case(
            "add_layer_norm", {"rows": rows, "width": width}, partial(_measure_pair, meter, _layer_norm, rows, width)
        )
    for batch, rows, n, kv, width in heads:
        sizes = {"batch": batch, "rows": rows, "heads": n, "kv": kv, "width": width}
        yield Case("qkv_rows", sizes, partial(_measure_pair, meter, _heads, batch, rows, n, kv, width))
    for rows, width in gates:
        yield Case("silu_mul", {"rows": rows, "width": width}, partial(_measure_pair, meter, _gate, rows, width))


def speech_token_cases(meter: Meter) -> Iterator[Case]:
    for batch in (2,) if meter.is_tiny else (1, 8, 32):
        yield Case("draw_codes", {"batch": batch}, partial(_measure_draw, meter, batch))


def token_cases(meter: Meter) -> Iterator[Case]:
    settings = {"duplex": DUPLEX_TEXT, "greedy": TextSampling(greedy=True), "chat": CHAT_TEXT, "all": TextSampling()}
    for batch in (2,) if meter.is_tiny else (1, 8, 32, 64):
        for name, one in list(settings.items())[: 1 if meter.is_tiny else None]:
            yield Case("choose_tokens", {"batch": batch, "settings": name}, partial(_measure_choice, meter, batch, one))


def _measure_pair(meter: Meter, make: Callable[..., Pair], *sizes: int) -> Figures:
    kernel, plain = make(meter, *sizes)
    error = relative_error(kernel(), plain())
    return {
        "ours_us": meter.time_us(lambda i: kernel(), CALLS),
        "plain_us": meter.time_us(lambda i: plain(), CALLS),
        "error": error,
    }


def _rms_norm(meter: Meter, rows: int, width: int, n_parts: int) -> Pair:
    norm = RMSNorm(width, EPS).to(meter.device, meter.dtype).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    x, added = meter.randn(rows, width), meter.randn(rows, width)
    if n_parts:
        added = meter.randn(n_parts, rows, width, dtype=torch.float32)

    def plain() -> Tensor:
        return norm(x + (added.sum(0).to(x.dtype) if n_parts else added))

    warps = STEP_WARPS if rows <= MAX_STEP_ROWS else 0
    return lambda: add_rms_norm(x, added, norm.weight, EPS, warps)[1], plain


def _layer_norm(meter: Meter, rows: int, width: int) -> Pair:
    norm = nn.LayerNorm(width, EPS).to(meter.device, meter.dtype).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    norm.bias.uniform_(-1, 1)
    x, added = meter.randn(rows, width), meter.randn(rows, width)
    return lambda: add_layer_norm(x, added, norm.weight, norm.bias, EPS)[1], lambda: norm(x + added)


def _heads(meter: Meter, batch: int, rows: int, heads: int, kv_heads: int, D: int) -> Pair:
    """Heads of the language model's width have norms; others do not."""
    device, length = meter.device, 2048
    caches = [torch.zeros(batch, kv_heads, length, D, dtype=meter.dtype, device=device) for _ in range(4)]
    qkv = meter.randn(batch, rows, (heads + 2 * kv_heads) * D)
    norms = [RMSNorm(D, EPS).to(device, meter.dtype).requires_grad_(False) for _ in range(2)]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5)
    has_norms = D == 128 or meter.is_tiny
    weights = HeadNorms(norms[0].weight, norms[1].weight, EPS) if has_norms else None
    slots = torch.arange(batch, device=device)[:, None].expand(batch, rows).contiguous()
    index = (length - rows + torch.arange(rows, device=device)).expand(batch, rows).contiguous()
    cos, sin = rotary_angles(index, rotary_frequencies(D, THETA, device))

    def kernel() -> Tensor:
        return qkv_rows(qkv, heads, kv_heads, CacheRows(slots, index, *caches[:2]), (cos, sin), weights)

    def plain() -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, D)) for part in qkv.split([heads * D, kv_heads * D, kv_heads * D], -1))
        if has_norms:
            q, k = norms[0](q), norms[1](k)
        q, k = (rotate(part, cos.unsqueeze(2), sin.unsqueeze(2)) for part in (q, k))
        caches[2][slots, :, index], caches[3][slots, :, index] = k, v
        return q

    return kernel, plain


def _gate(meter: Meter, rows: int, width: int) -> Pair:
    x = meter.randn(rows, 2 * width)
    gate, up = x.chunk(2, -1)
    return lambda: silu_mul(x), lambda: F.silu(gate) * up


def _measure_draw(meter: Meter, batch: int) -> Figures:
    n_speech_tokens = 62 if meter.is_tiny else N_SPEECH_TOKENS
    states = [_speech_state(meter, batch, n_speech_tokens) for _ in range(2)]
    slots = torch.arange(batch, device=meter.device)
    active = torch.ones(batch, dtype=torch.bool, device=meter.device)
    logits = meter.randn(batch, n_speech_tokens, scale=3.0)
    calls = [
        partial(draw, state, slots, logits, active)
        for draw, state in zip((speech_kernels.draw_speech_tokens, speech.draw_speech_tokens), states, strict=True)
    ]
    is_same = all(torch.equal(calls[0](), calls[1]()) for _ in range(3))
    ours, plain = (meter.time_us(lambda i, call=call: call(), CALLS) for call in calls)
    return {"ours_us": ours, "plain_us": plain, "same_codes": is_same}


def _measure_choice(meter: Meter, batch: int, settings: TextSampling) -> Figures:
    n_tokens = 600 if meter.is_tiny else N_TOKENS
    sets = TokenSets.build([TokenSet(forbidden=(7,), length_ids=(8,), listen_id=9, stop_id=10)], n_tokens, meter.device)
    states = [SamplerState.allocate(batch, device=meter.device) for _ in range(2)]
    for state in states:
        for slot in range(batch):
            state.configure(slot, settings, seed=slot)
    slots = torch.arange(batch, device=meter.device)
    active = torch.ones(batch, dtype=torch.bool, device=meter.device)
    logits = meter.randn(batch, n_tokens, dtype=torch.float32, scale=3.0)
    calls = [
        partial(choose, state, sets, slots, logits, active, active)
        for choose, state in zip((token_kernels.choose_tokens, regions.choose), states, strict=True)
    ]
    is_same = all(torch.equal(calls[0](), calls[1]()) for _ in range(3))
    ours, plain = (meter.time_us(lambda i, call=call: call(), CALLS) for call in calls)
    return {"ours_us": ours, "plain_us": plain, "same_tokens": is_same}


def _speech_state(meter: Meter, batch: int, n_speech_tokens: int) -> SpeechState:
    """Speech state in a call that does not end."""
    cache = KVCache(
        n_layers=1, n_slots=batch, max_len=8, kv_heads=1, head_dim=4, dtype=meter.dtype, device=meter.device
    )
    state = SpeechState.allocate(cache)
    for slot in range(batch):
        state.sampler.configure(slot, DUPLEX_SPEECH, n_speech_tokens - 1, seed=slot)
    for tensor in (state.sampler.min_speech_tokens, state.limit):
        tensor.fill_(SPEECH_TOKENS_PER_CALL)
    state.done.fill_(False)
    return state
