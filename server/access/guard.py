"""The one check of keys and limits, for HTTP requests and WebSockets alike: pure ASGI around the whole application."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.access import Access
from server.access.credentials import REALTIME_PROTOCOL, credential_of, offers_realtime, without_credential
from server.access.identity import SCOPE_KEY, Identity
from server.access.refusal import AccessRefusedError, ErrorResponse, refusal_response


class AccessGuard:
    """ASGI middleware that refuses requests without a valid key, and leaves an `Identity` in the scope of the others.

    The application sees no key: neither the header nor the subprotocol nor the query's token.
    """

    def __init__(self, app: ASGIApp, access: Access, error_response: ErrorResponse):
        self._app, self._access, self._error_response = app, access, error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        access = self._access
        credential, scope = credential_of(scope), without_credential(scope)
        is_socket = scope["type"] == "websocket"
        try:
            identity = access.identify(scope, credential)
            access.check(identity, scope)
            if is_socket:
                access.clients.open_socket(identity)
        except AccessRefusedError as error:
            await refusal_response(scope, error, self._error_response)(scope, receive, send)
            return
        scope[SCOPE_KEY] = identity
        receive = access.clients.paced(receive, identity)
        if not is_socket:
            await self._app(scope, receive, send)
            return
        await self._serve_socket(scope, receive, send, identity)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send, identity: Identity) -> None:
        selects_realtime = offers_realtime(scope)

        async def send_with_protocol(message: Message) -> None:
            if selects_realtime and message["type"] == "websocket.accept" and not message.get("subprotocol"):
                message = {**message, "subprotocol": REALTIME_PROTOCOL}
            await send(message)

        try:
            await self._app(scope, receive, send_with_protocol)
        finally:
            self._access.clients.close_socket(identity)
