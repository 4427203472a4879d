"""Code predictor: the talker's state and a frame's first code to the fifteen others, one pass a code.

Parameter names are the checkpoint's. Does not contain sampling (`draws`).
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from models.layers.backend import Backend
from models.layers.kv_cache import KVCache
from models.layers.transformer import DecoderConfig, Derived, LayerStack
from models.qwen3_tts.config import CodePredictorConfig

RESIDUAL_CODES = 15
PASS_ROWS = 16  # positions of a frame: the state, the first code and fourteen others

# (logits [B, K] in the model's dtype, number of the code in the frame, 1..15, table [K, D] or None)
# -> codes [B] int64, and their rows of the table [B, 1, D]
DrawCode = Callable[[Tensor, int, Tensor | None], tuple[Tensor, Tensor | None]]


class CodePredictor(Derived):
    """Decoder stack with a table for each residual code but the last, and a head for each.

    tables: [15, K, talker's D] holds the weights of the embeddings, which become views of it.
    inputs: [15, K, D] the same rows after the projection, computed once; `tables` itself without one.
    """

    tables: Tensor
    inputs: Tensor

    def __init__(self, config: CodePredictorConfig, talker_width: int):
        super().__init__()
        self.config = config
        width, codes = config.hidden_size, config.vocab_size
        stack = DecoderConfig.of(config, vocab_size=codes, qk_norm=True)
        embeddings = nn.ModuleList(nn.Embedding(codes, talker_width) for _ in range(RESIDUAL_CODES))
        self.model = LayerStack(stack, {"codec_embedding": embeddings})
        self.lm_head = nn.ModuleList(nn.Linear(width, codes, bias=False) for _ in range(RESIDUAL_CODES))
        # The narrower talker has the predictor's width, and no projection.
        self.small_to_mtp_projection = nn.Linear(talker_width, width) if talker_width != width else nn.Identity()
        self.register_buffer("tables", torch.empty(RESIDUAL_CODES, codes, talker_width), persistent=False)
        self.register_buffer("inputs", torch.empty(RESIDUAL_CODES, codes, width), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        embeddings = cast("list[nn.Embedding]", list(cast(nn.ModuleList, self.model.codec_embedding)))
        self.tables = torch.stack([embedding.weight.data for embedding in embeddings])
        for embedding, table in zip(embeddings, self.tables, strict=True):
            embedding.weight.data = table
        if isinstance(self.small_to_mtp_projection, nn.Identity):
            self.inputs = self.tables
        else:
            self.inputs = torch.stack([self.small_to_mtp_projection(table) for table in self.tables])

    def residual_rows(self, codes: Tensor) -> Tensor:
        """Rows [..., 15, talker's D] of residual codes [..., 15]."""
        group = torch.arange(RESIDUAL_CODES, device=codes.device)
        return self.tables[group, codes]

    def forward(
        self, rows: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, draw: DrawCode, backend: Backend
    ) -> Tensor:
        """The residual codes of one frame of each slot.

        Args:
            rows: [B, 2, talker's D] states after the final norm, then rows of the first codes.
            cache: of this predictor, PASS_ROWS rows a slot, empty.
            slots: [B] int64, distinct except for the scratch slot.
            n_new: [B] int64, 1 for a frame; rows with 0 have meaningless codes.
            draw: chooses each code.
            backend: runs the layers.
        Returns: [B, 15] int64.
        """
        fed, n_valid = self.small_to_mtp_projection(rows), n_new * rows.shape[1]
        codes: list[Tensor] = []
        for number in range(1, RESIDUAL_CODES + 1):
            state: Tensor = self.model(fed, cache, slots, n_valid, PASS_ROWS, backend)
            table = self.inputs[number - 1] if number < RESIDUAL_CODES else None
            drawn, fed = draw(self._logits(state[:, -1], number, backend), number, table)
            codes.append(drawn)
            n_valid = n_new
        return torch.stack(codes, dim=1)

    def parallel_logits(
        self, hidden: Tensor, first_row: Tensor, codes: Tensor, cache: KVCache, slots: Tensor, backend: Backend
    ) -> Tensor:
        """Logits of known residual codes in one pass.

        Args:
            hidden, first_row: [B, talker's D] states after the final norm, rows of the first codes.
            cache, slots, backend: as for `forward`; the cache's content is not used.
            codes: [B, 15] int64; the last is not read.
        Returns: [B, 15, K] float32.
        """
        cache.set_length(slots, torch.zeros_like(slots))
        known = self.residual_rows(codes)[:, :-1]
        rows = self.small_to_mtp_projection(torch.cat((hidden[:, None], first_row[:, None], known), dim=1))
        n_new = torch.full_like(slots, PASS_ROWS)
        states: Tensor = self.model(rows, cache, slots, n_new, PASS_ROWS, backend)
        groups = [self._logits(states[:, number], number, backend) for number in range(1, PASS_ROWS)]
        return torch.stack(groups, dim=1).float()

    def _logits(self, state: Tensor, number: int, backend: Backend) -> Tensor:
        """Logits [B, K] of a residual code, from states [B, D]."""
        head = cast(nn.Linear, self.lm_head[number - 1])
        return backend.linear(state.contiguous(), head)
