"""Slot caches for the parity stages."""

import torch

from models.layers.kv_cache import KVCache
from models.layers.kv_pages import PageSizes
from models.omni import OmniModel


def slot_cache(
    model: OmniModel,
    part: str,
    *,
    n_slots: int,
    max_len: int | None = None,
    shared_scratch: bool = False,
    page_sizes: PageSizes | None = None,
) -> KVCache:
    """An empty cache for `apm`, `llm` or `tts`, with the part's maximum number of rows or `max_len`."""
    config = model.config
    audio, tts = config.audio_config, config.tts_config
    n_layers, kv_heads, head_dim, most = {
        "apm": (
            audio.encoder_layers,
            audio.encoder_attention_heads,
            audio.d_model // audio.encoder_attention_heads,
            audio.max_source_positions,
        ),
        "llm": (config.num_hidden_layers, config.num_key_value_heads, config.head_dim, 512),
        "tts": (tts.num_hidden_layers, tts.num_key_value_heads, tts.head_dim, 512),
    }[part]
    return KVCache(
        n_layers=n_layers,
        n_slots=n_slots,
        max_len=max_len or most,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.float32,
        device=model.device,
        shared_scratch=shared_scratch,
        page_sizes=page_sizes,
    )
