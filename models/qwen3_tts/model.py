"""The language models of one Qwen3-TTS checkpoint as one module. Does not contain loading or slots."""

from importlib.util import find_spec

import torch
from torch import nn

from models.errors import SettingsError
from models.layers.backend import TORCH, Backend
from models.qwen3_tts.config import Qwen3TTSConfig
from models.qwen3_tts.frame_steps import FrameSteps
from models.qwen3_tts.talker import Talker


class Qwen3TTS(nn.Module):
    """Talker and code predictor of one checkpoint.

    backend: runs the layers of both. frame_steps: what a frame does between the passes. `use_kernels` sets both.
    """

    def __init__(self, config: Qwen3TTSConfig):
        super().__init__()
        self.config = config
        self.talker = Talker(config.talker_config)
        self.backend: Backend = TORCH
        self.frame_steps = FrameSteps(self.talker, config.tts_pad_token_id)

    @property
    def device(self) -> torch.device:
        return self.talker.codec_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.talker.codec_head.weight.dtype

    def use_kernels(self, on: bool) -> None:
        """Select the project's GPU kernels, or PyTorch. Graphs captured before become invalid.

        With kernels, weights of linear layers with one input are packed; each layer keeps a view of its own.

        Raises: SettingsError without Triton.
        """
        if not on:
            self.backend.release()
            self.backend, self.frame_steps = TORCH, FrameSteps(self.talker, self.config.tts_pad_token_id)
            return
        if find_spec("triton") is None:
            raise SettingsError("kernels", expected="Triton, which comes with the GPU builds of torch", got="none")
        from models.kernels.backend import TritonBackend  # here, because both import Triton
        from models.qwen3_tts.kernel_frames import KernelFrameSteps

        self.backend = TritonBackend(self, [])
        self.frame_steps = KernelFrameSteps(self.talker, self.config.tts_pad_token_id)
