"""The start of a session's context, and what may change of a session later. Contains no rows and no slots."""

from dataclasses import dataclass, field

import numpy as np

from models.token2wav.voice.voice import Voice
from worker.config.session import SessionConfig


@dataclass(frozen=True)
class SystemPrompt:
    """The start of a session's context.

    Args:
        prefix, suffix: text before and after the reference voice.
        ref_audio: [n] float32 at 16 kHz for the language model, or None.
        voice: voice of the model's speech, or None.
    """

    prefix: str
    suffix: str
    ref_audio: np.ndarray | None = None
    voice: Voice | None = None

    @classmethod
    def of(cls, system: str, ref_audio: np.ndarray | None = None, voice: Voice | None = None) -> "SystemPrompt":
        """The template that the model was trained with, around a system text."""
        return cls(f"<|im_start|>system\n{system}\n<|audio_start|>", "<|audio_end|><|im_end|>", ref_audio, voice)


@dataclass(frozen=True)
class Adjustment:
    """What changes between two units of a session; None: unchanged.

    Args:
        config: all settings from now on.
        prompt: the start of the context; its voice does not count.
        voice: voice of the model's speech, from the next turn on.
    """

    config: SessionConfig | None = None
    prompt: SystemPrompt | None = None
    voice: Voice | None = None


@dataclass(frozen=True)
class AdjustOutcome:
    """What an adjustment has done.

    Args:
        from_unit: number of the next unit, the first one that it applies to.
        speaks: whether turns from now on have sound.
        notes: one sentence for each change that takes effect later, or not at all.
    """

    from_unit: int
    speaks: bool
    notes: list[str] = field(default_factory=list)
