"""A voice as the vocoder takes it: what was extracted from a prompt sound, before any model state.

Knows shapes and what identifies a voice. Does not know sound files, networks or slots.
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
    """One prompt: its codes, its mel at two frames a code, and the speaker's vector; all on the CPU.

    Compare by `digest`.
    """

    speech_tokens: Tensor  # [n] int64
    mel: Tensor  # [2n, n_mels] float32
    speaker: Tensor  # [speaker_dim] float32

    @property
    def n_frames(self) -> int:
        return len(self.mel)

    @cached_property
    def digest(self) -> str:
        """The same for equal content, whatever the voice was made from."""
        parts = (self.speech_tokens.to(torch.int64), self.mel.float(), self.speaker.float())
        data = hashlib.sha256()
        for part in parts:
            data.update(f"{tuple(part.shape)}".encode())
            data.update(part.detach().contiguous().numpy().tobytes())
        return data.hexdigest()

    def check(self, config: FlowConfig) -> None:
        """Raises: AudioError if the parts do not fit each other or the flow."""
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
                raise AudioError(f"voice: {name}", expected=f"{dtype} {shape} on the CPU, at least one code", got=got)
            if part.is_floating_point() and not bool(part.isfinite().all()):
                raise AudioError(f"voice: {name}", expected="finite numbers", got="NaN or infinity")
        if not 0 <= int(self.speech_tokens.min()) <= int(self.speech_tokens.max()) < config.vocab_size:
            got = (int(self.speech_tokens.min()), int(self.speech_tokens.max()))
            raise AudioError("voice: codes", expected=f"0 to {config.vocab_size - 1}", got=got)
