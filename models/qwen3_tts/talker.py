"""Talker: rows of text and codes to a state and the logits of a frame's first code, over slots.

Parameter names are the checkpoint's. Does not contain the layout of prompts (`prompt`) or sampling (`draws`).
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.backend import Backend
from models.layers.kv_cache import KVCache
from models.layers.transformer import DecoderConfig, Derived, LayerStack
from models.qwen3_tts.code_predictor import CodePredictor
from models.qwen3_tts.config import TalkerConfig

PROJECTED_AT_ONCE = 8192  # rows of the text table


class TextProjection(nn.Module):
    """linear_fc1 -> SiLU -> linear_fc2 on rows of the text embedding."""

    def __init__(self, width: int, width_out: int):
        super().__init__()
        self.linear_fc1 = nn.Linear(width, width)
        self.linear_fc2 = nn.Linear(width, width_out)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.linear_fc2(F.silu(self.linear_fc1(x)))
        return projected


class Talker(Derived):
    """Decoder stack with its two tables, head and code predictor.

    text_rows: [text vocabulary, D] the projected text embedding, computed once. A row depends on its id alone, so the
    table replaces `text_embedding` and `text_projection`, which are empty afterwards.
    """

    text_rows: Tensor

    def __init__(self, config: TalkerConfig):
        super().__init__()
        self.config = config
        tables: dict[str, nn.Module] = {
            "codec_embedding": nn.Embedding(config.vocab_size, config.hidden_size),
            "text_embedding": nn.Embedding(config.text_vocab_size, config.text_hidden_size),
        }
        stack = DecoderConfig.of(config, vocab_size=config.vocab_size, qk_norm=True)
        self.model = LayerStack(stack, tables)
        self.text_projection = TextProjection(config.text_hidden_size, config.hidden_size)
        self.codec_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.code_predictor = CodePredictor(config.code_predictor_config, config.hidden_size)
        self.register_buffer("text_rows", torch.empty(config.text_vocab_size, config.hidden_size), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        embedding = cast(nn.Embedding, self.model.text_embedding)
        rows = torch.empty(self.text_rows.shape, dtype=dtype, device=device)
        for start in range(0, len(rows), PROJECTED_AT_ONCE):
            span = slice(start, start + PROJECTED_AT_ONCE)
            rows[span] = self.text_projection(embedding.weight[span])
        self.text_rows = rows
        for weight in (embedding.weight, *self.text_projection.parameters()):
            weight.data = weight.data.new_empty(0)

    @property
    def code_rows(self) -> Tensor:
        """[vocabulary, D] rows of first codes and control codes."""
        return cast(nn.Embedding, self.model.codec_embedding).weight

    def frame_rows(self, codes: Tensor) -> Tensor:
        """Sum of the rows of all codes of frames [B, 16]. Returns: [B, D]."""
        rest = self.code_predictor.residual_rows(codes[:, 1:])
        rows = torch.cat((self.code_rows[codes[:, :1]], rest), dim=1)
        return rows.float().sum(1).to(rows.dtype)

    def rows_of_codes(self, codes: Tensor) -> Tensor:
        """Sum [..., D] of the rows of codes [..., 16], -1 for none. One table after another: prompts are long."""
        total = _rows(self.code_rows, codes[..., 0]).float()
        for group, table in enumerate(self.code_predictor.tables, start=1):
            total = total + _rows(table, codes[..., group])
        return total.to(self.code_rows.dtype)

    def rows_of_text(self, ids: Tensor) -> Tensor:
        """Rows [..., D] of text tokens ids [...], -1 for none: zeros."""
        return _rows(self.text_rows, ids)

    def forward(
        self, rows: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int, backend: Backend
    ) -> Tensor:
        """Append rows to slots; shapes as `LayerStack.forward`. Returns: [B, T, D] after the final norm."""
        hidden: Tensor = self.model(rows, cache, slots, n_new, kv_len, backend)
        return hidden

    def logits(self, hidden: Tensor, backend: Backend) -> Tensor:
        """Logits [..., vocabulary] of the first code, from states [..., D], in their dtype."""
        return backend.linear(hidden, self.codec_head)


def _rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows [..., D] of a table [N, D] for ids [...], zeros for -1."""
    return table[ids.clamp(min=0)].masked_fill((ids < 0)[..., None], 0)
