"""Checkpoints that the commands of one test process share."""

from collections.abc import Iterator
from functools import cache

import pytest

from worker.assembly import parts
from worker.start import voices


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """Load each checkpoint once for all commands of this process: no command changes its weights."""
    loads = (parts, "load_model"), (parts, "load_flow_and_hift"), (voices, "load_voice_parts")
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in loads:
            patch.setattr(owner, name, cache(getattr(owner, name)))
        yield
