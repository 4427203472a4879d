"""uvicorn configured for live WebSockets, used by gateway and worker. Torch-free.

Handles clients that send far ahead and connections that are lost while they are not read. Contains no routes and no
messages.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.websockets import WebSocket
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from models.errors import SettingsError

LOG = logging.getLogger(__name__)
POLL_S = 0.05
MAX_MESSAGE = 128 * 2**20
# Larger than MAX_MESSAGE, so that a message slightly above the limit gets an error and does not end the session.
MAX_FRAME = 160 * 2**20
MAX_READ_BYTES = 2**14
# A client that accepts no data for this long counts as gone. Pings cannot detect it: a connection that is not read
# does not show the pongs.
STUCK_S = 20.0
CONNECTION = "connection"  # key of the TCP socket in the scope's state
WATCH_S = 0.25
LINGER_S = 15.0  # time a connection may remain open after its session
ESTABLISHED = 1  # the first byte of Linux' TCP_INFO


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that early connections are refused instead of left waiting.

    Raises: SettingsError for an address that cannot be bound.
    """
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise SettingsError(f"{host}:{port}", expected="an address to listen on", got=error.strerror) from None
    return bound


class LiveProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol for clients that send far ahead and are not read for a while.

    Puts the TCP socket into the scope's state for `until_gone`: while reading is paused, neither a lost connection
    nor a pong is visible.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.app_state = {**self.app_state, CONNECTION: transport.get_extra_info("socket")}
        # asyncio's limit of bytes per read. uvicorn parses each read as a whole, and the default 256 KB can hold 40 000
        # empty frames, which would block the event loop for a second.
        transport.max_size = MAX_READ_BYTES  # type: ignore[attr-defined]  # private to asyncio's transports
        super().connection_made(transport)

    def handle_ping(self) -> None:
        """Answer a ping, or abort if the client does not read: its pongs would accumulate in memory."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.transport.abort()

    def on_task_complete(self, task: "asyncio.Task[None]") -> None:
        super().on_task_complete(task)
        self.loop.call_later(LINGER_S, self.transport.abort)  # the client may never read the close frame

    def keepalive_timeout(self) -> None:
        if not self.read_paused:
            super().keepalive_timeout()
            self.transport.abort()  # a close would wait for a client that does not read
            return
        self.pong_timer = self.pending_ping_payload = None
        self.schedule_ping()


class LiveServer(uvicorn.Server):
    """uvicorn without its signal handlers, since a stop drains the sessions first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def live_server(app: Any, **options: Any) -> LiveServer:
    """A server for `app` with the options that live sockets need.

    Args:
        app: an ASGI application.
        options: further options of `uvicorn.Config`.
    """
    config = uvicorn.Config(
        app,
        ws=LiveProtocol,
        ws_max_size=MAX_FRAME,
        ws_per_message_deflate=False,  # float and PCM sound hardly compresses; compressing costs more than sending
        log_config=None,
        access_log=False,
        proxy_headers=False,  # loopback checks must see the address of the connection itself
        lifespan="off",
        timeout_graceful_shutdown=2,
        **options,
    )
    return LiveServer(config)


async def begin(server: LiveServer, listening: socket.socket, scheme: str) -> "asyncio.Task[None] | None":
    """Start serving on a bound socket and log the address. Returns: the serving task; None if starting failed."""
    serving = asyncio.create_task(server.serve([listening]), name="server")
    while not server.started and not serving.done():
        await asyncio.sleep(POLL_S)
    host, port = listening.getsockname()[:2]
    if serving.done():  # for example, another process listens on the port by now
        LOG.error("cannot listen on %s:%d: %s", host, port, serving.exception() or "the server ended")
        return None
    LOG.info("listening on %s://%s:%d", scheme, host, port)
    return serving


def stop_signal() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def until_gone(websocket: WebSocket) -> None:
    """Wait until the connection is gone, also while backpressure keeps it from being read."""
    if not hasattr(socket, "TCP_INFO"):
        await asyncio.Event().wait()  # not Linux: only reading detects the end
    connection = websocket.scope["state"][CONNECTION]
    with suppress(OSError):  # the socket is closed on this side
        while connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED:
            await asyncio.sleep(WATCH_S)
