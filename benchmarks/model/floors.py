"""Lower bounds of each region: bytes that must move through memory, and floating-point operations.

Counted from the model's tensors: every weight once, of a table only looked-up rows, `kv_len` cache rows of every
slot, new rows written once. Attention counts every query against all `kv_len` rows. Not counted: counters of a few
bytes, values between stages, and copies that another implementation would avoid, such as a gather of the cache before
attention.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.timing import Ceilings
from models.graphs.captured import Bucket
from models.inputs.audio import UNIT_COLUMNS
from models.inputs.audio_sizes import HOP
from models.inputs.mel_stream import MIRRORED_FIRST
from models.layers.apm import UNIT_ROWS
from models.layers.kv_cache import KVCache
from models.layers.transformer import Backbone
from models.stages.region_table import Regions

EVICTED_ROWS = 8  # rows removed by the timed eviction


@dataclass(frozen=True)
class RegionWork:
    """Bytes of weights read and of slot state read and written; floating-point operations of the large products."""

    weights: int = 0
    state: int = 0
    flops: int = 0
    is_float64: bool = False

    def __add__(self, other: "RegionWork") -> "RegionWork":
        return RegionWork(
            self.weights + other.weights,
            self.state + other.state,
            self.flops + other.flops,
            self.is_float64 or other.is_float64,
        )


@dataclass(frozen=True)
class Floor:
    """ms: lower bound of the time. bound: `bytes` or `flops`, the longer of the two."""

    ms: float
    bound: str


def floor(work: RegionWork, io_bytes: int, ceilings: Ceilings, dtype: str) -> Floor:
    """The longer of the two times at the device's measured rates. io_bytes: inputs and outputs."""
    bytes_ms = (work.weights + work.state + io_bytes) / ceilings.copy * 1e3
    flops_ms = work.flops / ceilings.matmul["float64" if work.is_float64 else dtype] * 1e3
    return Floor(bytes_ms, "bytes") if bytes_ms >= flops_ms else Floor(flops_ms, "flops")


def work_of(regions: Regions, name: str, bucket: Bucket) -> RegionWork | None:
    """The region's minimum work for one bucket; None for a region without a count."""
    count = _COUNTS.get(name)
    return count(regions, bucket) if count else None


def tensor_bytes(values: object) -> int:
    """Bytes of all tensors in nested tuples and lists."""
    if isinstance(values, Tensor):
        return values.nbytes
    return sum(map(tensor_bytes, values)) if isinstance(values, tuple | list) else 0


def _weights(*modules: nn.Module, without: Iterable[Tensor] = ()) -> int:
    left_out = {id(tensor) for tensor in without}
    return sum(p.nbytes for module in modules for p in module.parameters() if id(p) not in left_out)


def _rows(table: Tensor, n: int) -> int:
    """Bytes of n looked-up rows, each table row at most once."""
    return min(n, table.shape[0]) * table[0].nbytes


def _linears(module: nn.Module, n_rows: int) -> int:
    """Operations of all matrices of a module applied to n_rows rows; vectors (norms, biases) are not counted."""
    return 2 * n_rows * sum(p.numel() for p in module.parameters() if p.ndim > 1)


def _attention(n_layers: int, n_queries: int, n_keys: int, width: int) -> int:
    """Scores and weighted sums; width is heads times head width."""
    return 4 * n_layers * n_queries * n_keys * width


def _cache_row(cache: KVCache) -> int:
    """Bytes of one row of one slot, keys and values of all layers."""
    return sum(tensor[0, :, 0].nbytes for tensor in (*cache.k, *cache.v))


def _decoder(backbone: Backbone, cache: KVCache, batch: int, rows: int, kv_len: int) -> RegionWork:
    layers, attn = backbone.layers, backbone.layers[0].self_attn
    n = batch * rows
    return RegionWork(
        weights=_weights(layers, backbone.norm),
        state=batch * (kv_len + rows) * _cache_row(cache),
        flops=_linears(layers, n) + _attention(len(layers), n, kv_len, attn.heads * attn.head_dim),
    )


def _vision(regions: Regions, b: Bucket) -> RegionWork:
    vpm, resampler = regions.model.vpm, regions.model.resampler
    config = regions.model.config
    n, length = b["slices"], b["patches"]
    patches, queries = n * length, n * config.query_num
    positions = vpm.embeddings.position_embedding.weight
    waves = min(2 * patches, config.vision_config.table_side) * resampler.waves[0].nbytes
    layers = vpm.encoder.layers
    square = resampler.width**2
    flops = (
        _linears(vpm.embeddings.patch_embedding, patches)
        + _linears(layers, patches)
        + _attention(len(layers), patches, length, config.vision_config.hidden_size)
        + _linears(resampler.kv_proj, patches)
        + 2 * (2 * patches + 3 * queries) * square  # keys, values; queries, output, projection
        + _attention(1, queries, length, resampler.width)
    )
    return RegionWork(_weights(vpm, resampler, without=[positions]) + _rows(positions, patches) + waves, 0, flops)


def _audio_encoder(regions: Regions, clips: int, frames: int, rows: int, keys: int, positions: int) -> RegionWork:
    """frames: columns of both convolutions; rows: encoder rows per clip; keys: rows that each row attends to."""
    apm = regions.model.apm
    table = apm.embed_positions.weight
    n = clips * rows
    flops = (
        _linears(apm.conv1, clips * frames)
        + _linears(apm.conv2, clips * (frames + 1) // 2)
        + _linears(apm.layers, n)
        + _attention(len(apm.layers), n, keys, table.shape[1])
    )
    return RegionWork(_weights(apm, without=[table]) + _rows(table, positions), 0, flops)


def _audio_projector(regions: Regions, n_rows: int) -> RegionWork:
    projector = regions.model.audio_projection_layer
    return RegionWork(_weights(projector), 0, _linears(projector, n_rows))


def _clips(regions: Regions, b: Bucket) -> RegionWork:
    n, rows = b["batch"], (b["frames"] + 1) // 2
    encoder = _audio_encoder(regions, n, b["frames"], rows, rows, positions=rows)
    return encoder + _audio_projector(regions, n * rows)


def _audio_unit(regions: Regions, b: Bucket) -> RegionWork:
    n, keys = b["batch"], regions.model.apm.max_positions
    encoder = _audio_encoder(regions, n, UNIT_COLUMNS, UNIT_ROWS, keys, positions=n * UNIT_ROWS)
    cache = RegionWork(state=n * (keys + UNIT_ROWS) * _cache_row(regions.state.apm))
    return encoder + _audio_projector(regions, n * UNIT_ROWS) + cache


def _audio_overlap(regions: Regions, b: Bucket) -> RegionWork:
    """One clip of the remembered units with their surrounding frames, which attends only to its own rows."""
    n, heard = b["batch"], regions.state.recent_mel
    n_units = heard.mel.shape[1] - 1
    rows = n_units * UNIT_ROWS
    encoder = _audio_encoder(regions, n, n_units * UNIT_COLUMNS, rows, rows, positions=rows)
    return encoder + RegionWork(state=n * (n_units * heard.mel[0, 0].nbytes + rows * _cache_row(regions.state.apm)))


def _mel_unit(regions: Regions, b: Bucket) -> RegionWork:
    log_mel, state = regions.table["mel_unit"].bound[0], regions.state.mel
    n, new = b["batch"], b["samples"] // HOP
    computed = -(-b["samples"] // HOP) + MIRRORED_FIRST + 1  # the window's first two and its mirrored last frame
    frame = state.raw[0, 0].nbytes
    per_slot = 2 * state.tail[0].nbytes + (new + UNIT_COLUMNS) * frame + state.frame_max[0].nbytes + 4 * new
    return RegionWork(
        weights=log_mel.basis.nbytes + log_mel.filters.nbytes,
        state=n * per_slot,
        flops=2 * n * computed * (log_mel.basis.numel() + log_mel.filters.numel()),
        is_float64=True,
    )


def _llm(regions: Regions, batch: int, rows: int, kv_len: int) -> RegionWork:
    llm = regions.model.llm
    ends = RegionWork(
        weights=_weights(llm.lm_head) + _rows(llm.model.embed_tokens.weight, batch * rows),
        flops=_linears(llm.lm_head, batch),
    )
    return _decoder(llm.model, regions.state.llm, batch, rows, kv_len) + ends


def _choose(regions: Regions, b: Bucket) -> RegionWork:
    sets = regions.table["unit_step"].bound[2]
    masks = sum(_rows(mask, b["batch"]) for mask in (sets.forbidden, sets.length_ids))
    return RegionWork(weights=masks, state=b["batch"] * regions.state.text.history[0].nbytes)


def _unit_prefill(regions: Regions, b: Bucket) -> RegionWork:
    return _llm(regions, b["batch"], b["rows"], b["kv"]) + _choose(regions, b)


def _unit_step(regions: Regions, b: Bucket) -> RegionWork:
    kept = RegionWork(state=b["batch"] * regions.state.hidden[0, 0].nbytes)  # the token's hidden state, for speech
    return _llm(regions, b["batch"], 1, b["kv"]) + _choose(regions, b) + kept


def _llm_evict(regions: Regions, b: Bucket) -> RegionWork:
    cache = regions.state.llm
    moved = cache.max_len - EVICTED_ROWS  # read and written once; freed rows are zeroed
    return RegionWork(state=b["batch"] * (2 * moved + EVICTED_ROWS) * _cache_row(cache))


def _reset(regions: Regions, b: Bucket) -> RegionWork:
    """Every byte of the slots written once."""
    return RegionWork(state=b["batch"] * sum(tensor[0].nbytes for tensor in regions.state.tensors()))


def _spoken_rows(regions: Regions, b: Bucket) -> RegionWork:
    tts, n = regions.model.tts, b["batch"] * b["spoken"]
    table = _rows(tts.emb_text.weight, n + 2)  # two more: end of text and begin of audio
    hidden = n * regions.state.hidden[0, 0].nbytes
    return RegionWork(_weights(tts.projector_semantic) + table, hidden, _linears(tts.projector_semantic, n))


def _speech(regions: Regions, batch: int, rows: int, kv_len: int, looked_up: int) -> RegionWork:
    tts = regions.model.tts
    head = tts.head_code[0].weight
    ends = RegionWork(
        weights=head.nbytes + _rows(tts.emb_code[0].weight, looked_up),
        flops=2 * batch * head.numel(),
    )
    return _decoder(tts.model, regions.state.speech.cache, batch, rows, kv_len) + ends


_COUNTS: dict[str, Callable[[Regions, Bucket], RegionWork]] = {
    "vision": _vision,
    "clips": _clips,
    "mel_unit": _mel_unit,
    "audio_unit": _audio_unit,
    "audio_overlap": _audio_overlap,
    "unit_prefill": _unit_prefill,
    "unit_step": _unit_step,
    "llm_evict": _llm_evict,
    "reset": _reset,
    "spoken_rows": _spoken_rows,
    "speech_begin": lambda regions, b: _speech(regions, b["batch"], b["tokens"] + 2, b["kv"], looked_up=0),
    "speech_step": lambda regions, b: _speech(regions, b["batch"], 1, b["kv"], looked_up=b["batch"]),
}
