"""A speaker on the embedded checkpoint, settings to speak with, and conditioning rows."""

import torch
from torch import Tensor

from models.omni import OmniModel
from models.sampling.settings import SpeechSampling
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Shapes
from models.stages.runner import Runner
from models.stages.speech_steps import Speaker

WIDTH = 32
DRAWN, BEST = SpeechSampling(), SpeechSampling(greedy=True)
# Duplex units draw from all codes; top-k here, so that rounding does not decide a draw.
UNIT = SpeechSampling(top_p=1.0, top_k=8, history_per_call=True, repetition_penalty=1.3)
KINDS = ("full_attention", "sliding_window", "sliding_recompute", "reindex")


def make_speaker(model: OmniModel, n_slots: int = 4, tts_len: int = 256, shapes: Shapes | None = None) -> Speaker:
    sets = TokenSets.build([TokenSet()], model.config.vocab_size)
    return Speaker(Runner(model, sets, n_slots=n_slots, llm_len=16, tts_len=tts_len, shapes=shapes))


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def new_code(speech_tokens: list[int], at_least: int) -> int:
    """A code that occurs first at place `at_least` or behind it."""
    return next(
        code for place, code in enumerate(speech_tokens) if place >= at_least and code not in speech_tokens[:place]
    )
