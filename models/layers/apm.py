"""Audio encoder `apm` (Whisper shape): log-mel to hidden rows, whole clips or one unit at a time.

One second is 100 mel frames, 50 encoder rows and 10 rows after pooling. Does not contain the computation of log-mel
(`models.inputs`).
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoint.config import AudioConfig
from models.layers.backend import Backend
from models.layers.kv_cache import CacheView, KVCache
from models.layers.transformer import Projector, attend, shared_mask

UNIT_ROWS = 50  # encoder rows a unit adds to the cache


class AudioAttention(nn.Module):
    """Self-attention; the key projection has no bias, as in Whisper."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        return self.out_proj(attend(q, k.transpose(1, 2), v.transpose(1, 2), mask))

    def stream(self, x: Tensor, view: CacheView, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        view.write(k_cache, self._heads(self.k_proj(x)))
        view.write(v_cache, self._heads(self.v_proj(x)))
        q = self._heads(self.q_proj(x))
        return self.out_proj(attend(q, view.read(k_cache), view.read(v_cache), view.mask))


class AudioLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: AudioConfig):
        super().__init__()
        self.self_attn = AudioAttention(config.d_model, config.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = nn.Linear(config.d_model, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def _mlp(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self._mlp(x + self.self_attn(self.self_attn_layer_norm(x), mask))

    def stream(self, x: Tensor, view: CacheView, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return self._mlp(x + self.self_attn.stream(self.self_attn_layer_norm(x), view, k_cache, v_cache))


class Apm(nn.Module):
    """Whisper encoder: two convolutions, learned positions, layers, final norm."""

    def __init__(self, config: AudioConfig):
        super().__init__()
        self.max_positions = config.max_source_positions
        self.conv1 = nn.Conv1d(config.num_mel_bins, config.d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(config.d_model, config.d_model, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, config.d_model)
        self.layers = nn.ModuleList(AudioLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(config.d_model)

    def _convolve(self, mel: Tensor, first: Tensor, end: Tensor) -> Tensor:
        """Both convolutions over columns [first, end) only; all other columns count as zero padding.

        Args:
            mel: [B, bins, F].
            first, end: [B] int64.
        Returns: [B, (F + 1) // 2, D].
        """
        # The output of the first convolution is masked too: at an edge, zero padding is zero in both.
        column = torch.arange(mel.shape[-1], device=mel.device)
        inside = ((column >= first[:, None]) & (column < end[:, None]))[:, None]
        x = F.gelu(self.conv1(torch.where(inside, mel, 0)))
        return F.gelu(self.conv2(torch.where(inside, x, 0))).transpose(1, 2).contiguous()

    def encode(self, mel: Tensor, n_frames: Tensor, n_keys: Tensor, chunk: int) -> Tensor:
        """Encode whole clips of up to 30 s.

        Args:
            mel: [B, bins, F] log-mel, F the bucket.
            n_frames: [B] int64 columns that the convolutions read.
            n_keys: [B] int64 encoder rows that are visible as keys.
            chunk: rows per chunk; a row attends to its own chunk and all earlier ones. 0 = to every row.
        Returns: [B, (F + 1) // 2, D] after the final norm; rows from n_keys on are meaningless.
        """
        x = self._convolve(mel, torch.zeros_like(n_frames), n_frames)
        row = torch.arange(x.shape[1], device=mel.device)
        x = x + self.embed_positions(row)
        mask = (row < n_keys[:, None].clamp(min=1))[:, None]
        if chunk:
            mask = mask & (row < chunk * (row[:, None] // chunk + 1))
        else:
            mask = mask.expand(-1, x.shape[1], -1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.layer_norm(x)

    def _unit_rows(self, mel: Tensor, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Convolved rows [B, 50, D] of one unit each without the rows of the context frames; [B] valid rows."""
        rows = self._convolve(mel, first, end)[:, 1 : 1 + UNIT_ROWS]
        return rows, ((end - 1) // 2).clamp(0, UNIT_ROWS)

    def stream(
        self, mel: Tensor, first: Tensor, end: Tensor, cache: KVCache, slots: Tensor, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        """Encode one unit per slot, attending to the units that the slot's cache holds.

        Args:
            mel: [B, bins, 104]; column j is frame j - 2 of the unit, so that every kind of unit has one shape.
            first, end: [B] int64 valid columns: [0, 104) for a unit with context frames on both sides, [2, 104) for
                the first unit, [2, 102) without context frames, a smaller end for a shorter last unit, [0, 0) for a
                slot without a unit.
            cache: this encoder's slot cache; it grows by the valid rows. A slot whose cache would pass the position
                table is emptied, and starts again at position 0, before the unit.
            slots: [B] int64, distinct except for the scratch slot.
            backend: runs the layers.
        Returns: [B, 50, D] rows after the final norm, and [B] how many of them are valid.
        """
        x, n_new = self._unit_rows(mel, first, end)
        # The comparison counts the unit's rows before those of the context frames are trimmed.
        n_convolved = torch.where(end > first, (end - first + 1) // 2, 0)
        full = cache.lengths[slots] + n_convolved >= self.max_positions
        for counter in (cache.lengths, cache.positions):
            counter.index_copy_(0, slots, torch.where(full, 0, counter[slots]))
        masked = backend.needs_mask
        view = cache.view(slots, n_new, UNIT_ROWS, self.max_positions, causal=False, masked=masked)
        x = x + self.embed_positions(view.positions.clamp(max=self.max_positions - 1))
        hidden = backend.audio_layers(self, x, view, cache)
        cache.advance(slots, n_new)
        return hidden, n_new

    def run_layers(self, x: Tensor, view: CacheView, cache: KVCache) -> Tensor:
        """The layers and the final norm in PyTorch operations; shapes as `Backend.audio_layers`, view with a mask."""
        view = shared_mask(view, 1, x.dtype) if cache.runs_eager else view
        return self.layer_norm(self._stream_layers(x, view, cache))

    def _stream_layers(self, x: Tensor, view: CacheView, cache: KVCache) -> Tensor:
        for layer, k_cache, v_cache in zip(self.layers, cache.k, cache.v, strict=True):
            x = cast(AudioLayer, layer).stream(x, view, k_cache, v_cache)
        return x

    def refill(self, mel: Tensor, first: Tensor, end: Tensor, cache: KVCache, slots: Tensor, active: Tensor) -> Tensor:
        """Replace the rows of slots by those of K units, as streaming the units into an empty slot would, in one pass.

        Args:
            mel: [B, K, bins, 104], oldest unit first.
            first, end: [B, K] as in `stream`; [0, 0) leaves a unit out.
            cache: this encoder's slot cache; an active slot gets the length of its units, other slots are unchanged.
            slots: [B] int64, distinct except for the scratch slot.
            active: [B] bool.
        Returns: [B, K * 50, D] before the final norm; rows of units that are left out are meaningless.
        """
        B, K = end.shape
        n_rows = K * UNIT_ROWS
        assert n_rows <= self.max_positions, f"refill: expected at most {self.max_positions} rows, got {n_rows}"
        x, n_new = self._unit_rows(mel.flatten(0, 1), first.flatten(), end.flatten())
        n_new = n_new.view(B, K)
        unit_end = n_new.cumsum(1)
        row = torch.arange(UNIT_ROWS, device=mel.device)
        valid = (row < n_new[..., None]) & active[:, None, None]
        # Each unit directly follows the previous one. The index of a padding row does not matter: it goes to scratch.
        index = ((unit_end - n_new)[..., None] + row).flatten(1)
        # At least one column stays visible, so that a padding row is finite.
        seen = unit_end.clamp(min=1)[..., None].expand(-1, -1, UNIT_ROWS).flatten(1)
        view = CacheView(
            slots=slots,
            row_slots=torch.where(valid.flatten(1), slots[:, None], cache.scratch),
            row_index=index,
            positions=index,
            mask=torch.arange(n_rows, device=mel.device) < seen[..., None],
            kv_len=n_rows,
        )
        x = x.unflatten(0, (B, K)).flatten(1, 2) + self.embed_positions(index)
        hidden = self._stream_layers(x, view, cache)
        for counter in (cache.lengths, cache.positions):
            counter.index_copy_(0, slots, torch.where(active, unit_end[:, -1], counter[slots]))
        return hidden


def project(projection: Projector, hidden: Tensor, pool: int) -> Tensor:
    """Encoder rows [B, T, D] to LLM rows [B, T // pool, D_llm].

    Each row is projected, then windows of `pool` rows are averaged; a shorter tail is dropped.
    """
    rows = projection(hidden)
    n_whole = rows.shape[1] // pool * pool
    return rows[:, :n_whole].unflatten(1, (-1, pool)).mean(2)
