"""The model over whole sequences with gradients: the weights of serving, all rows of a batch at once.

Masks and positions are those of serving, without its caches: a decoder over whole sequences is causal attention, and
the audio encoder of one unit sees all units up to it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.inputs.audio import LogMel, conv_length, frame_count
from models.inputs.image import pixel_values
from models.inputs.positions import position_ids
from models.layers.apm import UNIT_ROWS, Apm, project
from models.layers.rotary import rotary_angles, rotate
from models.layers.transformer import Backbone, DecoderLayer, RMSNorm
from models.omni import OmniModel
from training.mind.batches import PLACES_OF_CLIP, Batch, to_device
from training.mind.words.written import WrittenRows
from training.timelines.layout import NOTHING

CLIP_CHUNK_ROWS = 50  # encoder rows that a row of a clip sees ahead at most
PICTURE_SIDE = 32  # patches
PATCH = 14
PICTURES_AT_ONCE = 96


@dataclass(frozen=True)
class Inputs:
    """What the encoders of a batch read.

    Args:
        mel: [B, U, 80, 104] of units.
        clip_mel: [R, 80, F] of clips. clip_samples: [R] on the host.
        pictures: [P, 448, 448, 3] levels.
        written: rows of words in place of sound.
    """

    mel: Tensor
    clip_mel: Tensor
    clip_samples: Tensor
    pictures: Tensor
    written: WrittenRows | None = None


@dataclass(frozen=True)
class States:
    """States of a batch.

    Args:
        hidden: [B, T, D] of the language model. middle: the same after half of its layers.
        heard: [S, K * 50, D] of the audio encoder; None without sound.
        seen: [P, 64, D] rows of pictures; None without pictures.
    """

    hidden: Tensor
    middle: Tensor
    heard: Tensor | None
    seen: Tensor | None


def run_rows(model: OmniModel, batch: Batch, inputs: Inputs, passes: "Passes | None" = None) -> States:
    """States of all rows of a batch."""
    passes = passes or Passes()
    embeds, heard, seen = embed_rows(model, batch, inputs, passes)
    hidden, middle = passes.decoder(model.llm.model, embeds)
    return States(hidden, middle, heard, seen)


def embed_rows(
    model: OmniModel, batch: Batch, inputs: Inputs, passes: "Passes | None" = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Rows [B, T, D] that the language model reads, and `heard` and `seen` of `States`."""
    passes = passes or Passes()
    embeds = model.llm.model.embed_tokens(batch.ids)
    flat = embeds.flatten(0, 1)
    heard = seen = None
    if len(batch.sound):
        mel = inputs.mel.flatten(0, 1)[batch.segments.clamp_min(0)]
        heard = passes.audio(model, mel, batch.first, batch.end)
        rows = project(model.audio_projection_layer, heard, model.config.audio_pool_step)
        flat = flat.index_copy(0, batch.sound, rows.flatten(0, 1)[batch.sound_sources].to(flat.dtype))
    if len(batch.clip):
        rows = encode_clips(model, inputs.clip_mel, inputs.clip_samples)
        rows = F.pad(rows, (0, 0, 0, PLACES_OF_CLIP - rows.shape[1]))
        flat = flat.index_copy(0, batch.clip, rows.flatten(0, 1)[batch.clip_sources].to(flat.dtype))
    if len(batch.picture):
        seen = encode_pictures(model, inputs.pictures, passes.pictures, is_padded=passes.pads_pictures)
        flat = flat.index_copy(0, batch.picture, seen.flatten(0, 1)[batch.picture_sources].to(flat.dtype))
    if (written := inputs.written) is not None:
        words = model.llm.model.embed_tokens(written.tokens.clamp_min(0)) * (written.tokens != NOTHING)[:, None]
        flat = flat.index_copy(0, written.places, words.to(flat.dtype))
    # No view: the compiled decoder is made for tensors of their own.
    return flat.view_as(embeds).clone(), heard, seen


def logits_of(model: OmniModel, hidden: Tensor, places: Tensor) -> Tensor:
    """Logits [N, V] float32 after rows of states [B, T, D]."""
    return F.linear(hidden.flatten(0, 1)[places], model.llm.lm_head.weight).float()


def run_decoder(stack: Backbone, embeds: Tensor, drop: nn.Dropout | None = None) -> tuple[Tensor, Tensor]:
    """States [B, T, D] of a decoder over sequences that begin at position 0; later rows do not change earlier ones.

    Args:
        drop: leaves out some of what attention and the feed-forward network add to a row, with gradients only. The
            chance is that of torch's own generator.
    Returns: normed states after all layers, and states after half of them.
    """
    drop = drop if torch.is_grad_enabled() else None
    positions = torch.arange(embeds.shape[1], device=embeds.device)
    cos, sin = (part[:, None] for part in rotary_angles(positions, stack.frequencies))
    x = middle = embeds
    for number, module in enumerate(stack.layers):
        layer = cast(DecoderLayer, module)
        attention = layer.self_attn
        normed = _norm(layer.input_layernorm, x)
        q, k, v = (
            projection(normed).unflatten(-1, (-1, attention.head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        # One rotation for both: each operation costs the host time.
        both = rotate(torch.cat((_norm(attention.q_norm, q), _norm(attention.k_norm, k)), dim=2), cos, sin)
        q, k = both.to(v.dtype).split((attention.heads, attention.kv_heads), dim=2)
        groups = attention.heads // attention.kv_heads
        k, v = (rows.repeat_interleave(groups, dim=2) if groups > 1 else rows for rows in (k, v))
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attention.o_proj(seen.transpose(1, 2).flatten(2))
        x = x + (attended if drop is None else drop(attended))
        added = layer.mlp(_norm(layer.post_attention_layernorm, x))
        x = x + (added if drop is None else drop(added))
        if number + 1 == len(stack.layers) // 2:
            middle = x
    return _norm(stack.norm, x), middle


def _norm(norm: nn.Module, x: Tensor) -> Tensor:
    """`RMSNorm` as one operation; other modules as they are."""
    if not isinstance(norm, RMSNorm):
        return cast(Tensor, norm(x))
    return F.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.eps)


def encode_segments(model: OmniModel, mel: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """Normed states [S, K * 50, D] of the audio encoder; arguments as for `Apm.refill`, units left out come last."""
    apm, (n_segments, n_units) = model.apm, end.shape
    # The rows of a unit without those of its context frames, as in serving.
    rows = _convolve(apm, mel.flatten(0, 1), first.flatten(), end.flatten())[:, 1 : 1 + UNIT_ROWS]
    index = torch.arange(n_units * UNIT_ROWS, device=mel.device)
    # Units that only fill up a segment may lie behind the table.
    positions = apm.embed_positions(index.clamp_max(apm.max_positions - 1))
    x = rows.reshape(n_segments, n_units * UNIT_ROWS, -1) + positions
    unit = index // UNIT_ROWS
    mask = (unit <= unit[:, None])[None]
    for layer in apm.layers:
        x = layer(x, mask)
    states: Tensor = apm.layer_norm(x)
    return states


def clip_mels(log_mel: LogMel, clips: Tensor, n_samples: Tensor) -> Tensor:
    """Log-mel [R, 80, F] of clips [R, N]; n_samples: [R] on the host."""
    return log_mel.log_mel(clips, to_device(n_samples, clips.device))


def encode_clips(model: OmniModel, mel: Tensor, n_samples: Tensor) -> Tensor:
    """Rows [R, n, D] of clips as `OmniModel.encode_clips`; those after a clip's end are meaningless."""
    apm, device = model.apm, mel.device
    frames = [frame_count(n) for n in n_samples.tolist()]
    keys = [conv_length(n) for n in frames]
    n_frames, n_keys = (to_device(torch.tensor(part), device) for part in (frames, keys))
    x = _convolve(apm, mel, torch.zeros_like(n_frames), n_frames)
    row = torch.arange(x.shape[1], device=device)
    x = x + apm.embed_positions(row)
    chunk_end = CLIP_CHUNK_ROWS * (row // CLIP_CHUNK_ROWS + 1)
    mask = (row < n_keys[:, None, None]) & (row < chunk_end[:, None])
    for layer in apm.layers:
        x = layer(x, mask)
    return project(model.audio_projection_layer, apm.layer_norm(x), model.config.audio_pool_step)


def _convolve(apm: Apm, mel: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """As `Apm._convolve`, by matrix products: cuDNN would prepare each of a training's many shapes."""
    column = torch.arange(mel.shape[-1], device=mel.device)
    inside = ((column >= first[:, None]) & (column < end[:, None]))[:, None]
    x = F.gelu(_conv(apm.conv1, torch.where(inside, mel, 0))).transpose(1, 2)
    return F.gelu(_conv(apm.conv2, torch.where(inside, x, 0)))


def _conv(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """Rows [B, F', D] of a convolution of three columns over x [B, C, F]."""
    windows = F.pad(x, (1, 1)).unfold(2, 3, conv.stride[0])
    return F.linear(windows.transpose(1, 2).flatten(2), conv.weight.flatten(1), conv.bias)


def encode_pictures(
    model: OmniModel,
    pictures: Tensor,
    encode: Callable[[OmniModel, Tensor, Tensor, Tensor], Tensor],
    *,
    is_padded: bool,
) -> Tensor:
    """Rows [P, 64, D] of pictures [P, 448, 448, 3], levels 0 to 255.

    encode: see `encode_part`. is_padded: it gets PICTURES_AT_ONCE pictures in each call, the last ones empty.
    """
    numbers, coords = patch_places(model, pictures.device)
    n_empty = -len(pictures) % PICTURES_AT_ONCE if is_padded else 0
    parts = F.pad(pictures, (0, 0, 0, 0, 0, 0, 0, n_empty)).split(PICTURES_AT_ONCE)
    return torch.cat([encode(model, part, numbers, coords) for part in parts])[: len(pictures)]


def encode_part(model: OmniModel, pictures: Tensor, numbers: Tensor, coords: Tensor) -> Tensor:
    """Rows [P, 64, D] of some pictures, whose patches have rows of the position table [1024] and coords [1024, 2]."""
    return resample(model, patch_states(model, pictures, numbers), coords)


def patch_states(model: OmniModel, pictures: Tensor, numbers: Tensor) -> Tensor:
    """Normed states [P, 1024, D] of `vpm` for the patches of pictures."""
    side = PICTURE_SIDE
    patches = pictures.reshape(-1, side, PATCH, side, PATCH, 3).permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)
    x = model.vpm.embeddings(pixel_values(patches.float()), numbers)
    for layer in model.vpm.encoder.layers:
        x = layer(x, None)
    states: Tensor = model.vpm.post_layernorm(x)
    return states


def resample(model: OmniModel, states: Tensor, coords: Tensor) -> Tensor:
    """Rows [P, 64, D] of patches with coords [1024, 2]."""
    whole = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    rows: Tensor = model.resampler(states, coords.expand(len(states), -1, -1), whole)
    return rows


def patch_places(model: OmniModel, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of the position table [1024], and coords [1024, 2], of a picture's patches."""
    side = PICTURE_SIDE
    numbers = torch.from_numpy(position_ids(side, side, table_side=model.config.vision_config.table_side))
    column = torch.arange(side, device=device)
    coords = torch.stack(torch.meshgrid(column, column, indexing="ij"), dim=-1).flatten(0, 1)
    return to_device(numbers, device), coords


@dataclass(frozen=True)
class Passes:
    """The parts of a pass that take most of its time, eager or compiled.

    Args:
        decoder: see `run_decoder`.
        audio: see `encode_segments`.
        pictures: see `encode_part`.
        pads_pictures: `pictures` gets PICTURES_AT_ONCE pictures in each call, empty ones where there are fewer.
    """

    decoder: Callable[[Backbone, Tensor], tuple[Tensor, Tensor]] = run_decoder
    audio: Callable[[OmniModel, Tensor, Tensor, Tensor], Tensor] = encode_segments
    pictures: Callable[[OmniModel, Tensor, Tensor, Tensor], Tensor] = encode_part
    pads_pictures: bool = False

    @classmethod
    def eager(cls, dropout: float) -> "Passes":
        """Not compiled. dropout: of the decoder."""
        return cls(partial(run_decoder, drop=_drop(dropout)))

    @classmethod
    def compiled(cls, dropout: float = 0.0, backend: str | Callable[..., Any] = "inductor") -> "Passes":
        """Compiled once for every number of rows above one, and for one number of pictures. dropout: of the decoder."""
        drop = _drop(dropout)
        decoder = torch.compile(run_decoder, dynamic=True, backend=backend)
        audio = torch.compile(encode_segments, dynamic=True, backend=backend)

        def decode(stack: Backbone, embeds: Tensor) -> tuple[Tensor, Tensor]:
            hidden, middle = decoder(stack, _of_any_size(embeds), drop)
            return hidden, middle

        def hear(model: OmniModel, mel: Tensor, first: Tensor, end: Tensor) -> Tensor:
            return audio(model, *map(_of_any_size, (mel, first, end)))

        return cls(decode, hear, torch.compile(encode_part, dynamic=False, backend=backend), pads_pictures=True)


def _drop(share: float) -> nn.Dropout | None:
    """A module in place of a number, which the compiler would take as one that changes."""
    return nn.Dropout(share) if share else None


def _of_any_size(x: Tensor) -> Tensor:
    """x, of which the compiler takes no size of the first two dimensions as equal to another size."""
    torch._dynamo.maybe_mark_dynamic(x, (0, 1))
    return x
