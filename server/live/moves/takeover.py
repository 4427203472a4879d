"""A duplex session whose gateway was lost: its worker has kept it, and this gateway takes it over."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

import httpx
from websockets.exceptions import ConnectionClosed

from models.errors import ModelError
from server.access.identity import Identity
from server.access.refusal import AccessRefusedError
from server.dispatch.dispatcher import PendingSession
from server.dispatch.queue import Needs
from server.dispatch.workers import Worker, WorkerLease
from server.live.kinds import Kind, request_type_of
from server.live.resumption import ResumeTokens, token_digest
from server.live.slot_wait import SlotWait
from server.live.worker_link import WorkerConnection, WorkerLostError, WorkerRefusedError, close_link, open_link_to
from worker.protocol.codes import CloseCode, ErrorCode
from worker.protocol.gateway_messages import ResumeSession
from worker.protocol.messages import write
from worker.protocol.takeover.journal_steps import KEPT_JOURNAL, KeptJournal
from worker.protocol.takeover.message_bytes import Data
from worker.protocol.takeover.slot_messages import KEPT_FIELD, SLOT_TAKEN, KeepSlot, SlotTaken, TakeSlot
from worker.protocol.wire import WireError

LOG = logging.getLogger(__name__)
ASK_S, ANSWER_S, JOURNAL_S = 2.0, 5.0, 10.0
WORKERS_S = 5.0  # for the list of workers, after a start of this gateway
POLL_S = 0.05


class TakeoverError(ModelError, RuntimeError):
    """It is not known whether a worker has kept the session: the client should try again."""


@dataclass(frozen=True)
class TakenSession:
    """A session that this gateway has taken over.

    new_token: for the client; tokens: all valid ones. journal: rebuilds the session on another worker, with its
    messages; None: the worker has none.
    """

    pending: PendingSession
    lease: WorkerLease
    link: WorkerConnection
    answer: SlotTaken
    tokens: ResumeTokens
    new_token: str
    journal: tuple[KeptJournal, list[Data]] | None = None


async def take_session(
    slots: SlotWait, session_id: str, request: ResumeSession, identity: Identity, needs: Needs
) -> TakenSession | None:
    """Take a session over from a lost gateway.

    Args:
        slots: counts the slot, and has the workers.
        session_id: of the session.
        request: the client's message, with its token.
        identity: of the client.
        needs: of the session's worker, for a later move.
    Returns:
        None if no worker has kept a session with this token and key. `Dispatcher.finish` must follow otherwise.
    Raises: TakeoverError.
    """
    try:
        slots.count_takeover(identity)
    except AccessRefusedError as error:
        raise TakeoverError(session_id, expected="a client that is not too fast", got=str(error)) from None
    worker = await _find(slots, session_id, token_digest(request.token), identity.owner)
    if worker is None:
        return None
    pending = slots.adopt(worker, request_type_of(Kind.DUPLEX, session_id), session_id, identity, needs)
    is_taken = False
    try:
        taken = await _take(slots, pending, request, identity)
        is_taken = taken is not None
        return taken
    finally:
        if not is_taken:
            slots.dispatcher.finish(pending)


async def _find(slots: SlotWait, session_id: str, token: str, owner: str) -> Worker | None:
    """The worker that has kept a session; None if none has. Raises: TakeoverError."""
    workers = slots.dispatcher.workers
    with suppress(TimeoutError):
        async with asyncio.timeout(WORKERS_S):
            while not workers.all:  # of a cluster, whose authority names them
                await asyncio.sleep(POLL_S)
    asked = [one for one in workers.all if not one.health or KEPT_FIELD in one.health]
    body = {"session_id": session_id, "token": token, "owner": owner}
    asking = [asyncio.create_task(_has_kept(slots.http, worker, body)) for worker in asked]
    answers: list[bool | None] = []
    try:
        for answering in asyncio.as_completed(asking):
            worker, has_it = await answering
            if has_it:  # without the answers of slower workers
                return worker
            answers.append(has_it)
    finally:
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    if not workers.all or None in answers:
        raise TakeoverError(session_id, expected="answers of all workers", got="none of some")
    return None


async def end_kept(http: httpx.AsyncClient, worker: Worker, session_id: str, kept: KeepSlot) -> None:
    """Let a worker whose connection was lost end a session that another worker continues.

    Args:
        http: client for the workers.
        worker: the one that may have kept the session.
        session_id: of the session.
        kept: the terms of the worker's last `keep_slot`.
    """
    body = {"session_id": session_id, "token": kept.tokens[0], "owner": kept.owner}
    with suppress(httpx.HTTPError):  # a worker that is down keeps nothing
        address = f"http://{worker.address}/kept_session/end"
        await http.post(address, json=body, headers=dict(worker.headers), timeout=ASK_S)


async def _has_kept(http: httpx.AsyncClient, worker: Worker, body: dict[str, str]) -> tuple[Worker, bool | None]:
    """A worker, and whether it has kept a session; None if it does not answer."""
    return worker, await _ask(http, worker, body)


async def _ask(http: httpx.AsyncClient, worker: Worker, body: dict[str, str]) -> bool | None:
    """Whether a worker has kept a session; None if it does not answer."""
    try:
        address = f"http://{worker.address}/kept_session"
        response = await http.post(address, json=body, headers=dict(worker.headers), timeout=ASK_S)
        return response.status_code == 200 and response.json().get("kept") is True
    except httpx.HTTPError as error:
        return None if isinstance(error, httpx.TimeoutException) else False
    except (ValueError, AttributeError):  # the answer of another program
        return False


async def _take(
    slots: SlotWait, pending: PendingSession, request: ResumeSession, identity: Identity
) -> TakenSession | None:
    """Take a session from the worker of its ticket; None if another gateway was first. Raises: TakeoverError."""
    lease = pending.lease
    assert lease is not None, "expected the slot that the worker has kept"
    tokens = ResumeTokens()
    new_token = tokens.replace(request.token)
    message = TakeSlot(
        token=token_digest(request.token),
        owner=identity.owner,
        received=request.received,
        tokens=list(tokens.digests),
    )
    try:
        link = await open_link_to(slots.http, lease, Kind.DUPLEX.path, takes=True)
    except (WorkerRefusedError, WorkerLostError) as error:
        raise TakeoverError(lease.session_id, expected="a connection to its worker", got=str(error)) from None
    is_taken = False
    try:
        async with asyncio.timeout(ANSWER_S):
            await link.send(write(message))
            answer = SLOT_TAKEN.read_text(str(await link.recv()))
        async with asyncio.timeout(JOURNAL_S):
            journal = await _read_journal(link, answer.n_journal)
        is_taken = True
    except ConnectionClosed as closed:
        if closed.rcvd is not None and closed.rcvd.code == CloseCode.POLICY_VIOLATION:
            return None
        raise TakeoverError(lease.session_id, expected="slot_taken", got=str(closed)) from None
    except (TimeoutError, WireError) as error:
        raise TakeoverError(lease.session_id, expected="slot_taken", got=str(error) or "none in time") from None
    finally:
        if not is_taken:
            await close_link(link, graceful=False)
    slots.dispatcher.workers.record_pause(lease, answer.paused)
    LOG.info("session %s is taken over: %s has kept it", lease.session_id, lease.worker.name)
    return TakenSession(pending, lease, link, answer, tokens, new_token, journal)


async def _read_journal(link: WorkerConnection, n_messages: int) -> tuple[KeptJournal, list[Data]] | None:
    """The journal in the next messages of a worker; None if it has none. Raises: WireError; ConnectionClosed."""
    if not n_messages:
        return None
    state = KEPT_JOURNAL.read_text(str(await link.recv()))
    messages = [await link.recv() for _ in range(n_messages - 1)]
    link.n_frames = 0  # none of them is for the client
    n_expected = sum(step.n for step in state.steps) + state.decided + state.n_open
    if len(messages) != n_expected:
        raise WireError(ErrorCode.BAD_MESSAGE, "kept_journal", expected=f"{n_expected} messages", got=len(messages))
    return state, messages
