"""Language models of a Qwen3-TTS checkpoint folder: strict check of names and shapes, and the load itself."""

from pathlib import Path

import torch

from models.layers.weights import on_meta, tensor_shapes
from models.qwen3_tts.codec.load import SPEAKER_PREFIX, load_tree
from models.qwen3_tts.config import Qwen3TTSConfig, load_qwen3_tts_config
from models.qwen3_tts.model import Qwen3TTS


def talker_tensors(config: Qwen3TTSConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the language models that a checkpoint with this config contains."""
    with on_meta():
        return tensor_shapes(Qwen3TTS(config))


def load_qwen3_tts(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Qwen3TTSConfig | None = None,
) -> Qwen3TTS:
    """The language models of a checkpoint folder in eval mode, every weight on `device` as `dtype`.

    Args:
        path: folder with `config.json`, and `model.safetensors` or its shards and index.
        device, dtype: of the weights.
        config: replaces that of the folder.
    Raises:
        ConfigError: `config.json` is invalid.
        CheckpointError: lists every missing, unexpected and misshapen tensor and every damaged file at once.
        SettingsError: `dtype` is not a floating-point type.
    """
    config = config or load_qwen3_tts_config(path)
    elsewhere = (SPEAKER_PREFIX,) if config.tts_model_type == "base" else ()
    with on_meta():
        model = Qwen3TTS(config)
    return load_tree(model, Path(path), device, dtype, ignored=lambda name: name.startswith(elsewhere))
