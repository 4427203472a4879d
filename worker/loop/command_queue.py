"""Typed commands from any thread to the engine thread, in the order in which they were submitted.

Contains the queue and the futures of the commands. Does not contain what a command does.
"""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, ParamSpec, Protocol, TypeVar

Result = TypeVar("Result")
Params = ParamSpec("Params")


class _AnyCommand(Protocol):
    is_long: bool

    def run(self) -> None: ...

    def refuse(self, error: Exception) -> None: ...


@dataclass(eq=False)
class _Command(Generic[Result]):
    call: Callable[[], Result]
    future: Future[Result]
    is_long: bool

    def run(self) -> None:
        """Call it and set the future. Raises: what the call raises beyond Exception, such as KeyboardInterrupt."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.call())
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def refuse(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class CommandQueue:
    """The inbox of the engine thread. It refuses commands until `accept` and after `refuse_all`."""

    def __init__(self, error: Callable[[], Exception]):
        """error: makes the exception of a command that is refused."""
        self._inbox: queue.SimpleQueue[_AnyCommand | None] = queue.SimpleQueue()
        self._error = error
        self._is_accepting = False

    def submit(self, call: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Future[Result]:
        """Call something on the engine thread. Future errors: those of the call; that of a refused command."""
        return self._put(partial(call, *args, **kwargs), is_long=False)

    def submit_long(
        self, call: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Future[Result]:
        """The same for a call that takes as long as a unit: the loop runs once before the next command."""
        return self._put(partial(call, *args, **kwargs), is_long=True)

    def _put(self, call: Callable[[], Result], *, is_long: bool) -> Future[Result]:
        future: Future[Result] = Future()
        self._inbox.put(_Command(call, future, is_long))
        if not self._is_accepting:  # the engine thread no longer reads the inbox
            self._refuse_rest()
        return future

    def accept(self) -> None:
        """Accept commands from now on: a thread calls `run_pending`."""
        self._is_accepting = True

    def end(self) -> None:
        """Make `run_pending` return False after the commands submitted so far."""
        self._inbox.put(None)

    def refuse_all(self) -> None:
        """Refuse the commands in the inbox and all later ones."""
        self._is_accepting = False
        self._refuse_rest()

    def is_empty(self) -> bool:
        """Whether no command waits."""
        return self._inbox.empty()

    def run_pending(self, *, block: bool) -> bool:
        """Run the commands in the inbox, up to the first long one. block: wait for the first command.

        Returns: False after `end`.
        """
        try:
            while True:
                command = self._inbox.get(block=block)
                if command is None:
                    return False
                block = False
                command.run()
                if command.is_long:
                    return True
        except queue.Empty:
            return True

    def _refuse_rest(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command.refuse(self._error())


def ignore_result(future: Future[None]) -> None:
    """Retrieve the exception of a command, so that one which comes too late is not logged."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
