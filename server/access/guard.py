"""The one check of keys and limits, for HTTP requests and WebSockets alike: pure ASGI around the whole application."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.access import Access
from server.access.connection_pace import CONNECTION
from server.access.credentials import REALTIME_PROTOCOL, credential_of, offers_realtime, without_credential
from server.access.identity import SCOPE_KEY
from server.access.refusal import AccessRefusedError, ErrorResponse, refusal_response
from worker.protocol.codes import CloseCode

REFUSAL_S = 2.0  # to send the error and the close frame
# A client that has reached a limit and tries again at once would otherwise take much of a core by handshakes alone.
DELAY_S = 1.0  # of the response 429
MAX_DELAYED, MAX_DELAYED_CLIENT = 1024, 128  # of these responses that wait at the same time
LIMIT_REASON = "Limit reached"
# Makes the text of an error message from the socket's path and the error.

SocketError = Callable[[str, str], str]


class AccessGuard:
    """ASGI middleware that refuses requests without a valid key, and leaves an `Identity` in the scope of the others.

    The application sees no key: neither the header nor the subprotocol nor the query's token. A client above a limit
    gets its refusal after `DELAY_S`, unless very many refusals wait already.

    Args:
        app: the application.
        access: keys and limits.
        error_response: the response to a refused request.
        socket_error: the message before the close of a socket, from its path and the error's text.
    """

    def __init__(self, app: ASGIApp, access: Access, error_response: ErrorResponse, socket_error: SocketError):
        self._app, self._access = app, access
        self._error_response, self._socket_error = error_response, socket_error
        self._delayed: Counter[str] = Counter()  # refusals that wait, by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        access = self._access
        credential, scope = credential_of(scope), without_credential(scope)
        is_socket = scope["type"] == "websocket"
        identity = None
        try:
            identity = access.identify(scope, credential)
            access.check(identity, scope)
            if is_socket:
                access.clients.open_socket(identity)
        except AccessRefusedError as error:
            if error.limit is not None:
                access.count(error.limit)
                await self._delay("" if identity is None else identity.owner)
            await refusal_response(scope, error, self._error_response)(scope, receive, send)
            return
        scope[SCOPE_KEY] = identity
        pace = access.clients.pace_of(identity, scope)
        CONNECTION.set(pace)  # of this task and of those that it starts
        if not is_socket:
            await self._app(scope, pace.paced(receive, _no_refusal), send)
            return
        socket = GuardedSocket(scope, send, self._socket_error)
        try:
            await self._app(scope, pace.paced(receive, socket.refuse), socket.send)
        finally:
            access.clients.close_socket(identity)

    async def _delay(self, owner: str) -> None:
        if self._delayed[owner] >= MAX_DELAYED_CLIENT or self._delayed.total() >= MAX_DELAYED:
            return
        self._delayed[owner] += 1
        try:
            await asyncio.sleep(DELAY_S)
        finally:
            self._delayed[owner] -= 1
            if not self._delayed[owner]:
                del self._delayed[owner]


async def _no_refusal(error: AccessRefusedError) -> None:
    raise AssertionError(f"a body has no costly messages: {error}")


class GuardedSocket:
    """The answers of one WebSocket. A costly message above its limit ends it: an error, then close code 1008."""

    def __init__(self, scope: Scope, send: Send, error_text: SocketError):
        self._send, self._path, self._error_text = send, scope["path"], error_text
        self._selects_realtime = offers_realtime(scope)
        self._is_over = False

    async def send(self, message: Message) -> None:
        """Send a message, or drop it once a limit has ended the socket."""
        if self._is_over:
            return
        if self._selects_realtime and message["type"] == "websocket.accept" and not message.get("subprotocol"):
            message = {**message, "subprotocol": REALTIME_PROTOCOL}
        await self._send(message)

    async def refuse(self, error: AccessRefusedError) -> None:
        """Send the error and the close frame."""
        self._is_over = True
        text = self._error_text(self._path, str(error))
        with suppress(TimeoutError, RuntimeError, OSError):  # the client is gone, or reads nothing
            async with asyncio.timeout(REFUSAL_S):
                await self._send({"type": "websocket.send", "text": text})
                close = {"code": CloseCode.POLICY_VIOLATION, "reason": LIMIT_REASON}
                await self._send({"type": "websocket.close", **close})
