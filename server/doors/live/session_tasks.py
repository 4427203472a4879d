"""The tasks of one session, whose end leaves nothing for the garbage collector."""

import asyncio
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class SessionTasks(asyncio.TaskGroup):
    """A task group whose errors are freed with their last use.

    Until Python 3.13 the frame in which a `TaskGroup` raises has a variable for what it raises, and the traceback of
    the error has that frame.
    """

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseException as raised:  # a group, or the cancellation of the task that waits for the group
            _clear_all(raised)
            del error  # it may be the one that is raised, whose traceback has this frame
            raise
        finally:  # a cancelled task keeps its error, whose traceback has the frame with this group
            vars(self)["_parent_task"] = None


def first_of(error: BaseException, kind: type[E]) -> E | None:
    """The first error of a kind in nested groups; None: there is none."""
    return next((one for one in _errors_in(error) if isinstance(one, kind)), None)


def _errors_in(error: BaseException) -> Iterator[BaseException]:
    """The error, and those of nested groups in their order."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _errors_in(one)


def _clear_all(error: BaseException) -> None:
    for one in _errors_in(error):
        _clear_frames(one)


def _clear_frames(error: BaseException | None) -> None:
    """Clear the variables of the frames that an error has left, and those of the errors that were handled meanwhile."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
