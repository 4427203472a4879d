"""uvicorn as live sockets need it: for clients that are far ahead, and for connections that go away unread. Torch-free.

What both processes serve on. Knows uvicorn and TCP; does not know routes nor messages.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.websockets import WebSocket
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from models.errors import SettingsError

LOG = logging.getLogger(__name__)
POLL_S = 0.05
MAX_MESSAGE = 128 * 2**20
# What a server lets through, so that a message that is somewhat too long is answered and does not end the session.
MAX_FRAME = 160 * 2**20
MAX_AT_ONCE = 2**14
# A client that takes nothing for so long is gone; keepalive pings are not seen by one that is not read.
STUCK_S = 20.0
CONNECTION = "connection"  # in the scope's state: the TCP socket
WATCH_S = 0.25
LINGER_S = 15.0  # how long a connection may outlive its session
ESTABLISHED = 1  # first byte of Linux' TCP_INFO


def listen(host: str, port: int) -> socket.socket:
    """The socket, bound and not listening yet: whoever asks meanwhile is refused, not kept waiting.

    Raises: SettingsError.
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
    """uvicorn's own, made for clients that are far ahead and are not read for a while.

    The application is told the connection: a loss cannot be seen while nobody reads. Nor can the answer to a ping.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.app_state = {**self.app_state, CONNECTION: transport.get_extra_info("socket")}
        # Of asyncio's transports: bytes read at once. What is read is parsed in one go, and of empty frames the usual
        # 256 KB hold 40 000: everybody else would wait for a second.
        transport.max_size = MAX_AT_ONCE
        super().connection_made(transport)

    def handle_ping(self) -> None:
        """Who asks and does not read the answers would have them pile up here."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.transport.abort()

    def on_task_complete(self, task: "asyncio.Task[None]") -> None:
        super().on_task_complete(task)
        self.loop.call_later(LINGER_S, self.transport.abort)  # for one who does not read what was said last

    def keepalive_timeout(self) -> None:
        if not self.read_paused:
            super().keepalive_timeout()
            self.transport.abort()  # a close would wait until a client that does not read has read everything
            return
        self.pong_timer = self.pending_ping_payload = None
        self.schedule_ping()


class LiveServer(uvicorn.Server):
    """uvicorn without its signal handlers: a stop drains first."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def live_server(app: Any, **options: Any) -> LiveServer:
    """options: further ones of uvicorn.Config."""
    config = uvicorn.Config(
        app,
        ws=LiveProtocol,
        ws_max_size=MAX_FRAME,
        ws_per_message_deflate=False,  # sound does not shrink, and trying costs more than sending
        log_config=None,
        access_log=False,
        proxy_headers=False,  # who is on this machine is for the connection to say
        lifespan="off",
        timeout_graceful_shutdown=2,
        **options,
    )
    return LiveServer(config)


async def begin(server: LiveServer, listening: socket.socket, scheme: str) -> "asyncio.Task[None] | None":
    """Serve on a socket that is bound, and log where. Returns: what serves, once it does; None if it cannot."""
    serving = asyncio.create_task(server.serve([listening]), name="server")
    while not server.started and not serving.done():
        await asyncio.sleep(POLL_S)
    host, port = listening.getsockname()[:2]
    if serving.done():  # another process listens there since
        LOG.error("cannot listen on %s:%d: %s", host, port, serving.exception() or "the server ended")
        return None
    LOG.info("listening on %s://%s:%d", scheme, host, port)
    return serving


def stop_signal() -> asyncio.Event:
    """Set when somebody wants this process to end: SIGTERM or Ctrl-C."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def until_gone(websocket: WebSocket) -> None:
    """Until the connection is gone. While too much waits nobody reads it, and reading alone would tell."""
    if not hasattr(socket, "TCP_INFO"):
        await asyncio.Event().wait()  # then reading has to tell
    connection = websocket.scope["state"][CONNECTION]
    with suppress(OSError):  # closed on this side
        while connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED:
            await asyncio.sleep(WATCH_S)
