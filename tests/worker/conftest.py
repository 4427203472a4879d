"""Fixtures of this folder: unchanged weights, short units, fake graphs without a GPU, a reset compiler, checkpoints."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tests.models.graphs.fake_captures import Replayed, replay_on_cpu
from tests.worker.chat.reply_engine import make_parts
from tests.worker.loop.engines import loaded, short_history_model, short_speech
from worker.assembly import parts as assembly
from worker.assembly.parts import EngineParts
from worker.start import voices


@pytest.fixture(autouse=True, scope="module")
def shared_weights_stay_plain() -> Iterator[None]:
    """Undo compiled layers, which override the method of their class, so that engines of the next file are eager."""
    yield
    _forget_compiled_layers()


def _forget_compiled_layers() -> None:
    if not loaded.cache_info().currsize:
        return
    model, _, _, vocoder = loaded()
    shared = [
        model,
        vocoder.flow,
        vocoder.hift,
        *([short_history_model()] if short_history_model.cache_info().currsize else []),
    ]
    for module in (part for whole in shared for part in whole.modules()):
        for name in [name for name, value in vars(module).items() if callable(value) and hasattr(type(module), name)]:
            delattr(module, name)


@pytest.fixture(scope="module")
def short_units() -> Iterator[None]:
    """Shorten the speech of all units of a file."""
    with short_speech():
        yield


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    """Model, vocoder and slots for replies."""
    return make_parts()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """The fake graphs that are captured."""
    return replay_on_cpu(monkeypatch)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Reset the compiler, so that the next test does not reuse its graphs."""
    yield
    _forget_compiled_layers()
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """Load each checkpoint once for all commands and replays of a file: none of them changes its weights."""
    loads = (assembly, "load_model"), (assembly, "load_flow_and_hift"), (voices, "load_voice_parts")
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in loads:
            patch.setattr(owner, name, cache(getattr(owner, name)))
        yield
