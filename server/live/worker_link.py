"""WebSocket connections from the gateway to a worker, one for each session, and the errors of opening one.

Does not read or write messages.
"""

import asyncio
from contextlib import suppress

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.protocol import State

from models.errors import ModelError
from server.dispatch.workers import Worker, WorkerLease
from server.live.kinds import Kind
from worker.protocol.codes import CloseCode
from worker.protocol.connection import MAX_FRAME
from worker.protocol.takeover.message_bytes import Data
from worker.protocol.takeover.slot_messages import TAKE_QUERY

PROBE_TIMEOUT_S = 1.0  # a responsive worker answers within milliseconds
OPEN_TIMEOUT_S = 6.0  # the worker waits up to 5 s for the slot of a session that is ending
CLOSE_TIMEOUT_S = 1.0
WRITE_BUFFER = 2**20  # bytes
MAX_UNREAD = 4  # messages from the worker that are buffered while the client is slow


NOT_FOR_CLIENTS = ('{"type":"decided"', '{"type":"slot_taken"')  # how a worker begins messages to gateways


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception:
        """Follow no redirect: no worker sends one."""
        return exc


class WorkerConnection(ClientConnection):
    """A connection to a worker. n_frames: messages received that are for the client."""

    n_frames = 0

    async def recv(self, decode: bool | None = None) -> Data:  # type: ignore[override]  # its overloads
        """The next message. Raises: as `ClientConnection.recv`."""
        data = await super().recv(decode)
        self.n_frames += not (isinstance(data, str) and data.startswith(NOT_FOR_CLIENTS))
        return data


def frames_of(link: ClientConnection) -> int:
    """Messages received over a connection, as the worker counts them."""
    return link.n_frames if isinstance(link, WorkerConnection) else 0


class WorkerRefusedError(ModelError, RuntimeError):
    """The worker has no free slot now or did not answer in time. Its running sessions may be unaffected."""


class WorkerLostError(ModelError, RuntimeError):
    """The worker refuses connections or no longer sends anything."""


class WorkerDrainsError(WorkerLostError):
    """The worker ends its sessions, because it shuts down."""


async def open_link(http: httpx.AsyncClient, lease: WorkerLease, kind: Kind) -> ClientConnection:
    """Connect a session of this kind to its worker. Raises: as `open_link_to`."""
    return await open_link_to(http, lease, kind.path)


async def open_link_to(
    http: httpx.AsyncClient, lease: WorkerLease, path: str, *, takes: bool = False
) -> WorkerConnection:
    """Connect a session to its worker, after a probe of the worker's /health.

    Args:
        path: of the worker's socket.
        takes: the worker has kept the session, and `take_slot` is sent next.
    Raises: WorkerRefusedError; WorkerLostError.
    """
    worker = lease.worker
    await probe(http, worker)
    try:
        link = await _Connect(
            f"ws://{worker.address}{path}?session_id={lease.session_id}" + (f"&{TAKE_QUERY}=1" if takes else ""),
            create_connection=WorkerConnection,
            additional_headers=dict(worker.headers),
            max_size=MAX_FRAME,
            max_queue=MAX_UNREAD,
            write_limit=WRITE_BUFFER,
            compression=None,
            proxy=None,
            ping_interval=None,  # the gateway polls every worker's /health instead
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=CLOSE_TIMEOUT_S,
            user_agent_header=None,
        )
        assert isinstance(link, WorkerConnection), f"expected a WorkerConnection, got {type(link).__name__}"
        return link
    except (WebSocketException, OSError) as error:  # TimeoutError is an OSError
        raise _link_error(worker, "a free slot", error) from None


async def probe(http: httpx.AsyncClient, worker: Worker) -> None:
    """Check that the worker answers /health. Sessions that begin at the same time share one request.

    Raises: WorkerRefusedError; WorkerLostError.
    """
    running = worker.probe
    if running is None or running.done():
        running = worker.probe = asyncio.create_task(_ask_health(http, worker), name=f"probe {worker.name}")
        running.add_done_callback(_retrieve)
    try:
        await asyncio.shield(running)
    finally:
        if running.done() and worker.probe is running:
            worker.probe = None
        del running  # its error has this frame, and those of the session that waits


def _retrieve(probe: "asyncio.Task[None]") -> None:
    """Mark the error of a probe as handled: its waiters may be gone."""
    if not probe.cancelled():
        probe.exception()


async def _ask_health(http: httpx.AsyncClient, worker: Worker) -> None:
    try:
        response = await http.get(f"http://{worker.address}/health", timeout=PROBE_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise _link_error(worker, "an answer", error) from None
    if response.status_code != 200:
        raise WorkerRefusedError(worker.name, expected="HTTP 200 from /health", got=response.status_code)


def _link_error(worker: Worker, expected: str, error: Exception) -> WorkerLostError | WorkerRefusedError:
    """A lost worker only if the connection was refused.

    After a timeout, or without a free file descriptor in this process, the worker's sessions may still run.
    """
    kind = WorkerLostError if is_connection_refused(error) else WorkerRefusedError
    return kind(worker.name, expected=expected, got=str(error) or type(error).__name__)


def is_connection_refused(error: BaseException | None) -> bool:
    """Whether an error was caused by a refused connection. Libraries wrap that error in their own types."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_connection_refused(one) for one in error.exceptions)
    cause = error and (error.__cause__ or error.__context__)
    return isinstance(error, ConnectionRefusedError) or (cause is not None and is_connection_refused(cause))


async def close_link(link: ClientConnection, *, graceful: bool) -> None:
    """Close a connection with a close frame, so that the worker keeps no slot.

    graceful: wait for the worker's close frame, up to a second.
    """
    try:
        if graceful:
            with suppress(Exception):
                # The library's close_timeout does not cover the time in which earlier messages are not read.
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await link.close(CloseCode.NORMAL)
        elif link.state is State.OPEN:
            link.protocol.send_close(CloseCode.GOING_AWAY)
            link.send_data()
    finally:
        link.transport.abort()
