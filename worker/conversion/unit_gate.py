"""Lets another thread use the device only while live units leave time for it."""

import threading
from collections import deque
from collections.abc import Callable

from worker.engine_thread import EngineThread

POLL_S = 0.05  # interval at which a waiting caller checks whether it is cancelled


class UnitGate:
    """An `EngineWork` without steps of its own: lets callers pass while the models before it leave enough time.

    Callers pass one at a time, in their order.
    """

    def __init__(self, thread: EngineThread):
        """thread: of the models that come first."""
        self._thread = thread
        self._waiting: deque[tuple[float, threading.Event]] = deque()  # on the engine thread
        self._loss: Exception | None = None  # the same
        thread.add(self)

    def close(self) -> None:
        """Let all callers pass from now on. Raises: EngineError as `EngineThread.remove`."""
        self._thread.remove(self)

    def wait(self, seconds: float, is_cancelled: Callable[[], bool]) -> None:
        """Return when units in flight leave that many seconds, when there are none, or when the caller is cancelled."""
        passed = threading.Event()
        asked = self._thread.submit(self._waiting.append, (seconds, passed))
        asked.add_done_callback(lambda done: None if done.exception() is None else passed.set())
        while not passed.wait(POLL_S) and not is_cancelled():
            pass

    def end_engine(self, error: Exception) -> None:
        """End the engine thread with this error: the device that both use fails every call."""
        self._thread.submit(self._lose, error)

    # --- called by the thread ------------------------------------------------------------------

    def _lose(self, error: Exception) -> None:
        self._loss = error

    @property
    def is_idle(self) -> bool:
        return not self._waiting and self._loss is None

    def slack_s(self) -> float:
        """Other models may always come first."""
        return float("inf")

    def run(self, slack_s: float) -> None:
        """Let the first caller pass, if the time allows it. Raises: the error of a lost device."""
        if self._loss is not None:
            raise self._loss
        if self._waiting and self._waiting[0][0] <= slack_s:
            self._waiting.popleft()[1].set()

    def after_others(self, seconds: float) -> None:
        """Do nothing: the time of models after this one does not count here."""

    def fail(self, error: Exception) -> None:
        """Let all callers pass; each handles a failure of the device itself."""
        self.end()

    def end(self) -> None:
        """Let all callers pass."""
        while self._waiting:
            self._waiting.popleft()[1].set()
