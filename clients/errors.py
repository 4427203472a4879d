"""What goes wrong between a client and a server, by what can be done about it."""

from models.errors import ModelError

HINTS = {
    400: "it is no WebSocket server, or something between here and there took the upgrade away",
    401: "it wants to know who asks; a proxy in front of it may",
    403: "every place was taken for too long, it is not ready yet, or it does not take clients from here",
    404: "there is no such path: a gateway has /ws/duplex/NAME, a worker /ws/duplex?session_id=NAME",
    426: "it is no WebSocket server",
    429: "too many clients; try again later",
    502: "the proxy in front of it does not reach it",
    503: "it starts, shuts down or is full; try again later",
    504: "the proxy in front of it gets no answer",
}


class ClientError(ModelError):
    """Base of what a `DuplexClient` raises, beside `SettingsError` for what cannot be asked at all."""


class Refused(ClientError):
    """The server answered the handshake with something else. status: of HTTP. hint: what it may mean."""

    def __init__(self, url: str, status: int):
        self.status, self.hint = status, HINTS.get(status, "the server or a proxy does not want this connection")
        super().__init__(url, expected="a WebSocket handshake", got=f"HTTP {status}: {self.hint}")


class ConnectionLost(ClientError):
    """There is no connection: it could not be made, or it ended before the conversation did."""


class ServerError(ClientError):
    """The server's `error`, where something was asked of it. code: for programs, see docs/protocol.md."""

    def __init__(self, what: str, code: str, text: str):
        self.code, self.text = code, text
        super().__init__(what, expected="an answer", got=f"error {code}: {text}")
