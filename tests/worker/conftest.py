"""What files of this folder share: weights that stay as they were loaded, short units, graphs without a GPU, a compiler
anew.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.models.graphs.fake_captures import Replayed, replay_on_cpu
from tests.worker.loop.engines import loaded, short_history_model, short_speech


@pytest.fixture(autouse=True, scope="module")
def shared_weights_stay_plain() -> Iterator[None]:
    """A compiled layer hides its class's method; the next file's engines are to be eager."""
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
    """Units of speech in a whole file are short."""
    with short_speech():
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """Graphs that are captured, all of them doubles."""
    return replay_on_cpu(monkeypatch)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that is compiled here is found by the next test."""
    yield
    _forget_compiled_layers()
    torch._dynamo.reset()
