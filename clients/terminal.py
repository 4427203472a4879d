"""Notes on standard error, and Ctrl-C as the end of a conversation."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable


def note(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr)


@contextlib.asynccontextmanager
async def interruptible(stop: asyncio.Event, has_begun: Callable[[], bool], what: str) -> AsyncIterator[None]:
    """Inside it, Ctrl-C sets `stop`, or cancels the task before the conversation begins.

    A second Ctrl-C raises KeyboardInterrupt.

    Args:
        stop: the event.
        has_begun: whether there is something to finish.
        what: what did not begin, for the note.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "expected a running task, got none"

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        if has_begun():
            stop.set()
        else:
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    except asyncio.CancelledError:
        if has_begun():
            raise
        note(f"interrupted before {what}")
    finally:
        loop.remove_signal_handler(signal.SIGINT)
