"""A voice: the features extracted from a prompt sound, from which the vocoder computes its state.

Contains shapes and the digest. Does not contain sound files, networks or slots.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from models.errors import AudioError
from models.token2wav.settings import FRAMES_PER_TOKEN, FlowConfig


@dataclass(frozen=True, eq=False)
class Voice:
    """The features of one prompt, on the CPU. Compare voices by `digest`."""

    speech_tokens: Tensor  # [n] int64
    mel: Tensor  # [2n, n_mels] float32
    speaker: Tensor  # [speaker_dim] float32

    @property
    def n_frames(self) -> int:
        return len(self.mel)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content; equal for equal content from any source."""
        parts = (self.speech_tokens.to(torch.int64), self.mel.float(), self.speaker.float())
        data = hashlib.sha256()
        for part in parts:
            data.update(f"{tuple(part.shape)}".encode())
            data.update(part.detach().contiguous().numpy().tobytes())
        return data.hexdigest()

    def check(self, config: FlowConfig) -> None:
        """Check the shapes and values against each other and the flow. Raises: AudioError."""
        for name in ("speech_tokens", "mel", "speaker"):
            if not isinstance(part := getattr(self, name), Tensor):
                raise AudioError(f"voice: {name}", expected="a tensor", got=type(part).__name__)
        n = len(self.speech_tokens) if self.speech_tokens.ndim else 0
        wanted = {
            "speech_tokens": (torch.int64, (n,)),
            "mel": (torch.float32, (FRAMES_PER_TOKEN * n, config.n_mels)),
            "speaker": (torch.float32, (config.speaker_dim,)),
        }
        for name, (dtype, shape) in wanted.items():
            part = getattr(self, name)
            if not n or (part.dtype, part.device.type, tuple(part.shape)) != (dtype, "cpu", shape):
                got = f"{part.dtype} {tuple(part.shape)} on {part.device}"
                expected = f"{dtype} {shape} on the CPU, at least one speech token"
                raise AudioError(f"voice: {name}", expected=expected, got=got)
            if part.is_floating_point() and not bool(part.isfinite().all()):
                raise AudioError(f"voice: {name}", expected="finite numbers", got="NaN or infinity")
        if not 0 <= int(self.speech_tokens.min()) <= int(self.speech_tokens.max()) < config.vocab_size:
            smallest, largest = int(self.speech_tokens.min()), int(self.speech_tokens.max())
            expected = f"0 to {config.vocab_size - 1}"
            raise AudioError("voice: speech_tokens", expected=expected, got=(smallest, largest))
