"""The upsampling conformer (`conformer_*`): whole sequences, chunks over slots, the caches after each chunk."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.weights import on_meta
from models.token2wav.flow.conformer import LOOKAHEAD_TAIL, UP_TAIL, Tails, UpsampleConformer, without_cache
from models.token2wav.flow.flow_state import REFERENCE_FLOW, ChunkSlots, ChunkTokens, FlowSizes, FlowState, encode
from models.token2wav.settings import DiTConfig, EncoderConfig, FlowConfig
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.parity.token2wav.build import (
    filled,
    flow_around,
    flow_config,
    packed_encoder_rows,
    packed_encoder_tails,
    weights_under,
)

TOLERANCE = 2e-5  # the reference in float32 differs from itself in float64 by 3e-6
NO_ESTIMATOR = DiTConfig(width=2, heads=1, head_dim=1, depth=1)


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("conformer_"):
        tensors, settings = golden.tensors(stem), golden.config(stem)
        config, weights = flow_config(settings["config"]).encoder, weights_under(tensors, "w.")
        _offline(stem, config, weights, tensors, report)
        _chunks(stem, config, weights, tensors, settings["chunks"], report)


def _offline(
    stem: str, config: EncoderConfig, weights: dict[str, Tensor], tensors: dict[str, Tensor], report: Report
) -> None:
    if not report.has_inputs(stem, tensors, "in.offline_xs", "in.offline_lens"):
        return
    with on_meta():
        encoder = UpsampleConformer(config)
    encoder = filled(encoder, weights)
    x, n = tensors["in.offline_xs"], tensors["in.offline_lens"].long()
    if (expected := tensors.get("out.offline")) is None:
        return
    got = _with_visible_padding(encoder, x, n)
    for row, frames in enumerate((2 * n).tolist()):
        report.close(f"{stem} {row}", "offline", got[row, :frames], expected[row, :frames], TOLERANCE)
    longest = n == x.shape[1]  # rows without padding
    report.close(stem, "offline entry", encoder.offline(x, n)[longest], expected[longest], TOLERANCE)
    if (mask := tensors.get("out.offline_mask")) is not None:
        report.equal(stem, "offline mask", without_cache(2 * n, got.shape[1]).mask, mask[:, 0].bool())


def _with_visible_padding(encoder: UpsampleConformer, x: Tensor, n: Tensor) -> Tensor:
    """`encoder.offline`, but the lookahead at the end of a shorter row reads the padding, as in the reference."""
    B, T, _ = x.shape
    empty = x.new_zeros(2, 0, encoder.heads, encoder.head_dim)
    caches = tuple([empty] * len(stack) for stack in (encoder.encoders, encoder.up_encoders))
    tails = Tails(x.new_zeros(B, LOOKAHEAD_TAIL, encoder.width), x.new_zeros(B, UP_TAIL, encoder.width))
    mappings = (without_cache(n, T), without_cache(2 * n, 2 * T))
    padded = F.pad(x, (0, 0, 0, encoder.lookahead))
    return encoder(padded, torch.full_like(n, T), n, tails, mappings, caches)[0]


def _chunks(
    stem: str,
    config: EncoderConfig,
    weights: dict[str, Tensor],
    tensors: dict[str, Tensor],
    chunks: list[tuple[int, bool]],
    report: Report,
) -> None:
    """The case contains embedded tokens: they become the embedding table, and the encoder's projection the identity."""
    names = [f"in.chunk{i}" for i in range(len(chunks))]
    if not report.has_inputs(stem, tensors, *names):
        return
    table = torch.cat([tensors[name][0] for name in names])
    flow = flow_around(
        FlowConfig(vocab_size=len(table), n_mels=config.width, encoder=config, estimator=NO_ESTIMATOR),
        {f"encoder.{name}": weight for name, weight in weights.items()}
        | {"input_embedding.weight": table, "encoder_proj.weight": torch.eye(config.width)},
    )
    most, n_frames = max(n for n, _ in chunks), 2 * len(table)
    sizes = FlowSizes(n_sessions=1, n_voices=1, max_steps=1, max_chunk=len(table), max_prompt=n_frames, voice_frames=2)
    state = FlowState(flow, sizes, REFERENCE_FLOW)
    state.prompt.fill_(n_frames)  # longer than the turn, so nothing is trimmed
    first = 0
    for i, (n, last) in enumerate(chunks):
        case, speech_tokens = f"{stem} chunk {i}", torch.arange(first, first + n)
        first += n
        padded = F.pad(speech_tokens, (0, most + config.lookahead - n))[None]
        slots, n_speech_tokens = torch.tensor([0]), torch.tensor([n])
        tokens = ChunkTokens(padded, n_speech_tokens, torch.tensor([last]))
        got = encode(flow, state, ChunkSlots(slots, n_frames), tokens)
        n_new = n if last else n - config.lookahead
        results = {
            "": ("frames", got[:, : 2 * n_new]),
            "_cnn_cache": ("tails", packed_encoder_tails(state, 0)),
            "_att_cache": ("keys and values", packed_encoder_rows(state, 0)),
        }
        for suffix, (name, value) in results.items():
            if suffix == "_cnn_cache" and n_new < LOOKAHEAD_TAIL:
                continue  # the reference keeps fewer frames after such a short end, and does not read them
            report.close_if(case, name, value, tensors.get(f"out.chunk{i}{suffix}"), TOLERANCE)
