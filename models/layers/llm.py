"""Language model `llm` (Qwen3 shape): embedding rows in, hidden states and logits out, over cache slots.

Does not contain sampling, the meaning of rows, or the end of a turn.
"""

from torch import Tensor, nn

from models.checkpoint.config import OmniConfig
from models.layers.backend import Backend
from models.layers.kv_cache import KVCache
from models.layers.transformer import Backbone, DecoderConfig


class LLM(nn.Module):
    """Decoder stack with an untied output head."""

    def __init__(self, config: OmniConfig):
        super().__init__()
        self.model = Backbone(DecoderConfig.of(config, vocab_size=config.vocab_size, qk_norm=True))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def embed(self, ids: Tensor, backend: Backend) -> Tensor:
        """Rows [..., D] of tokens ids [...]."""
        return backend.embed(self.model.embed_tokens, ids)

    def logits(self, hidden: Tensor, backend: Backend) -> Tensor:
        """Logits [..., V] float32 of states [..., D] after the final norm."""
        return backend.linear(hidden, self.lm_head).float()

    def prefill(
        self, embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        """Feed known rows at once; shapes as `LayerStack.forward`.

        Returns: hidden states [B, T, D] and the logits [B, V] after each slot's last valid row.
        """
        hidden = self.model(embeds, cache, slots, n_new, kv_len, backend)
        last = (n_new - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return hidden, self.logits(hidden.gather(1, last)[:, 0], backend)

    def decode(
        self, ids: Tensor, cache: KVCache, slots: Tensor, active: Tensor, kv_len: int, backend: Backend
    ) -> tuple[Tensor, Tensor]:
        """Feed one token per slot.

        Args:
            ids, slots: [B] int64.
            active: [B] bool; a slot that is not active keeps its cache.
        Returns: hidden states [B, D] of the fed tokens and the logits [B, V] after them.
        """
        embeds = self.embed(ids[:, None], backend)  # indexed here: torch.compile would recompile for a view as input
        hidden = self.model(embeds, cache, slots, active.long(), kv_len, backend)[:, 0]
        return hidden, self.logits(hidden, backend)
