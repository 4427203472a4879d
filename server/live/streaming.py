"""The turns of a streaming session: each holds a slot from its `prefill` to its `done`.

Decides which messages of the client belong to the turn. Contains no relay.
"""

import asyncio

from models.errors import ModelError
from server.live.closes import CLOSED, SessionEnd
from server.live.inbox import Inbox, ReceivedMessage
from worker.protocol.codes import ErrorCode
from worker.protocol.takeover.message_bytes import TYPE_FIRST, Data
from worker.protocol.wire import WireError, read_object

PREFILL, GENERATE, STOP, CLOSE = "prefill", "generate", "stop", "close"
IDLE_S = 60.0  # between a `prefill` and the next message, while the turn holds a slot
# The public implementation's worker keeps its context between turns and clients; a turn here starts with a new one.
NEW_CONTEXT = '{"clear_kv_cache":true,'


class TurnIdleError(ModelError, RuntimeError):
    """The client holds a slot and sends nothing."""


def kind_of(data: Data) -> str:
    """The `type` of a client's message. Raises: WireError bad_json, bad_message."""
    if isinstance(data, bytes):
        raise WireError(ErrorCode.BAD_MESSAGE, "message", expected="a text frame", got="a binary frame")
    if found := TYPE_FIRST.match(data):  # a message may have 100 MB, and most clients write the type first
        return found[1]
    kind = read_object(data).get("type")
    if not isinstance(kind, str):
        raise WireError(ErrorCode.BAD_MESSAGE, "message.type", expected="text", got="none" if kind is None else kind)
    return kind


class TurnSource:
    """The client's messages of one turn. A `prefill` after `generate` stays in the inbox: it begins the next turn."""

    def __init__(self, inbox: Inbox):
        self._inbox = inbox
        self._is_first, self._generates = True, False

    def __len__(self) -> int:
        return 0 if self._generates else len(self._inbox)

    async def get(self) -> ReceivedMessage:
        """Remove and return the next message.

        Raises: ClientDisconnected; SessionEnd for `close`; TurnIdleError.
        """
        kind, message = await self._next()
        if kind == CLOSE:
            raise SessionEnd(CLOSED)
        if self._generates and kind != STOP:
            await self._inbox.until_closed()  # until the relay is cancelled at the end of the turn
        await self._inbox.get()
        self._generates = self._generates or kind == GENERATE
        if not self._is_first:
            return message
        self._is_first = False
        assert isinstance(message.data, str), "expected the text of a prefill"
        return message._replace(data=NEW_CONTEXT + message.data.lstrip()[1:])

    async def _next(self) -> tuple[str, ReceivedMessage]:
        try:
            async with asyncio.timeout(None if self._generates else IDLE_S):
                message = await self._inbox.peek()
        except TimeoutError:
            raise TurnIdleError(
                "streaming", expected=f"{GENERATE} within {IDLE_S:g} s of {PREFILL}", got="none"
            ) from None
        try:
            return kind_of(message.data), message
        except WireError:
            return "", message  # the worker answers it with an error
