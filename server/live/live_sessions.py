"""All sessions of the gateway that are not over yet, over WebSockets and HTTP, and how they are ended together."""

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from server.access.identity import Identity
from server.dispatch.dispatcher import PendingSession
from server.dispatch.queue import ANY_WORKER, Needs
from server.dispatch.workers import WorkerLease
from server.live.closes import DRAINING, ENDED, HANDED_OVER, SocketClose
from server.live.kinds import Kind
from worker.protocol.gateway_messages import MoveReason


class HandoverRequests(Protocol):
    """Lets a session leave its worker. reason: why it has to; None: it has not."""

    @property
    def reason(self) -> MoveReason | None: ...

    @property
    def can_move(self) -> bool:
        """Whether another worker could go on with the session."""

    def ask(self, reason: MoveReason) -> None:
        """Let the session leave its worker, as soon as another one has a free slot."""

    def withdraw(self) -> None:
        """Let the session stay, unless it has left."""


@dataclass(eq=False)
class LiveSession:
    """One session.

    Attributes:
        identity: whose session it is.
        pending: its ticket; None before its request and between the turns of a streaming session.
        active_at: Unix s of the last message in either direction.
        task: runs the session; cancelled to end it. None before it begins, and once the session is over.
        forced_close: how it ends, if the gateway ends it.
        handover: moves it to another worker; None for a session that stays where it is.
        needs: of its worker.
    """

    session_id: str
    kind: Kind
    identity: Identity
    pending: PendingSession | None = None
    active_at: float = field(default_factory=time.time)
    task: "asyncio.Task[object] | None" = None
    forced_close: SocketClose | None = None
    handover: HandoverRequests | None = None
    needs: Needs = ANY_WORKER

    @property
    def lease(self) -> WorkerLease | None:
        return None if self.pending is None else self.pending.lease

    @property
    def is_new(self) -> bool:
        """Whether it has had no slot yet, or has none between the turns of a streaming session."""
        return self.lease is None and (self.pending is None or not self.pending.has_begun)

    def touch(self) -> None:
        """Record a message."""
        self.active_at = time.time()

    def end(self, close: SocketClose) -> None:
        """End the session, if it is not over."""
        if self.task is not None and not self.task.done():
            self.forced_close = close
            self.task.cancel()


class LiveSessions:
    """The sessions of a gateway. draining: whether new ones are refused."""

    def __init__(self) -> None:
        self._all: list[LiveSession] = []
        self.draining = False

    def __len__(self) -> int:
        return len(self._all)

    @property
    def all(self) -> tuple[LiveSession, ...]:
        """All sessions, oldest first."""
        return tuple(self._all)

    def add(self, session: LiveSession) -> None:
        self._all.append(session)

    def remove(self, session: LiveSession) -> None:
        self._all.remove(session)
        session.task = None  # its error, if any, has frames with the session

    def find(self, session_id: str, *kinds: Kind) -> list[LiveSession]:
        """The sessions with this id. kinds: only sessions of these kinds; none: of all kinds."""
        return [one for one in self._all if one.session_id == session_id and (not kinds or one.kind in kinds)]

    def end(self, session_id: str, identity: Identity) -> int:
        """End the sessions with this id that the identity owns. Returns: their number."""
        found = [one for one in self.find(session_id) if identity.owns(one.identity.owner)]
        for session in found:
            session.end(ENDED)
        return len(found)

    def drain(self) -> None:
        """Refuse new sessions and end those that wait for their first slot."""
        self.draining = True
        for session in self.all:
            if session.is_new:
                session.end(DRAINING)

    def close_all(self, kept: Collection[LiveSession] = ()) -> None:
        """End all sessions, with or without a slot. kept: those that their workers keep for another gateway."""
        for session in self.all:
            session.end(HANDED_OVER if session in kept else DRAINING)
