"""Minimum bytes and operations of one vocoder chunk, from the sizes of its modules."""

from dataclasses import dataclass

from torch import nn

from benchmarks.timing import Ceilings
from models.layers.quantized import QuantizedLinear
from models.token2wav.hift.hift import Hift
from models.token2wav.stream.region_table import VocoderParts
from models.token2wav.stream.vocode import TAIL_FRAMES

# Columns that each stage of HiFT computes per mel frame.
_STAGE_COLUMNS = (8, 40, 120)


@dataclass(frozen=True)
class ChunkWork:
    """Bytes of weights and cached rows, and floating-point operations, of a whole batch."""

    weights: int
    rows: int
    flops: int

    def floor_ms(self, ceilings: Ceilings, dtype: str) -> float:
        """Lower bound of the time: the longer of copying and multiplying."""
        copy_s = (self.weights + self.rows) / ceilings.copy
        return 1e3 * max(copy_s, self.flops / ceilings.matmul[dtype])


def chunk_work(parts: VocoderParts, batch: int, n_steps: int, n_frames: int, n_seen: int) -> ChunkWork:
    """Work of one chunk of `n_frames` mel frames for `batch` sessions that attend to `n_seen` earlier frames."""
    flow, hift = parts.flow, parts.hift
    dit, encoder = flow.decoder.estimator, flow.encoder
    width_bytes = dit.in_proj.weight.element_size()
    dit_weights = _numel(dit.blocks, without="adaLN") + dit.in_proj.weight.numel() + _numel(dit.final_layer, "adaLN")
    encoder_weights = _numel(encoder, without="linear_pos") + _numel(flow.encoder_proj)
    weights = width_bytes * (n_steps * dit_weights + encoder_weights) + sum(p.nbytes for p in hift.parameters())
    # A quantised number takes one byte.
    weights -= (width_bytes - 1) * (n_steps * _quantized(dit) + _quantized(encoder))

    config = flow.config.estimator
    columns, inner = n_seen + n_frames, config.heads * config.head_dim
    # Keys and values of both halves of the batch: all are read, new ones also written.
    rows = batch * n_steps * config.depth * 2 * 2 * inner * width_bytes * (columns + n_frames)

    dit_flops = n_steps * 2 * (2 * dit_weights * n_frames + config.depth * 4 * n_frames * columns * inner)
    code_rate = _numel(encoder.encoders, "linear_pos") + _numel(encoder.pre_lookahead_layer) + _numel(encoder.embed)
    mel_rate = encoder_weights - code_rate
    flops = batch * (dit_flops + 2 * (code_rate * n_frames // 2 + mel_rate * n_frames))
    return ChunkWork(weights, rows, flops + batch * hift_flops(hift, n_frames + TAIL_FRAMES))


def hift_flops(hift: Hift, n_frames: int) -> int:
    """Operations of the convolutions; the rest is small."""
    total = 2 * n_frames * (_numel(hift.f0_predictor) + hift.conv_pre.weight.numel())
    columns = [n_frames * rate for rate in _STAGE_COLUMNS]
    for n, up in enumerate(hift.ups):
        entering = n_frames if n == 0 else columns[n - 1]
        total += 2 * entering * up.weight.numel()  # each input column is multiplied by every tap once
        stages = (hift.source_downs[n], hift.source_resblocks[n], *hift.resblocks[3 * n : 3 * n + 3])
        total += 2 * columns[n] * sum(_numel(stage) for stage in stages)
    return total + 2 * columns[-1] * hift.conv_post.weight.numel()


def _numel(module: nn.Module, without: str = "\0") -> int:
    parameters = (p for name, p in module.named_parameters() if without not in name and not name.endswith(".values"))
    return sum(p.numel() for p in parameters if p.ndim > 1) + _quantized(module)


def _quantized(module: nn.Module) -> int:
    """Numbers in the quantised layers, from their sizes: on a CPU the values may be packed and no parameters."""
    layers = (one for one in module.modules() if isinstance(one, QuantizedLinear))
    return sum(one.out_features * one.in_features for one in layers)
