"""Speech of the speech model on the engine thread: starts, frames and ends of its requests, between live units.

A frame of all requests is the quantum. While units are in flight, a frame runs only if they are in time all the same,
and only if some client would hear a gap otherwise. Contains no sockets and no text.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from models.qwen3_tts.codec.config import SAMPLE_RATE
from models.qwen3_tts.prompt import Array
from models.qwen3_tts.runaway import CodesEnd
from models.qwen3_tts.streams import SpeechStreams, SpokenPart, SpokenRequest
from worker.engine_thread import EngineError
from worker.loop.batch_runner import check_device
from worker.loop.order.step_cost import StepCost

LOG = logging.getLogger(__name__)
LEAD_S = 0.5  # of sound that a client has; with less, its frames do not wait for units

Result = TypeVar("Result")


@dataclass(frozen=True)
class SpokenSound:
    """A part of a request's sound. samples: [n] float32 at 24 kHz, possibly none. end: why nothing follows."""

    samples: Array
    end: CodesEnd | None


Emit = Callable[[SpokenSound | Exception], None]


@dataclass(eq=False)
class SpokenUtterance:
    """One request of the loop, which changes it on the engine thread only.

    Attributes:
        emit: receives the sound, and the error that ends it; must return at once.
        is_open: more text follows.
    """

    request: SpokenRequest
    emit: Emit
    is_open: bool = False
    _slot: int | None = field(default=None, init=False)
    _later: deque[int] = field(default_factory=deque, init=False)  # text tokens without room yet
    _closes: bool = field(default=False, init=False)  # the end of the text is to be passed on
    _is_over: bool = field(default=False, init=False)
    _sound_until: float | None = field(default=None, init=False)  # when what was sent has been played


class _Task(NamedTuple):
    """A start or a call that waits.

    cost: of its kind. refuse: called in place of `run` if there will be no time for it.
    """

    cost: StepCost
    run: Callable[[], None]
    refuse: Callable[[Exception], None]


class SpeechLoop:
    """An `EngineWork` of all requests of one speech model.

    An error ends the requests that it concerns; `run` raises DeviceLostError if the device fails every call.
    """

    def __init__(self, streams: SpeechStreams, device: torch.device, clock: Callable[[], float] = time.monotonic):
        self._streams, self._device, self._clock = streams, device, clock
        self._tasks: deque[_Task] = deque()
        self._running: dict[int, SpokenUtterance] = {}
        self._frame, self._prompt, self._call = StepCost(), StepCost(), StepCost()
        self.n_frames = self.n_sounds_late = 0

    # --- commands, on the engine thread --------------------------------------------------------

    def begin(self, utterance: SpokenUtterance) -> None:
        """Start a request, which has a slot for certain, as soon as units leave time for its prompt."""

        def refuse(error: Exception) -> None:
            if not utterance._is_over:
                self._fail(utterance, error)

        self._tasks.append(_Task(self._prompt, lambda: self._start(utterance), refuse))

    def append_text(self, utterance: SpokenUtterance, ids: Sequence[int], *, is_open: bool) -> None:
        """Append text tokens to a request that is open. A request that is over ignores them."""
        utterance._later.extend(ids)
        utterance.is_open = is_open
        utterance._closes = not is_open
        self._append(utterance)

    def cancel(self, utterance: SpokenUtterance) -> None:
        """End a request without an event; its slot is free. A request that is over is left alone."""
        utterance._is_over = True
        if utterance._slot is not None:
            self._streams.cancel(utterance._slot)
            self._running.pop(utterance._slot, None)
            utterance._slot = None

    def call(self, future: Future[Result], call: Callable[[], Result]) -> None:
        """Call something that takes as long as a prompt, as soon as units leave time for it.

        future: gets the result.
        """

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)
                    check_device(error, self._device)

        def refuse(error: Exception) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._tasks.append(_Task(self._call, run, refuse))

    # --- called by the thread ------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether all requests wait for text."""
        return not self._tasks and not self._streams.can_step

    def slack_s(self) -> float:
        """Other models may always come first."""
        return float("inf")

    def after_others(self, seconds: float) -> None:
        """The time of models after this one needs no note."""

    def run(self, slack_s: float) -> None:
        """A start or another task, and a frame of all requests, as far as the time allows."""
        task = next((one for one in self._tasks if one.cost.seconds(self._clock()) <= slack_s), None)
        if task is not None:
            self._tasks.remove(task)
            slack_s -= self._timed(task.cost, task.run)
        if self._streams.can_step and self._frame.seconds(self._clock()) <= slack_s and self._is_due(slack_s):
            self._timed(self._frame, self._step)

    def fail(self, error: Exception) -> None:
        """Send the error to all requests and calls, also to those that have not begun."""
        self._fail_running(error)
        while self._tasks:
            self._tasks.popleft().refuse(error)

    def end(self) -> None:
        """End all requests and calls."""
        self.fail(EngineError("speech model", expected="one that is served", got="one that has ended"))

    def _fail_running(self, error: Exception) -> None:
        for utterance in list(self._running.values()):
            self._fail(utterance, error)

    def _is_due(self, slack_s: float) -> bool:
        """Whether a frame cannot wait: without units in flight, or if a client has little sound left."""
        if slack_s == float("inf"):
            return True
        soon = self._clock() + LEAD_S
        return any(one._sound_until is None or one._sound_until < soon for one in self._running.values())

    def _timed(self, cost: StepCost, run: Callable[[], None]) -> float:
        began = self._clock()
        run()
        now = self._clock()
        cost.count(now - began, now)
        return now - began

    def _start(self, utterance: SpokenUtterance) -> None:
        if utterance._is_over:
            return
        try:
            utterance._slot = self._streams.start(utterance.request)
        except Exception as error:
            utterance._is_over = True
            utterance.emit(error)
            check_device(error, self._device)
            return
        self._running[utterance._slot] = utterance
        self._append(utterance)

    def _append(self, utterance: SpokenUtterance) -> None:
        """Pass on text as far as there is room."""
        slot, later = utterance._slot, utterance._later
        if slot is None or utterance._is_over or not (later or utterance._closes):
            return
        n = min(len(later), self._streams.text_room(slot))
        is_whole = n == len(later)
        if n or is_whole:
            ids = [later.popleft() for _ in range(n)]
            closes = is_whole and utterance._closes
            utterance._closes = utterance._closes and not closes
            self._streams.append_text(slot, ids, is_open=not closes)

    def _step(self) -> None:
        for utterance in self._running.values():
            self._append(utterance)
        try:
            parts = self._streams.step()
        except Exception as error:
            LOG.exception("a frame of the speech model failed")
            check_device(error, self._device)
            self._fail_running(error)
            return
        self.n_frames += 1
        for part in parts:
            self._emit(self._running[part.slot], part)

    def _emit(self, utterance: SpokenUtterance, part: SpokenPart) -> None:
        now = self._clock()
        if len(part.samples):
            until = utterance._sound_until
            self.n_sounds_late += until is not None and until < now
            utterance._sound_until = max(now, until or now) + len(part.samples) / SAMPLE_RATE
        if part.end is not None:
            utterance._is_over = True
            del self._running[part.slot]
            utterance._slot = None
        utterance.emit(SpokenSound(np.asarray(part.samples), part.end))

    def _fail(self, utterance: SpokenUtterance, error: Exception) -> None:
        self.cancel(utterance)
        utterance.emit(error)


def submit_call(submit: Callable[..., Future[None]], loop: SpeechLoop, call: Callable[[], Result]) -> Future[Result]:
    """The result of `SpeechLoop.call` from another thread. submit: of the engine thread.

    Future errors: those of the call and of `submit`.
    """
    future: Future[Result] = Future()
    submitted = submit(partial(loop.call, future, call))

    def refuse(done: Future[None]) -> None:
        if (error := done.exception()) is not None and future.set_running_or_notify_cancel():
            future.set_exception(error)

    submitted.add_done_callback(refuse)
    return future
