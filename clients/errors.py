"""The errors of a client, by what the user can do about them."""

from models.errors import ModelError

HINTS = {
    400: "the server is no WebSocket server, or a proxy removed the upgrade",
    401: "the server needs a valid key (--key or DUOLOGUE_API_KEY), or a proxy in front of it needs credentials",
    403: "no slot became free in time, the server is not ready, or it refuses clients from this address",
    404: "unknown path: a gateway has /ws/duplex/NAME or /ws/half_duplex/NAME, a worker ?session_id=NAME instead",
    426: "the server is no WebSocket server",
    429: "too many clients; try again later",
    502: "the proxy does not reach the server",
    503: "the server is starting, shutting down or full; try again later",
    504: "the proxy gets no answer from the server",
}


class ClientError(ModelError):
    """Base of the errors that a client raises, except `SettingsError` for invalid arguments."""


class Refused(ClientError):
    """The server refused the handshake.

    Attributes:
        status: the HTTP status.
        hint: its likely cause.
    """

    def __init__(self, url: str, status: int):
        self.status, self.hint = status, HINTS.get(status, "the server or a proxy refuses the connection")
        super().__init__(url, expected="a WebSocket handshake", got=f"HTTP {status}: {self.hint}")


class ConnectionLost(ClientError):
    """The connection could not be opened, or it ended before the conversation did."""


class ServerError(ClientError):
    """The server answered a request with `error`.

    Attributes:
        code: the error's code, see docs/protocol.md.
        text: the error's text.
    """

    def __init__(self, request: str, code: str, text: str):
        self.code, self.text = code, text
        super().__init__(request, expected="an answer", got=f"error {code}: {text}")
