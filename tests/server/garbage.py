"""A check that ended sessions are freed with their last use, not by the garbage collector."""

import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.server.live_gateway import wait_until


def instances(kinds: tuple[type, ...]) -> list[object]:
    """Objects of these types, in use or in cycles, that are not frozen."""
    return [one for one in gc.get_objects() if issubclass(type(one), kinds)]


def forget_log_records() -> None:
    """Drop the records that pytest keeps: the traceback of a logged error refers to what its frames used."""
    for handler in logging.getLogger().handlers:
        if isinstance(records := getattr(handler, "records", None), list):
            records.clear()


@asynccontextmanager
async def without_garbage(*kinds: type) -> AsyncIterator[None]:
    """Fail if what ends within leaves objects of the server to the garbage collector.

    A gateway with little traffic runs a full collection once in many hours.

    kinds: no further instance of them may be left.
    """
    gc.collect()
    gc.freeze()  # nothing of before is counted; searching the objects of all earlier tests takes seconds
    gc.disable()
    try:
        yield
        forget_log_records()
        what = f"no {' and no '.join(kind.__name__ for kind in kinds)} without a garbage collection"
        await wait_until(lambda: not instances(kinds), what)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("server."))
        assert not left, f"expected no garbage, got {dict(left)}"
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
