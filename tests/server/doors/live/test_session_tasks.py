"""The errors of a session's tasks."""

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest

from server.doors.live.session_tasks import SessionTasks, first_of


class EndError(Exception):
    """The end of a session."""


async def fail(handled: Callable[[], None] | None) -> None:
    if handled is not None:
        try:
            handled()
        except ZeroDivisionError:
            raise EndError from None
    raise EndError


async def run(*, is_nested: bool, handled: Callable[[], None] | None = None) -> "weakref.ref[EndError]":
    """Run a group until a task ends it. handled: raises what the task handles at its end. Returns: its error."""

    async def work() -> None:
        if not is_nested:
            await fail(handled)
        async with SessionTasks() as inner:
            inner.create_task(fail(handled))
            await asyncio.Event().wait()

    try:
        async with SessionTasks() as tasks:
            tasks.create_task(work())
            tasks.create_task(asyncio.Event().wait())
    except BaseExceptionGroup as errors:
        assert first_of(errors, KeyError) is None
        end = first_of(errors, EndError)
        assert end is not None, f"expected the end, got {errors!r}"
        return weakref.ref(end)
    pytest.fail("expected an error")


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("handled", [None, lambda: 1 / 0])
def test_an_error_that_ends_a_session_needs_no_garbage_collection(
    is_nested: bool, handled: Callable[[], None] | None
) -> None:
    gc.collect()
    gc.disable()
    try:
        left = asyncio.run(run(is_nested=is_nested, handled=handled))
        assert left() is None, f"expected no reference, got {gc.get_referrers(left())}"
    finally:
        gc.enable()


def test_a_cancelled_group_needs_no_garbage_collection() -> None:
    async def work(_: EndError) -> None:
        async with SessionTasks() as inner:
            inner.create_task(asyncio.Event().wait())
            await asyncio.Event().wait()

    async def scenario() -> "weakref.ref[EndError]":
        used = EndError()
        left = weakref.ref(used)
        with pytest.raises(BaseExceptionGroup):
            async with SessionTasks() as tasks:
                tasks.create_task(work(used))
                await asyncio.sleep(0)
                tasks.create_task(fail(None))
        return left

    gc.collect()
    gc.disable()
    try:
        left = asyncio.run(scenario())
        assert left() is None, f"expected no reference, got {gc.get_referrers(left())}"
    finally:
        gc.enable()
