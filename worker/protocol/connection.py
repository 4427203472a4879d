"""uvicorn configured for live WebSockets, used by gateway and worker. Torch-free.

Handles clients that send far ahead, clients that send messages and requests which never end, and connections that are
lost while they are not read. Contains no routes and no messages.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from models.errors import SettingsError
from worker.protocol.codes import CloseCode
from worker.protocol.held_bytes import ConnectionBytes
from worker.protocol.live_http import HELD, LiveConfig, LiveHttp, TransportLimit, TransportLimits, bytes_of_transport

LOG = logging.getLogger(__name__)
POLL_S = 0.05
MAX_MESSAGE = 128 * 2**20
# Larger than MAX_MESSAGE, so that a message slightly above the limit gets an error and does not end the session.
MAX_FRAME = 160 * 2**20
MAX_READ_BYTES = 2**14
# A client that accepts no data for this long counts as gone. Pings cannot detect it: a connection that is not read
# does not show the pongs.
STUCK_S = 20.0
PING_S = 10.0  # interval of the pings of WebSockets
CONNECTION = "connection"  # key of the TCP socket in the scope's state
WRITABLE = "writable"  # key of an event that is set while the connection takes messages at once
MEMORY = "memory"  # reason of the close of a connection whose messages take too much of it
FRAGMENT_BYTES = 128  # memory of a part of a message on top of its data
# After its close frame the server reads on, because the client's own close frame may follow what it sent before. After
# a close with code 1008, as of a limit, it stops reading beyond CLOSING_BYTES, and aborts the connection after
# CLOSING_S, in which the client can read the reason.
CLOSING_BYTES, CLOSING_S = 2**18, 2.0
WATCH_S = 0.25
AHEAD_BYTES = 2**16  # of messages that are not received, up to which a connection is read
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


class _WithoutClientFaults(logging.Filter):
    """Drops the traceback that uvicorn logs for invalid UTF-8, which is a fault of the client."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], UnicodeDecodeError)


_WITHOUT_CLIENT_FAULTS = _WithoutClientFaults()


class LiveProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol for clients that send far ahead and are not read for a while.

    Counts the bytes that it holds: frames and messages that are not complete, and messages that are not received. Puts
    the TCP socket into the scope's state for `until_gone`: while reading is paused, neither a lost connection nor a
    pong is visible. Reads on while little is waiting, and tells `send_in_time` whether a message would have to wait.
    """

    _n_counted = 0  # bytes that are counted as held by this protocol
    _n_fragments = 0  # bytes of `frames`
    _n_queued = 0  # bytes of `queue`
    _n_after_close = 0  # bytes that came after the server's close frame
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(self.config, LiveConfig)
        self._limits = self.config.transport
        self._bytes = bytes_of_transport(self.config, transport, self._shed)
        own = {CONNECTION: transport.get_extra_info("socket"), HELD: self._bytes, WRITABLE: self.writable}
        self.app_state = {**self.app_state, **own}
        # asyncio's limit of bytes per read. uvicorn parses each read as a whole, and the default 256 KB can hold 40 000
        # empty frames, which would block the event loop for a second.
        transport.max_size = MAX_READ_BYTES  # type: ignore[attr-defined]  # private to asyncio's transports
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bytes.close()
        if self.conn.close_rcvd is None:  # uvicorn reports 1005, as for a client that has closed without a code
            self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.ABNORMAL})
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse_handshake()
        if self.conn.close_sent is not None and self.conn.close_sent.code == CloseCode.POLICY_VIOLATION:
            self._n_after_close += len(data)
            if self._n_after_close > CLOSING_BYTES and not self.transport.is_closing():
                self.transport.pause_reading()
                self.loop.call_later(CLOSING_S, self.transport.abort)
        self._count()

    def _refuse_handshake(self) -> None:
        """Answer headers that the library refuses, such as long ones; uvicorn would leave the client waiting."""
        answer = b"".join(self.conn.data_to_send())
        self.transport.write(answer or b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        self.handshake_complete = self.close_sent = True
        self.transport.close()

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message of the application. uvicorn reports a handshake refused with a body as an error otherwise."""
        await super().send(message)
        if self.close_sent:
            self.handshake_complete = True

    def handle_parser_exception(self) -> None:
        """Close after an invalid frame; without a close frame if it comes before the end of the handshake."""
        if self.conn.close_sent is None:
            self.transport.abort()
        else:
            super().handle_parser_exception()

    # --- bytes that are held -----------------------------------------------------------------------

    def handle_text(self, event: Frame) -> None:
        self._n_fragments = FRAGMENT_BYTES + len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._n_fragments = FRAGMENT_BYTES + len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._n_fragments += FRAGMENT_BYTES + len(event.data)
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        if not self.close_sent:  # later messages are dropped
            self._n_queued += self._n_fragments
        self._n_fragments = 0
        is_far_ahead = self.read_paused or (self._n_queued > AHEAD_BYTES and not self.close_sent)
        self.read_paused = True  # uvicorn would stop reading at each message: two system calls for each
        super().send_receive_event_to_app()
        self.read_paused = is_far_ahead
        if is_far_ahead:
            self.transport.pause_reading()

    async def receive(self) -> ASGIReceiveEvent:
        event = await super().receive()
        if self.queue.empty():
            self._n_queued = 0
            self._count()
        return event

    def _count(self) -> None:
        n_held = len(self.conn.reader.buffer) + self._n_fragments + self._n_queued
        change, self._n_counted = n_held - self._n_counted, n_held
        if change:
            self._bytes.add(change)

    def _shed(self) -> None:
        """Close the connection and drop what it sent, to free memory."""
        LOG.warning("a connection of %s is closed: it holds most of the memory for messages", self.client)
        self.frames = []
        if self.close_sent or self.disconnected:
            self.transport.abort()
            return
        self.conn.fail(CloseCode.TRY_AGAIN_LATER, MEMORY)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.TRY_AGAIN_LATER})
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()
        self.loop.call_later(LINGER_S, self.transport.abort)  # the client may never read the close frame

    # --- clients that do not read --------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Wait for a client whose buffers are full, for a limited time."""
        super().pause_writing()
        self._stop_waiting()
        self._unread = self.loop.call_later(self._limits.unread_s, self._on_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _on_unread(self) -> None:
        self._limits.count(TransportLimit.UNREAD)
        self.transport.abort()  # a close would wait for the client

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
            self._on_unread()
            return
        self.pong_timer = self.pending_ping_payload = None
        self.schedule_ping()


def bytes_of(connection: HTTPConnection) -> ConnectionBytes | None:
    """The bytes that a request's or a socket's connection holds; None if another server runs the application."""
    held: ConnectionBytes | None = connection.scope.get("state", {}).get(HELD)
    return held


class LiveServer(uvicorn.Server):
    """uvicorn without its signal handlers, since a stop drains the sessions first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with the time limit for TLS handshakes, for which uvicorn has no option."""
        if not self.config.is_ssl:
            await super().startup(sockets)
            return
        assert isinstance(self.config, LiveConfig)
        loop = asyncio.get_running_loop()
        create_server = loop.create_server
        seconds = self.config.transport.header_s
        loop.create_server = partial(create_server, ssl_handshake_timeout=seconds)  # type: ignore[method-assign]
        try:
            await super().startup(sockets)
        finally:
            loop.create_server = create_server  # type: ignore[method-assign]


def live_server(app: Any, transport: TransportLimits | None = None, **options: Any) -> LiveServer:
    """A server for `app` with the options that live sockets need.

    Args:
        app: an ASGI application.
        transport: limits of connections; None: the defaults, which are counted nowhere.
        options: further options of `uvicorn.Config`.
    """
    limits = transport or TransportLimits()
    options = {"ws_ping_interval": PING_S, "ws_ping_timeout": limits.unread_s, **options}
    config = LiveConfig(
        app,
        http=LiveHttp,
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
    config.transport = limits
    logging.getLogger("uvicorn.error").addFilter(_WITHOUT_CLIENT_FAULTS)
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


class StopSignal(asyncio.Event):
    """An event that is set by a signal. number: the first signal received; None: none yet."""

    number: signal.Signals | None = None

    def receive(self, number: signal.Signals) -> None:
        """Record a signal."""
        self.number = self.number or number
        self.set()


def stop_signal() -> StopSignal:
    """An event that SIGTERM or SIGINT sets."""
    stop = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.receive, number)
    return stop


async def send_in_time(websocket: WebSocket, data: str | bytes) -> None:
    """Send a message. Raises: TimeoutError for a client that reads nothing for `STUCK_S`; as `WebSocket.send`."""
    writable: asyncio.Event | None = websocket.scope.get("state", {}).get(WRITABLE)
    # A connection that takes the message at once needs no limit, whose timer would take longer than sending.
    limit = None if writable is not None and writable.is_set() else asyncio.timeout(STUCK_S)
    async with limit or contextlib.nullcontext():
        await (websocket.send_text(data) if isinstance(data, str) else websocket.send_bytes(data))


async def until_gone(websocket: WebSocket) -> None:
    """Wait until the connection is gone, also while backpressure keeps it from being read."""
    if not hasattr(socket, "TCP_INFO"):
        await asyncio.Event().wait()  # not Linux: only reading detects the end
    connection = websocket.scope["state"][CONNECTION]
    with suppress(OSError):  # the socket is closed on this side
        while connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED:
            await asyncio.sleep(WATCH_S)
