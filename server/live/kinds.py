"""The kinds of conversation over WebSockets: their paths, request types and session ids."""

import secrets
from enum import StrEnum

from server.dispatch.queue import SessionType

AUDIO_PREFIXES = ("adx_", "audio_duplex_")


class Kind(StrEnum):
    """A kind of conversation. Its value is the last part of its path on gateway and worker."""

    DUPLEX = "duplex"
    HALF_DUPLEX = "half_duplex"
    CHAT = "chat"
    STREAMING = "streaming"

    @property
    def path(self) -> str:
        """Path of its WebSocket. The gateway's own path may have a session id after it."""
        return f"/ws/{self}"


# Types of the messages after which a worker closes the connection.
LAST_MESSAGES: dict[Kind, frozenset[str]] = {
    Kind.DUPLEX: frozenset({"stopped", "timeout"}),
    Kind.HALF_DUPLEX: frozenset({"stopped", "timeout"}),
    Kind.CHAT: frozenset({"done", "error"}),
    Kind.STREAMING: frozenset({"done", "error"}),
}
NEW_ID_PREFIXES = {Kind.CHAT: "chat_", Kind.STREAMING: "stm_"}


def request_type_of(kind: Kind, session_id: str) -> SessionType:
    """The request type, for duplex sessions from the prefix of the session id."""
    if kind is Kind.DUPLEX:
        return "audio_duplex" if session_id.startswith(AUDIO_PREFIXES) else "omni_duplex"
    return "half_duplex_audio" if kind is Kind.HALF_DUPLEX else "chat"


def new_session_id(kind: Kind) -> str:
    """A session id for a client that gives none."""
    return f"{NEW_ID_PREFIXES.get(kind, '')}{secrets.token_hex(8)}"
