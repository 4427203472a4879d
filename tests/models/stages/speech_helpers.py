"""A speaker on the embedded checkpoint, sampling settings, and conditioning rows."""

import torch
from torch import Tensor

from models.layers.kv_pages import PageSizes
from models.omni import OmniModel
from models.sampling.settings import SpeechSampling
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Shapes
from models.stages.runner import Runner
from tests.models.stages.speech_calls import WholeCallSpeaker

WIDTH = 32
DRAWN, BEST = SpeechSampling(), SpeechSampling(greedy=True)
# Units draw from all tokens; top-k here, so that rounding does not change a draw.
UNIT = SpeechSampling(top_p=1.0, top_k=8, history_per_call=True, repetition_penalty=1.3)
KINDS = ("full_attention", "sliding_window", "sliding_recompute", "reindex")


def make_speaker(
    model: OmniModel,
    n_slots: int = 4,
    tts_len: int = 256,
    shapes: Shapes | None = None,
    speech_pages: PageSizes | None = None,
) -> WholeCallSpeaker:
    sets = TokenSets.build([TokenSet()], model.config.vocab_size)
    sizes = {"n_slots": n_slots, "llm_len": 16, "tts_len": tts_len}
    return WholeCallSpeaker(Runner(model, sets, **sizes, shapes=shapes, speech_pages=speech_pages))


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def first_new_token(speech_tokens: list[int], at_least: int) -> int:
    """The first token at index `at_least` or later that does not occur before."""
    return next(
        token for place, token in enumerate(speech_tokens) if place >= at_least and token not in speech_tokens[:place]
    )
