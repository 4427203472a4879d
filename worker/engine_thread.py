"""The thread that owns the device: it runs commands, and one iteration after the other of the models that it serves.

The model with deadlines comes first. Before each iteration of another model the thread asks how long the first one can
do without it. Contains the thread and the order; does not contain any model's work.
"""

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import ParamSpec, Protocol, TypeVar

import torch

from models.errors import ModelError
from worker.loop.command_queue import CommandQueue

LOG = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 30.0
PR_SET_TIMERSLACK, SLACK_NS = 29, 1000  # of <linux/prctl.h>

Result = TypeVar("Result")
Params = ParamSpec("Params")


class EngineError(ModelError, RuntimeError):
    """The engine does not run, or its thread has ended with an error."""


class EngineWork(Protocol):
    """What one model has to do on the thread. All methods are called there."""

    @property
    def is_idle(self) -> bool:
        """Whether `run` has nothing to do until the next command."""

    def slack_s(self) -> float:
        """Seconds that the thread can spend on other work before something of this one is late."""

    def run(self, slack_s: float) -> None:
        """One iteration. slack_s: what the models before this one leave for it, `inf` if none of them is at work."""

    def after_others(self, seconds: float) -> None:
        """Note that the thread was busy with other work for so long."""

    def fail(self, error: Exception) -> None:
        """Tell all clients that the thread has failed; `end` follows."""

    def end(self) -> None:
        """End everything: the thread ends, or serves this model no more."""


class EngineThread:
    """The thread of one device. failure: the error that ended it; None if there is none.

    commands: its inbox.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic):
        self.commands = CommandQueue(self.error)
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.device, self._clock = device, clock
        self._works: Sequence[EngineWork] = ()

    def start(self) -> None:
        """Start the thread, once."""
        assert self.thread is None, "start: expected an engine that was not started, got a second call"
        self.commands.accept()
        self.thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End all work and the thread after the step in flight."""
        if self.thread is not None and self.thread.is_alive():
            self.commands.end()
            self.thread.join(CLOSE_TIMEOUT_S)
            if self.thread.is_alive():
                LOG.error("the engine's step in flight did not end within %.0f s", CLOSE_TIMEOUT_S)

    def add(self, work: EngineWork, *, first: bool = False) -> None:
        """Serve this model from the next iteration on. first: before those that are served already."""
        self._works = (work, *self._works) if first else (*self._works, work)

    def remove(self, work: EngineWork) -> None:
        """End the work of this model, and serve it no more; on return nothing of it runs.

        Raises: EngineError if the step in flight does not end.
        """

        def leave() -> None:
            self._works = [one for one in self._works if one is not work]
            work.end()

        if self.thread is None or not self.thread.is_alive():  # it has ended all works
            self._works = [one for one in self._works if one is not work]
            return
        try:
            self.submit(leave).result(CLOSE_TIMEOUT_S)
        except TimeoutError:
            expected = f"the end of the step in flight within {CLOSE_TIMEOUT_S:.0f} s"
            raise EngineError("engine", expected=expected, got="none") from None

    def submit(self, call: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Future[Result]:
        """Call a function on the thread. Future errors: those of the call; EngineError."""
        return self.commands.submit(call, *args, **kwargs)

    def error(self) -> EngineError:
        """The error of work that the thread no longer does."""
        got = "none" if self.failure is None else f"one that failed: {self.failure}"
        return EngineError("engine", expected="a running thread", got=got)

    def _serve(self) -> None:
        _sleep_exactly()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)
        try:
            while self.commands.run_pending(block=all(work.is_idle for work in self._works)):
                self._run_works()
        except BaseException as error:
            LOG.exception("the engine failed")
            self.failure = error
            for work in self._works:
                work.fail(self.error())
        finally:
            for work in self._works:
                work.end()
            self.commands.refuse_all()

    def _run_works(self) -> None:
        """One iteration of each model. Those with one model cost nothing more than it."""
        slack_s, works = float("inf"), self._works  # another thread may add one meanwhile
        for index, work in enumerate(works):
            if index == 0:
                work.run(slack_s)
                continue
            slack_s = min(slack_s, works[index - 1].slack_s())
            began = self._clock()
            work.run(slack_s)
            spent = self._clock() - began
            for before in works[:index]:
                before.after_others(spent)


def _sleep_exactly() -> None:
    """Let sleeps of the calling thread end within a microsecond of their time; Linux adds up to 50 by default."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
