"""The model over whole conversations, with gradients: the modules of serving, fed with all rows at once.

Rows of a batch are slots of a cache that lives for one pass, so masks and positions are those of serving.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs.audio import LogMel, conv_length
from models.layers.apm import UNIT_ROWS, project
from models.layers.kv_cache import KVCache
from models.omni import OmniModel
from training.mind.inputs import Example
from training.timelines.layout import NOTHING, PICTURE, SOUND

REFERENCE_CHUNK_ROWS = 50  # encoder rows that a row of the reference voice sees ahead at most


@dataclass(frozen=True)
class Predictions:
    """Logits of all learned rows of a batch.

    Args:
        logits: [N, V] float32.
        targets: [N] the token that follows.
        is_decision: [N] whether it is the first token of its unit.
    """

    logits: Tensor
    targets: Tensor
    is_decision: Tensor


def encode_units(model: OmniModel, mel: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """Rows of units [S, K, 10, D]; arguments as in `Example`."""
    n_segments, n_units = end.shape
    config = model.config.audio_config
    heads = config.encoder_attention_heads
    cache = KVCache(
        n_layers=config.encoder_layers,
        n_slots=n_segments,
        max_len=n_units * UNIT_ROWS,
        kv_heads=heads,
        head_dim=config.d_model // heads,
        dtype=model.dtype,
        device=model.device,
    )
    slots = torch.arange(n_segments, device=model.device)
    hidden = model.apm.refill(mel.to(model.dtype), first, end, cache, slots, torch.ones_like(slots, dtype=torch.bool))
    rows = project(model.audio_projection_layer, model.apm.layer_norm(hidden), model.config.audio_pool_step)
    n_rows = rows.shape[1] // n_units
    return rows.view(n_segments, n_units, n_rows, -1)


def encode_reference(model: OmniModel, samples: Tensor) -> Tensor:
    """Rows [n, D] of the reference voice."""
    n = torch.tensor([len(samples)])
    mel = LogMel(n_mels=model.config.audio_config.num_mel_bins).log_mel(samples[None], n).to(model.device)
    n_frames = torch.tensor([mel.shape[-1]], device=model.device)
    n_keys = torch.tensor([conv_length(mel.shape[-1])], device=model.device)
    return model.encode_clips(mel, n_frames, n_keys, REFERENCE_CHUNK_ROWS)[0]


def run_context(model: OmniModel, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """States [B, T, D] of all rows of a batch of sequences, and their kinds and targets, [B, T] each."""
    device, n_max = model.device, max(len(one.rows) for one in examples)
    ids = torch.zeros(len(examples), n_max, dtype=torch.int64)
    kinds, targets = torch.zeros_like(ids), torch.full_like(ids, NOTHING)
    for row, one in enumerate(examples):
        n = len(one.rows)
        for table, values in ((ids, one.rows.ids), (kinds, one.rows.kinds), (targets, one.rows.targets)):
            table[row, :n] = torch.from_numpy(values)
    ids, kinds, targets = ids.to(device), kinds.to(device), targets.to(device)
    embeds = model.llm.embed(ids, model.backend)
    for kind, rows in ((SOUND, _sound_rows(model, examples)), (PICTURE, _picture_rows(model, examples))):
        if rows is not None:
            embeds = embeds.masked_scatter((kinds == kind)[..., None], rows.to(embeds.dtype))
    config = model.config
    cache = KVCache(
        n_layers=config.num_hidden_layers,
        n_slots=len(examples),
        max_len=n_max,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=device,
    )
    slots = torch.arange(len(examples), device=device)
    n_new = torch.tensor([len(one.rows) for one in examples], device=device)
    hidden = model.llm.model(embeds, cache, slots, n_new, n_max, model.backend)
    return hidden, kinds, targets


def predict(model: OmniModel, examples: Sequence[Example]) -> Predictions:
    """Logits after every learned row of a batch of sequences."""
    hidden, kinds, targets = run_context(model, examples)
    learned = targets != NOTHING
    is_decision = (kinds == SOUND)[learned]
    return Predictions(model.llm.logits(hidden[learned], model.backend), targets[learned], is_decision)


def loss_of(got: Predictions, quiet_token: int, quiet_weight: float) -> Tensor:
    """Mean cross-entropy. quiet_weight: of decisions for `quiet_token`, which are most of a conversation."""
    each = F.cross_entropy(got.logits, got.targets, reduction="none")
    weight = torch.where(got.is_decision & (got.targets == quiet_token), quiet_weight, 1.0)
    return (each * weight).sum() / weight.sum()


def _sound_rows(model: OmniModel, examples: Sequence[Example]) -> Tensor | None:
    """Rows of all sound in the order of the batch's rows: [N, D]; None without sound."""
    parts: list[Tensor] = []
    for one in examples:
        if one.reference is not None:
            parts.append(encode_reference(model, one.reference))
        if not one.taken:
            continue
        units = encode_units(model, *(part.to(model.device) for part in (one.mel, one.mel_first, one.mel_end)))
        segment, place = torch.tensor(one.taken, device=model.device).T
        parts.append(units[segment, place].flatten(0, 1))
    return torch.cat(parts) if parts else None


def _picture_rows(model: OmniModel, examples: Sequence[Example]) -> Tensor | None:
    """Rows of all pictures in the order of the batch's rows: [N, D]; None without pictures."""
    rows = []
    for one in examples:
        if one.pictures is not None:
            rows.append(model.encode_images(*(part.to(model.device) for part in one.pictures)).flatten(0, 1))
    return torch.cat(rows) if rows else None
