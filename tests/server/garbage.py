"""A check that ended sessions are freed with their last use, not by the garbage collector."""

import gc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.server.live_gateway import wait_until


@asynccontextmanager
async def without_garbage(*kinds: type) -> AsyncIterator[None]:
    """Fail if what ends within leaves objects of the server to the garbage collector.

    A gateway with little traffic runs a full collection once in many hours.

    kinds: no instance of them may be left.
    """
    gc.collect()
    gc.disable()
    try:
        yield
        what = f"no {' and no '.join(kind.__name__ for kind in kinds)} without a garbage collection"
        await wait_until(lambda: not any(issubclass(type(one), kinds) for one in gc.get_objects()), what)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("server."))
        assert not left, f"expected no garbage, got {dict(left)}"
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
