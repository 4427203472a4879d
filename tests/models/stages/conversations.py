"""A chat with the embedded checkpoint, its messages, and a way to choose its tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.checkpoint.config import load_preprocessor_config
from models.inputs.tokens import Tokenizer
from models.omni import OmniModel
from models.sampling.text import TokenSet, TokenSets
from models.stages.chat import Chat
from models.stages.runner import Runner
from models.stages.step_types import Chosen

LLM_LEN = 560  # room for a reply of default length and a short prompt


def make_chat(model: OmniModel, tiny: Path, n_slots: int = 2) -> Chat:
    tokenizer = Tokenizer.load(tiny)
    sets = TokenSets.build([TokenSet(pad_id=tokenizer.special.im_end)], model.config.vocab_size)
    runner = Runner(model, sets, n_slots=n_slots, llm_len=LLM_LEN, tts_len=16)
    return Chat(runner, tokenizer, load_preprocessor_config(tiny))


def force_tokens(chat: Chat, monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    """Make the chat choose `ids` in order, then its own tokens."""
    remaining = iter(ids)
    for name in ("feed", "step"):
        real = getattr(chat.steps, name)

        def forced(*arguments: Any, real: Callable[..., list[Chosen]] = real) -> list[Chosen]:
            (chosen,) = real(*arguments)
            return [chosen._replace(token=next(remaining, chosen.token))]

        monkeypatch.setattr(chat.steps, name, forced)


def user(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def sound(n_samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, n_samples).astype(np.float32)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
