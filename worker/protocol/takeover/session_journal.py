"""What rebuilds the context of a duplex session on another worker: its messages, and the decisions of its units.

Matches the worker's answers with the client's messages, which are answered in order. Contains no sockets.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from worker.protocol.codec import peek_header
from worker.protocol.takeover.journal_steps import (
    ANSWERS,
    CHUNK,
    DECIDED,
    ERROR,
    FRAME,
    INTERRUPTED,
    KEEP,
    MAX_DEATHS,
    OF_PICTURES,
    PARTIAL,
    PAUSED,
    PREPARE,
    PREPARED,
    RESULT,
    RESUMED,
    STEPS,
    UNDECIDED,
    DroppedInput,
    KeptJournal,
    KeptStep,
    OpenMessage,
    Step,
)
from worker.protocol.takeover.message_bytes import ByteBudget, Data, size_of, type_of
from worker.protocol.takeover.message_content import InputContent, input_content

MAX_BYTES, MAX_UNITS = 16 * 2**20, 240  # of one session
MAX_BYTES_TOTAL = 512 * 2**20  # of all sessions


class SessionJournal:
    """The messages of one session since its last `prepare`.

    Args:
        budget: bytes of all journals.

    Attributes:
        n_omitted: units that are not kept any more.
        n_omitted_pictures: of those units.
        is_one_by_one: the worker may run chunks that wait as one unit, so none may wait while it rebuilds.
    """

    def __init__(self, budget: ByteBudget):
        self._budget = budget
        self._steps: deque[Step] = deque()
        self._open: deque[OpenMessage] = deque()
        self._decided: Data | None = None
        self._given: deque[Data] = deque()  # decisions of units that the worker rebuilds
        self._goes_on = False  # the turn of the unit that is decided
        self._is_speaking = False  # a turn, or its sound, goes on after the newest unit
        self._lacks_turn = False  # the newest unit that is not kept has a turn that goes on
        self._n_bytes = self._n_units = 0
        self._n_parts = self._n_skipped = 0  # partial results of the open unit: sent to the client; not sent again
        self._dropped = DroppedInput()  # since the last `take_dropped`
        self._sound_in, self.is_one_by_one = "base64", False
        self._is_kept, self._is_whole = True, True
        self.changed = asyncio.Event()  # set after an answer
        self.n_omitted = self.n_omitted_pictures = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """What rebuilds the context, in order."""
        return tuple(self._steps)

    @property
    def unanswered(self) -> tuple[Data, ...]:
        """Messages that the next worker has to answer, in order."""
        return tuple(one.data for one in self._open)

    @property
    def n_units(self) -> int:
        """Units that can be rebuilt."""
        return self._n_units

    @property
    def n_chunks(self) -> int:
        """Chunks without an answer."""
        return sum(one.kind == CHUNK for one in self._open)

    @property
    def is_at_edge(self) -> bool:
        """Whether every message is answered, so that another worker can go on."""
        return not self._open

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is spoken after the newest unit."""
        return not self._is_speaking

    @property
    def is_paused(self) -> bool:
        """Whether the session is paused."""
        return any(step.kind == PAUSED for step in self._steps)

    @property
    def can_rebuild(self) -> bool:
        """Whether the session can go on with another worker."""
        return self._is_kept and self._is_whole and bool(self._steps)

    # --- messages ------------------------------------------------------------------------------

    def sent(self, data: Data) -> bool:
        """Record a message to the worker. Returns: False for one that no client may send."""
        kind = type_of(data)
        if kind in (DECIDED, KEEP):
            return False
        if not self._is_kept and kind != PREPARE:
            return True
        if kind == PREPARE:
            self._is_kept = True
        message = OpenMessage(kind, data, size_of(data))
        self._open.append(message)
        self._hold(message.n_bytes)
        return True

    def given(self, data: Data) -> None:
        """Record `decided` of a gateway: the next chunk is a unit that the worker rebuilds, or a piece of one."""
        if self._is_kept:
            self._given.append(data)
            self._hold(size_of(data))

    def _decide(self, data: Data, result: dict[str, Any]) -> None:
        self._hold(-size_of(data))
        if result.get("incomplete") is not True:
            self._decided, self._goes_on = data, peek_header(data).get("goes_on") is True

    def answered(self, kind: str, data: Data, header: dict[str, Any]) -> bool:
        """Record a message of the worker. Returns: whether the client must not have it."""
        if kind == DECIDED:
            self._decided, self._goes_on = data, header.get("goes_on") is True
            return True
        if kind == PARTIAL:
            is_repeated, self._n_skipped = self._n_skipped > 0, max(0, self._n_skipped - 1)
            self._n_parts += not is_repeated
            return is_repeated
        if kind in ANSWERS and self._is_kept:
            if kind == RESULT and self._given:
                self._decide(self._given.popleft(), header)
            self._close(kind, header)
            self.changed.set()
        return False

    def keep(self, is_kept: bool) -> None:
        """Whether the session that has just been prepared goes on with another worker."""
        self._is_kept = is_kept
        if not is_kept:
            self.clear()

    def _close(self, kind: str, header: dict[str, Any]) -> None:
        """Take the message that an answer belongs to from the open ones."""
        if kind == PREPARED:
            spec = header.get("spec")
            spec = spec if isinstance(spec, dict) else {}
            self._sound_in, self.is_one_by_one = str(spec.get("sound_in")), spec.get("backlog") == "catch_up"
            self._begin()
            return
        frames: list[OpenMessage] = []
        while self._open and self._open[0].kind == FRAME:
            frames.append(self._open.popleft())
        if not self._open:  # an error that refuses a picture, or an answer to nothing
            self._hold(-sum(one.n_bytes for one in frames))
            self._is_whole = self._is_whole and kind == ERROR and len(frames) <= 1
            return
        message = self._open.popleft()
        decided, self._decided = self._decided, None
        if kind == ERROR and frames and header.get("code") in OF_PICTURES:
            self._is_whole = False
        if kind != ERROR and (kind == RESULT) != (message.kind == CHUNK):
            self._is_whole = False  # an error that refused a picture was taken for that of a chunk
        if message.kind == CHUNK:
            self._n_parts = self._n_skipped = 0
        else:  # the pictures still wait for a chunk
            self._open.extendleft(reversed(frames))
            frames = []
        messages = [one.data for one in frames]
        n_bytes = message.n_bytes + sum(one.n_bytes for one in frames)
        if kind == RESULT:
            if header.get("incomplete") is not True:
                self._is_speaking = not (header.get("is_listen") or header.get("end_of_turn"))
            if decided is not None:
                messages.append(decided)
                n_bytes += size_of(decided)
                self._hold(size_of(decided))
                self._forget(INTERRUPTED)  # the unit has seen it
            elif header.get("incomplete") is True:
                messages.append(UNDECIDED)
            else:
                self._is_whole = False  # a worker that does not tell its decisions
        elif kind == RESUMED:
            self._forget(PAUSED)
        if not self._is_whole or kind not in STEPS:
            self._hold(-n_bytes)
            return
        goes_on = decided is not None and self._goes_on
        self._steps.append(Step((*messages, message.data), kind, decided is not None, n_bytes, goes_on))
        self._n_units += decided is not None
        self._bound()

    def _begin(self) -> None:
        """Keep the `prepare` that is answered, and forget what came before it."""
        self._forget_steps()
        self._decided = None
        self._is_speaking = False
        self._n_parts = self._n_skipped = 0
        self._is_whole = False
        while self._open and not self._is_whole:
            message = self._open.popleft()
            self._is_whole = message.kind == PREPARE
            if self._is_whole:
                self._steps.append(Step((message.data,), PREPARED, False, message.n_bytes))
            else:
                self._hold(-message.n_bytes)  # such as pictures that waited, which the worker forgets too
        self._bound()

    def _bound(self) -> None:
        """Drop the oldest units above the bounds. The prompt, texts and changes of settings stay, or nothing does."""
        while self._is_above_bounds or (self._lacks_turn and self._n_units):  # a turn is not rebuilt without its begin
            units = [step for step in self._steps if step.kind == RESULT]
            if not units:
                if sum(step.n_bytes for step in self._steps) > MAX_BYTES:
                    self._is_whole = False
                    self._forget_steps()
                return
            for step in units:  # the pieces of a unit go with it
                self._steps.remove(step)
                self._hold(-step.n_bytes)
                self.n_omitted_pictures += self._content((step,)).n_pictures
                if step.is_decided:
                    self._n_units -= 1
                    self.n_omitted += 1
                    self._lacks_turn = step.goes_on
                    break

    @property
    def _is_above_bounds(self) -> bool:
        most = min(MAX_BYTES, self._budget.journal_share) if self._budget.is_exhausted else MAX_BYTES
        return self._n_units > MAX_UNITS or self._n_bytes > most

    # --- a lost worker -------------------------------------------------------------------------

    def lose_worker(self, *, is_death: bool = True) -> bool:
        """Prepare for another worker.

        Args:
            is_death: the worker died or hangs, so that the message whose answer was next may be why.
        Returns:
            Whether this message is dropped, with the pictures of its unit: it was next at `MAX_DEATHS` deaths.
        """
        self._decided = None
        self._n_skipped = self._n_parts
        number = next((n for n, one in enumerate(self._open) if one.kind != FRAME), None)
        if number is None or not is_death:
            return False
        suspect = self._open[number] = self._open[number]._replace(n_deaths=self._open[number].n_deaths + 1)
        if suspect.n_deaths < MAX_DEATHS:
            return False
        self._n_parts = self._n_skipped = 0
        dropped = list(self._open)[0 if suspect.kind == CHUNK else number : number + 1]
        self._open = deque(one for one in self._open if not any(one is gone for gone in dropped))
        self._hold(-sum(one.n_bytes for one in dropped))
        self._drop(input_content([one.data for one in dropped], self._sound_in), 1)
        return True

    def lose_worker_at(self, step: Step, n_deaths: int = 1) -> bool:
        """Record that workers were lost while they rebuilt a step.

        Args:
            step: the step.
            n_deaths: workers lost at it since the last call.
        Returns:
            Whether the step is dropped, with the turn that it is a part of: a turn is rebuilt as a whole.
        """
        number = next((n for n, one in enumerate(self._steps) if one is step), None)
        if number is None:
            return False
        step = self._steps[number] = step._replace(n_deaths=step.n_deaths + n_deaths)
        if step.n_deaths < MAX_DEATHS or step.kind == PREPARED:
            return False
        dropped = self._turn_around(step) if step.kind == RESULT else [step]
        self._steps = deque(one for one in self._steps if not any(one is gone for gone in dropped))
        self._hold(-sum(one.n_bytes for one in dropped))
        n_units = sum(one.is_decided for one in dropped)
        self._n_units -= n_units
        self._drop(self._content(dropped), max(1, n_units))
        return True

    @property
    def n_after_suspect(self) -> int | None:
        """Messages after the one at whose answer a worker was lost, if it still has none; None: there is none."""
        return next((n for n, one in enumerate(reversed(self._open)) if one.n_deaths), None)

    def suspect(self, n_after: int | None) -> None:
        """Count a worker that another gateway or worker has seen lost. n_after: as `n_after_suspect` there."""
        if n_after is not None and n_after < len(self._open):  # otherwise it has its answer
            self._open[-1 - n_after] = self._open[-1 - n_after]._replace(n_deaths=1)

    def take_dropped(self) -> DroppedInput:
        """What was dropped because workers were lost at it, since the last call."""
        dropped, self._dropped = self._dropped, DroppedInput()
        return dropped

    def _turn_around(self, step: Step) -> list[Step]:
        """The units, with their pieces, of the turn that a step is in; without a turn its unit alone."""
        turn: list[Step] = []
        for one in self._steps:
            if one.kind != RESULT:
                continue
            turn.append(one)
            if one.is_decided and not one.goes_on:
                if any(part is step for part in turn):
                    break
                turn = []
        return turn

    def _drop(self, content: InputContent, n_units: int) -> None:
        before = self._dropped
        self._dropped = DroppedInput(before.n_units + n_units, before.content + content)

    def _content(self, steps: Iterable[Step]) -> InputContent:
        return input_content([data for step in steps for data in step.messages], self._sound_in)

    def clear(self) -> None:
        """Forget everything and return the memory to the budget."""
        self._forget_steps()
        self._hold(-sum(one.n_bytes for one in self._open) - sum(map(size_of, self._given)))
        self._open.clear()
        self._given.clear()

    # --- another gateway -----------------------------------------------------------------------

    def copied(self) -> tuple[KeptJournal, list[Data]] | None:
        """The journal for a gateway that takes the session over, and its messages; None if it cannot rebuild it."""
        if not self.can_rebuild or self._given:
            return None
        decided = [] if self._decided is None else [self._decided]
        state = KeptJournal(
            steps=[KeptStep(one.kind, one.is_decided, one.goes_on, len(one.messages)) for one in self._steps],
            decided=bool(decided),
            goes_on=self._goes_on,
            n_open=len(self._open),
            n_parts=self._n_parts,
            n_omitted=self.n_omitted,
            n_omitted_pictures=self.n_omitted_pictures,
            is_speaking=self._is_speaking,
            lacks_turn=self._lacks_turn,
            sound_in=self._sound_in,
            is_one_by_one=self.is_one_by_one,
            n_after_suspect=self.n_after_suspect,
        )
        of_steps = [data for step in self._steps for data in step.messages]
        return state, [*of_steps, *decided, *(one.data for one in self._open)]

    def restore(self, state: KeptJournal, messages: Sequence[Data]) -> None:
        """Continue the journal of a worker, as `copied` returns it; this one must be new."""
        left = deque(messages)
        for step in state.steps:
            parts = tuple(left.popleft() for _ in range(step.n))
            self._steps.append(Step(parts, step.kind, step.is_decided, sum(map(size_of, parts)), step.goes_on))
        self._decided, self._goes_on = left.popleft() if state.decided else None, state.goes_on
        self._open.extend(OpenMessage(type_of(data), data, size_of(data)) for data in left)
        self._hold(sum(step.n_bytes for step in self._steps) + sum(one.n_bytes for one in self._open))
        self._n_units, self._n_parts = sum(step.is_decided for step in state.steps), state.n_parts
        self.n_omitted, self.n_omitted_pictures = state.n_omitted, state.n_omitted_pictures
        self._is_speaking, self._lacks_turn = state.is_speaking, state.lacks_turn
        self._sound_in, self.is_one_by_one = state.sound_in, state.is_one_by_one
        self.suspect(state.n_after_suspect)
        self._bound()

    def _forget(self, kind: str) -> None:
        """Forget the steps with this answer, which have no effect any more."""
        for step in [one for one in self._steps if one.kind == kind]:
            self._steps.remove(step)
            self._hold(-step.n_bytes)

    def _forget_steps(self) -> None:
        self._hold(-sum(step.n_bytes for step in self._steps))
        self._steps.clear()
        self._n_units = self.n_omitted = self.n_omitted_pictures = 0
        self._lacks_turn = False

    def _hold(self, n_bytes: int) -> None:
        was_empty = self._n_bytes == 0
        self._n_bytes += n_bytes
        self._budget.used += n_bytes
        self._budget.n_journals += was_empty - (self._n_bytes == 0)
