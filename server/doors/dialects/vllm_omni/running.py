"""One vLLM-Omni session over any number of connections: its tasks, its limits, and the time it has without one."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from server.dispatch.dispatcher import PendingSession
from server.doors.core.event_writer import EventWriter, event_text
from server.doors.dialects.ends import (
    CONNECTION_LOST,
    INTERNAL,
    SHUTDOWN,
    TIMEOUT,
    WORKER_LOST,
    end_of,
    end_of_errors,
)
from server.doors.dialects.vllm_omni.events import OmniEvents
from server.doors.dialects.vllm_omni.session import OmniSession
from server.doors.dialects.vllm_omni.settings import OmniSettings
from server.doors.dialects.vllm_omni.transcripts import OmniTranscripts
from server.doors.live.door_context import DoorContext
from server.doors.live.drain_wait import DrainWait
from server.doors.live.ends import GONE, DoorEnd, SessionOverError
from server.doors.live.session_tasks import SessionTasks
from server.doors.live.unit_run import run_units
from server.live.closes import DRAINING
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession
from server.live.recorder import Recorder
from server.live.resumption import KEPT_BYTES, MessageJournal, ResumeTokens
from worker.protocol.takeover.message_bytes import ByteBudget

LOG = logging.getLogger(__name__)
POLL_S = 0.5
EXPIRES = (TIMEOUT, CONNECTION_LOST)


class OmniLink:
    """One connection of a session.

    Attributes:
        writer: sends events over it.
        generation: its number among the session's connections.
        replaced: set once another connection has taken its place.
    """

    def __init__(self, writer: EventWriter):
        self.writer, self.generation = writer, 0
        self.replaced = asyncio.Event()


class OmniRun:
    """One session, from its first connection to its end.

    Args:
        context: parts of the gateway.
        live: its entry in the list of sessions.
        settings: before the client's.
        link: its first connection.
    """

    def __init__(self, context: DoorContext, live: LiveSession, settings: OmniSettings, link: OmniLink):
        self._context, self.live = context, live
        self._journal = MessageJournal(time.monotonic, ByteBudget(KEPT_BYTES))
        self._tokens = ResumeTokens()
        self._link: OmniLink | None = None
        self._generation = 0
        self._asked_end: DoorEnd | None = None
        self._changed = asyncio.Event()
        self._opened_at = self._accepted_at = self._detached_at = time.monotonic()
        self._drain = DrainWait(time.monotonic)
        self.send = OmniEvents(self._put, live.session_id)

        def check_model(name: str) -> str:
            return context.model_names.resolve_for(name, live.identity)

        transcripts = OmniTranscripts(self.send, context.transcriber, live.identity, live.session_id)
        self.session = OmniSession(
            self.send, settings, context.voices, check_model, live.session_id, time.monotonic, transcripts
        )
        self.task: asyncio.Task[DoorEnd] | None = None
        self._attach(link)
        self.session.grant(attachment_generation=self._generation, resume_token=self._tokens.issue())

    @property
    def is_running(self) -> bool:
        """Whether the session has begun and is not over."""
        return self.task is not None and not self.task.done()

    def accept(self) -> None:
        """Record an event of the client that was accepted, other than `session.resume`."""
        self._accepted_at = time.monotonic()
        self._tokens.confirm()
        self.live.touch()

    def acknowledge(self, number: int) -> bool:
        """Forget the events up to this one. Returns: False for an event that was not sent yet."""
        return self._journal.acknowledge(number)

    # --- connections ---------------------------------------------------------------------------

    def accepts(self, token: str) -> bool:
        """Whether a client with this secret may continue the session."""
        return self._tokens.accepts(token)

    def resume(self, link: OmniLink, token: str, last_number: int) -> bool:
        """Continue over another connection, with the events after the last one that the client has.

        Returns: False if some of these events are not kept.
        """
        if self._journal.has_gap_after(last_number):
            return False
        missed = self._journal.after(last_number)
        before = self._link
        if before is not None:
            fields = {"session_id": self.live.session_id, "attachment_generation": before.generation}
            before.writer.put({"type": "session.replaced", **fields})
            before.replaced.set()
        self._attach(link)
        credentials = {"attachment_generation": self._generation, "resume_token": self._tokens.replace(token)}
        self.send.unnumbered("session.resumed", **credentials, session=self.session.resource())
        for text in missed:
            assert isinstance(text, str), "expected an event's text"
            link.writer.put_text(text)
        LOG.info("session %s goes on over connection %d", self.live.session_id, self._generation)
        return True

    def _attach(self, link: OmniLink) -> None:
        """Send events over this connection from now on."""
        self._generation += 1
        link.generation, self._link = self._generation, link
        self._accepted_at = time.monotonic()

    def detach(self, link: OmniLink) -> None:
        """The connection is lost. If it is the session's, the client has some time to come back."""
        if self._link is link:
            self._link, self._detached_at = None, time.monotonic()
            LOG.info("session %s has lost its connection", self.live.session_id)
            if not self.is_running:
                self.release()

    def release(self) -> None:
        """Drop what refers to the session, once it is over and has no connection."""
        self.session.release()
        del self.session, self.send

    def _put(self, event: dict[str, Any], number: int | None) -> None:
        text = event_text(event)
        if number is not None:
            self._journal.add(text)
        if self._link is not None:
            self._link.writer.put_text(text)

    # --- the session ---------------------------------------------------------------------------

    def start(self, pending: PendingSession, on_over: Callable[[], object]) -> None:
        """Begin the session. pending: its ticket. on_over: called at its end."""
        self._context.slots.live.add(self.live)
        self.live.task = self.task = asyncio.create_task(self._live_on(pending, on_over), name="vllm-omni")

    def end(self, end: DoorEnd) -> None:
        """End the session at its client's request."""
        self._asked_end = end
        self._changed.set()

    async def _live_on(self, pending: PendingSession, on_over: Callable[[], object]) -> DoorEnd:
        slots, live = self._context.slots, self.live
        try:
            end = await self._run(pending)
        except asyncio.CancelledError:
            end = end_of(live.forced_close or DRAINING)
        finally:
            self.session.lane.detach()
            slots.live.remove(live)
            slots.dispatcher.finish(pending)
            on_over()
        slots.metrics.record_connection_end(end.how)
        LOG.info("session %s ended: %s", live.session_id, end.how)
        self.say_end(end)
        if self._link is None:
            self.release()
        return end

    def say_end(self, end: DoorEnd) -> None:
        """Send the last events."""
        self.session.finish()
        if end is GONE:
            return
        if end.error is not None:
            self.send.error(end.error, None)
        kind = "session.expired" if end in EXPIRES else "session.closed"
        self.send(kind, epoch=self.session.epoch, reason=end.reason)

    async def _run(self, pending: PendingSession) -> DoorEnd:
        """Run the session until it is over. Returns: how it ended."""
        try:
            async with SessionTasks() as tasks:
                tasks.create_task(self._watch(), name="vllm-omni-limits")
                tasks.create_task(self._run_units(pending), name="vllm-omni-units")
                detecting = self.session.turns.detector.run(self.session.turns.on_heard)
                tasks.create_task(detecting, name="vllm-omni-detector")
        except BaseExceptionGroup as errors:
            if (end := end_of_errors(errors)) is not None:
                return end
            LOG.exception("session %s", self.live.session_id)
        return INTERNAL

    async def _watch(self) -> NoReturn:
        """End the session at its limits. Raises: SessionOverError."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
            if self._asked_end is not None:
                raise SessionOverError(self._asked_end)
            now, limits, is_draining = time.monotonic(), self._context.limits, self._context.slots.live.draining
            if self._link is None:
                if is_draining or now - self._detached_at > limits.resume_grace_s:
                    self._context.slots.metrics.record_resumption("expired")
                    raise SessionOverError(CONNECTION_LOST)
            elif now - self._accepted_at > min(limits.idle_s, self.session.idle_s or limits.idle_s):
                raise SessionOverError(TIMEOUT)
            if now - self._opened_at > limits.session_s:
                raise SessionOverError(TIMEOUT)
            is_speaking = self.session.has_response or self.session.lane.is_answering
            if self._drain.is_over(is_draining=is_draining, is_speaking=is_speaking):
                raise SessionOverError(SHUTDOWN)

    async def _run_units(self, pending: PendingSession) -> NoReturn:
        """Keep a worker's session. Raises: SessionOverError; SessionEnd; WorkerLostError."""
        context, live = self._context, self.live
        recorder = Recorder(context.recordings, Kind.DUPLEX, live.session_id, live.identity)
        try:
            await run_units(context.slots, live, recorder, self.session, pending)
        except TimeoutError:
            raise SessionOverError(WORKER_LOST) from None
        finally:
            recorder.end()
        raise SessionOverError(TIMEOUT)  # the worker ended the session by itself
