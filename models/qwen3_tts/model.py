"""The language models of one Qwen3-TTS checkpoint as one module. Does not contain loading or slots."""

import torch
from torch import nn

from models.layers.backend import TORCH, Backend
from models.qwen3_tts.config import Qwen3TTSConfig
from models.qwen3_tts.talker import Talker


class Qwen3TTS(nn.Module):
    """Talker and code predictor of one checkpoint.

    backend: runs the layers of both; replaced by the Triton backend on a GPU.
    """

    def __init__(self, config: Qwen3TTSConfig):
        super().__init__()
        self.config = config
        self.talker = Talker(config.talker_config)
        self.backend: Backend = TORCH

    @property
    def device(self) -> torch.device:
        return self.talker.codec_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.talker.codec_head.weight.dtype
