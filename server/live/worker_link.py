"""A connection from the gateway to one worker, for one session, and the ways in which there is none.

Knows websockets and the worker's handshake. Does not know what is said over it.
"""

import asyncio
from contextlib import suppress

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from models.errors import ModelError
from server.dispatch.workers import Worker, WorkerLease
from worker.protocol.codes import CloseCode
from worker.protocol.connection import MAX_FRAME

PROBE_S = 1.0  # a worker that works answers within milliseconds
OPEN_S = 6.0  # it may wait 5 s for the slot of a session that is just ending
CLOSE_S = 1.0
WRITE_AHEAD = 2**20  # bytes
MAX_WAITING = 4  # messages from the worker that the client has not taken yet


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception:
        """A worker does not send anybody elsewhere."""
        return exc


class WorkerRefusedError(ModelError, RuntimeError):
    """The worker has no slot now, or does not say: nothing is known of the sessions that it has."""


class WorkerLostError(ModelError, RuntimeError):
    """Nobody listens there, or nothing is heard any more."""


async def open_link(asking: httpx.AsyncClient, lease: WorkerLease) -> ClientConnection:
    """Connect the session to its worker, once that has shown that it lives.

    Raises: WorkerRefusedError; WorkerLostError.
    """
    worker = lease.worker
    await _probe(asking, worker)
    try:
        return await _Connect(
            f"ws://{worker.address}/ws/duplex?session_id={lease.session_id}",
            max_size=MAX_FRAME,
            max_queue=MAX_WAITING,
            write_limit=WRITE_AHEAD,
            compression=None,
            proxy=None,
            ping_interval=None,  # the gateway asks every worker how it is; a session need not do it again
            open_timeout=OPEN_S,
            close_timeout=CLOSE_S,
            user_agent_header=None,
        )
    except (WebSocketException, OSError) as error:  # TimeoutError is one
        raise _failed(worker, "a free slot", error) from None


async def _probe(asking: httpx.AsyncClient, worker: Worker) -> None:
    try:
        answer = await asking.get(f"http://{worker.address}/health", timeout=PROBE_S)
    except httpx.HTTPError as error:
        raise _failed(worker, "an answer", error) from None
    if answer.status_code != 200:
        raise WorkerRefusedError(worker.name, expected="HTTP 200 from /health", got=answer.status_code)


def _failed(worker: Worker, expected: str, error: Exception) -> ModelError:
    """A worker may be slow for a moment, or this process out of file descriptors: then its sessions are not lost."""
    kind = WorkerLostError if nobody_listens(error) else WorkerRefusedError
    return kind(worker.name, expected=expected, got=str(error) or type(error).__name__)


def nobody_listens(error: BaseException | None) -> bool:
    """Whether a connection was refused, which libraries hide below errors of their own."""
    if isinstance(error, BaseExceptionGroup):
        return all(nobody_listens(one) for one in error.exceptions)
    below = error and (error.__cause__ or error.__context__)
    return isinstance(error, ConnectionRefusedError) or (below is not None and nobody_listens(below))


async def close_link(link: ClientConnection, *, politely: bool) -> None:
    """politely: tell the worker, which may take a moment; otherwise just let it go."""
    try:
        if politely:
            with suppress(Exception):
                # The library's own limit does not count while what was sent before is not read.
                async with asyncio.timeout(CLOSE_S):
                    await link.close(CloseCode.NORMAL)
    finally:
        link.transport.abort()
