"""The context of a session on another worker: what it consists of is sent there, and each answer is awaited."""

import asyncio
import json
from collections.abc import Iterator, Sequence

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from models.errors import ModelError
from server.dispatch.workers import WorkerLease
from server.live.relay import fragments
from worker.protocol.codec import peek_header
from worker.protocol.codes import ErrorCode
from worker.protocol.takeover.journal_steps import ANSWERS, ERROR, INTERRUPTED, Step
from worker.protocol.takeover.message_bytes import Data

REBUILD_S = 30.0
SPEECH = ("spoken", "unvoiced", "drains")  # fields of `Decided`


class RebuildError(ModelError, RuntimeError):
    """A worker does not rebuild the context, or is lost meanwhile.

    suspect: the step whose answer was next, if it may be why. joint: the steps sent together that have no answer.
    """

    suspect: Step | None = None
    joint: Sequence[Step] = ()


class ContextRebuild:
    """A context on a worker.

    Args:
        link: connection to the worker.
        lease: the session's slot there.
        one_by_one: each step waits for the answer to the one before.

    Attributes:
        fed: the steps that the worker has answered.
    """

    def __init__(self, link: ClientConnection, lease: WorkerLease, *, one_by_one: bool):
        self._link, self._lease, self._one_by_one = link, lease, one_by_one
        self.fed: list[Step] = []

    async def feed(self, steps: Sequence[Step]) -> None:
        """Send further steps, and wait for their answers. Raises: RebuildError, also after `REBUILD_S`."""
        until = asyncio.get_running_loop().time() + REBUILD_S
        messages = messages_of(steps)
        for part in self._parts(steps):
            await self._feed(steps[part], messages[part], until)

    def _parts(self, steps: Sequence[Step]) -> Iterator[slice]:
        """Groups of steps that are sent together. An interrupt takes effect on arrival, so it is a group of its own."""
        begin = 0
        for end in range(1, len(steps) + 1):
            is_last = end == len(steps)
            if is_last or self._one_by_one or INTERRUPTED in (steps[end - 1].kind, steps[end].kind):
                yield slice(begin, end)
                begin = end

    async def _feed(self, steps: Sequence[Step], messages: Sequence[Sequence[Data]], until: float) -> None:
        """Send the steps, and wait for their answers. messages: of each step. until: deadline on the loop's clock."""
        n_before = len(self.fed)
        sending = asyncio.create_task(self._send(messages), name="rebuild-send")
        receiving = asyncio.create_task(self._receive(steps), name="rebuild-receive")
        lost = asyncio.create_task(self._lease.worker.lost.wait(), name="worker-lost")
        try:
            left_s = max(0.0, until - asyncio.get_running_loop().time())
            done, _ = await asyncio.wait((receiving, lost), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if receiving in done:
                receiving.result()
                return
            if done:
                raise self._error("answers", "none: it is lost", steps[len(self.fed) - n_before])
            raise self._error("answers", f"{len(self.fed)} in {REBUILD_S:g} s", None)  # a slow worker has not died
        except RebuildError as error:
            error.joint = steps[len(self.fed) - n_before :]
            raise
        finally:
            for task in (sending, receiving, lost):
                task.cancel()
            await asyncio.gather(sending, receiving, lost, return_exceptions=True)

    async def _send(self, messages: Sequence[Sequence[Data]]) -> None:
        try:
            for of_step in messages:
                for data in of_step:
                    await self._link.send(fragments(data))
        except ConnectionClosed:
            pass  # the other task ends with the close code

    async def _receive(self, steps: Sequence[Step]) -> None:
        for step in steps:
            try:
                while (header := peek_header(await self._link.recv())).get("type") not in ANSWERS:
                    pass
            except ConnectionClosed as closed:
                # A worker that sends a close frame, such as one that shuts down, has not died of the step.
                raise self._error(step.kind, str(closed), step if closed.rcvd is None else None) from None
            if header["type"] == ERROR or header["type"] != step.kind:
                is_suspect = header.get("code") not in (ErrorCode.DRAINING, ErrorCode.ENGINE)
                got = f"{header['type']} {header.get('error', '')}"
                raise self._error(step.kind, got, step if is_suspect else None)
            self.fed.append(step)

    def _error(self, expected: str, got: str, suspect: Step | None) -> RebuildError:
        error = RebuildError(f"{self._lease.worker.name}: rebuilding", expected=expected, got=got)
        error.suspect = suspect
        return error


def messages_of(steps: Sequence[Step]) -> list[Sequence[Data]]:
    """The messages of each step.

    Only the newest unit keeps its speech tokens. If it speaks the rest of a turn whose text has ended, so do the units
    before it that speak this rest, and the last one with text.
    """
    found: list[Sequence[Data]] = []
    is_needed = True
    for step in reversed(steps):
        messages = step.messages
        if step.is_decided:
            *before, decided, chunk = messages
            fields = peek_header(decided)
            if fields.get("spoken") and not is_needed:
                kept = {name: value for name, value in fields.items() if name not in SPEECH}
                messages = (*before, json.dumps(kept), chunk)
            is_needed = is_needed and fields.get("drains") is True
        found.append(messages)
    return found[::-1]
