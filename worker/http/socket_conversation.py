"""What `WorkerSockets` requires of a conversation, whatever its protocol."""

import asyncio
from typing import NamedTuple, Protocol, TypeVar

from worker.protocol.codec import Message
from worker.protocol.codes import CloseCode
from worker.protocol.messages import Error, Spec
from worker.protocol.wire import WireError

Incoming = TypeVar("Incoming")


class ConversationEnd(NamedTuple):
    """The close frame that ends a conversation."""

    code: CloseCode
    reason: str


class SocketConversation(Protocol[Incoming]):
    """One client's conversation. Contains no sockets.

    Order of calls: `start`, then `run` on a task of its own, with `parse` and `receive` for each message; at last
    `leave`.

    Attributes:
        name: the session id.
        outbox: messages to send, each with the options in force.
        paused: whether the client has paused the conversation.
        n_units: answers so far.
        end_if_cancelled: how the conversation ends if `run` is cancelled.
    """

    name: str
    outbox: asyncio.Queue[tuple[Message, Spec]]
    paused: bool
    n_units: int
    end_if_cancelled: ConversationEnd

    @property
    def n_rows(self) -> int:
        """Context tokens of the session."""

    async def start(self) -> None:
        """Obtain what the conversation needs before its handshake is accepted. Raises: ModelError to refuse it."""

    def parse(self, data: str | bytes) -> Incoming:
        """The message in a text or binary frame; may be called on a thread, one call at a time. Raises: WireError."""

    async def receive(self, message: Incoming | WireError, n_bytes: int, received: float) -> None:
        """Accept a message; waits while too many wait for their answer.

        Args:
            message: the message, or the error that `parse` raised.
            n_bytes: its size on the wire.
            received: time of arrival, monotonic seconds.
        """

    async def run(self) -> ConversationEnd:
        """Answer messages until the conversation ends by itself."""

    def end(self, error: Error, end: ConversationEnd) -> None:
        """Send an error and set how the conversation ends; the caller cancels `run` next."""

    def leave(self) -> None:
        """Free the slot; later events of the engine are ignored. Later calls have no effect."""
