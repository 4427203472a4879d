"""What files of this folder share stays as it was loaded."""

from collections.abc import Iterator

import pytest

from tests.worker.engines import forgetful, loaded


@pytest.fixture(autouse=True, scope="module")
def shared_weights_stay_plain() -> Iterator[None]:
    """A compiled layer hides its class's method; the next file's engines are to be eager."""
    yield
    if not loaded.cache_info().currsize:
        return
    model, _, _, vocoder = loaded()
    shared = [model, vocoder.flow, vocoder.hift, *([forgetful()] if forgetful.cache_info().currsize else [])]
    for module in (part for whole in shared for part in whole.modules()):
        for name in [name for name, value in vars(module).items() if callable(value) and hasattr(type(module), name)]:
            delattr(module, name)
