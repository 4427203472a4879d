"""Speech-token model `tts` (Llama shape): text tokens and their LLM states in, speech-token logits out, over slots.

Does not contain sampling (`models.sampling.speech`) or the loop over speech tokens (`speech_loop`).
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoint.config import TTSConfig
from models.layers.backend import Backend
from models.layers.kv_cache import KVCache
from models.layers.transformer import Backbone, DecoderConfig, Derived, Projector


class NormedWeight(nn.Module):
    """A weight-normed matrix as the checkpoint stores it: row lengths and directions.

    Both stay in float32 for every model dtype: only the folded matrix is rounded, once.
    """

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.original0 = nn.Parameter(torch.empty(rows, 1, dtype=torch.float32))
        self.original1 = nn.Parameter(torch.empty(rows, width, dtype=torch.float32))


class FoldedHead(Derived):
    """Output head of speech tokens: a weight-normed matrix folded once, W[i] = g[i] * v[i] / |v[i]|, in float32."""

    weight: Tensor

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.parametrizations = nn.ModuleDict({"weight": NormedWeight(rows, width)})
        self.register_buffer("weight", torch.empty(rows, width), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        stored = cast(NormedWeight, self.parametrizations["weight"])
        direction = stored.original1.detach().float()
        folded = stored.original0.detach().float() * direction / direction.norm(dim=1, keepdim=True)
        self.weight = folded.to(device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] times the folded matrix. Returns: [..., N]."""
        return F.linear(x, self.weight)


class TTS(nn.Module):
    """Speech-token model with its text embedding, projector of LLM states and folded head."""

    def __init__(self, config: TTSConfig):
        super().__init__()
        self.config = config
        self.emb_text = nn.Embedding(config.num_text_tokens, config.hidden_size)
        self.model = Backbone(DecoderConfig.of(config, vocab_size=config.vocab_size, qk_norm=False))
        self.projector_spk = Projector(config.llm_dim, config.hidden_size)  # in the checkpoint, never used
        self.projector_semantic = Projector(config.llm_dim, config.hidden_size)
        # Lists of one, as the checkpoint names them.
        self.emb_code = nn.ModuleList([nn.Embedding(config.num_audio_tokens, config.hidden_size)])
        self.head_code = nn.ModuleList([FoldedHead(config.num_audio_tokens, config.hidden_size)])

    def text_rows(self, ids: Tensor, hidden: Tensor, normalize: bool, backend: Backend) -> Tensor:
        """One row per spoken text token: its embedding plus its projected LLM state.

        Args:
            ids: [B, T] int64.
            hidden: [B, T, llm_dim].
            normalize: scale each projected state to length 1.
        Returns: [B, T, D].
        """
        projected = self.projector_semantic(hidden)
        if normalize:
            projected = F.normalize(projected.float(), dim=-1, eps=1e-12).to(projected.dtype)
        return backend.embed(self.emb_text, ids) + projected

    def condition(
        self, ids: Tensor, hidden: Tensor, n_text: Tensor, text_eos: Tensor, normalize: bool, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        """Conditioning rows: text rows, the end-of-text row where `text_eos` is set, the begin-of-audio row.

        Args:
            ids: [B, T] int64.
            hidden: [B, T, llm_dim].
            n_text: [B] valid tokens, 0..T; 0 = only the begin-of-audio row.
            text_eos: [B] bool.
            normalize: see `text_rows`.
        Returns: rows [B, T + 2, D] left-aligned, and their number [B].
        """
        rows = F.pad(self.text_rows(ids, hidden, normalize, backend), (0, 0, 0, 2))
        column = torch.arange(rows.shape[1], device=ids.device)
        n_rows = n_text + text_eos + 1
        eos_row, bos_row = (
            backend.embed(self.emb_text, torch.full((), token, device=ids.device))
            for token in (self.config.text_eos_token_id, self.config.audio_bos_token_id)
        )
        rows = torch.where((column == n_text[:, None])[..., None], eos_row, rows)
        rows = torch.where((column == n_rows[:, None] - 1)[..., None], bos_row, rows)
        return rows, n_rows

    def prefill(
        self, rows: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int, backend: Backend
    ) -> Tensor:
        """Feed conditioning rows [B, T, D], n_new [B] of them valid.

        Returns: logits [B, speech tokens] in the model's dtype.
        """
        hidden = self.model(rows, cache, slots, n_new, kv_len, backend)
        last = (n_new - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return self.speech_logits(hidden.gather(1, last)[:, 0], backend)

    def decode(
        self, rows: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int, backend: Backend
    ) -> Tensor:
        """Feed one speech token per slot.

        Args:
            rows: [B, 1, D] of the speech tokens.
            slots: [B] int64.
            n_new: [B] int64, 0 or 1; a slot with 0 keeps its cache.
        Returns: logits [B, speech tokens] in the model's dtype.
        """
        return self.speech_logits(self.model(rows, cache, slots, n_new, kv_len, backend)[:, 0], backend)

    def speech_logits(self, hidden: Tensor, backend: Backend) -> Tensor:
        """Logits [..., speech tokens] of hidden states [..., D], in their dtype."""
        head = cast(FoldedHead, self.head_code[0])
        return backend.linear(hidden, head)
