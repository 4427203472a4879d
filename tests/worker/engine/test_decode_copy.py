"""What an engine does because its model decodes from a copy of weights, and not because a setting asks for one."""

from unittest import mock

import pytest

from models.omni import OmniModel
from tests.worker.loop.engines import make_config, make_parts
from worker.engine import Engine
from worker.loop.unit_loop import UnitLoop
from worker.trace.header import header_of


@pytest.mark.parametrize("has_copy", [False, True])
def test_engine_and_trace_follow_the_copy_that_the_model_has(has_copy: bool) -> None:
    config = make_config()
    parts = make_parts(config)
    parts.model.decode_copy = True  # of quantised weights, and without memory or kernels, there is none
    assert not parts.model.has_decode_copy
    with (
        mock.patch.object(OmniModel, "has_decode_copy", has_copy),
        mock.patch("worker.engine.UnitLoop", wraps=UnitLoop) as loop,
    ):
        Engine(parts, config)
        assert loop.call_args.kwargs["first_sound_alone"] is has_copy
        assert header_of(parts, config)["engine"]["decode_copy"] is has_copy
