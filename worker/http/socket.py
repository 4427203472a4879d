"""One WebSocket from handshake to close: leases a slot, runs the read, answer, write and watch tasks, frees the slot.

Contains no handling of messages; `worker.http.conversation` has it.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from models.errors import ModelError, SlotError
from worker.http.conversation import Conversation, ConversationEnd
from worker.http.error_codes import code_of
from worker.http.metrics import WorkerMetrics
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.connection import MAX_MESSAGE, STUCK_S, until_gone
from worker.protocol.messages import ClientMessage, Error, Prepare, Spec, read_binary, read_text, write
from worker.protocol.session_id import session_id_of
from worker.protocol.wire import WireError
from worker.service import Service, SlotLease
from worker.status import State

LOG = logging.getLogger(__name__)
WAIT_FOR_SLOT_S, POLL_S = 5.0, 0.05
FLUSH_S = 2.0  # time to send the remaining messages at the end of a conversation
LONG_MESSAGE = 2**20  # bytes; longer messages are parsed on a thread
MAX_VALUES = 20_000  # JSON values per message, of which a sound is one; parsing millions would block the event loop


class WorkerSockets:
    """All duplex WebSockets of one worker.

    Attributes:
        conversations: each open conversation -> the task that answers it.
    """

    def __init__(self, service: Service, metrics: WorkerMetrics):
        self._service, self._metrics = service, metrics
        self.conversations: dict[Conversation, asyncio.Task[ConversationEnd]] = {}

    async def serve(self, websocket: WebSocket) -> None:
        """Serve a socket from handshake to close. The handshake is refused without a free slot within 5 s."""
        name = session_id_of(websocket.query_params.get("session_id"))
        conversation = Conversation(self._service, self._metrics, name)
        try:
            conversation.attach(await self._lease(conversation))
        except ModelError as error:
            draining = self._service.status.state is State.DRAINING
            self._metrics.refused(ErrorCode.DRAINING if draining else code_of(error))
            LOG.info("session %s refused: %s", name, error)
            await websocket.close(CloseCode.TRY_AGAIN_LATER, _reason(error))
            return
        outcome = "lost"
        self._metrics.opened()
        try:
            await websocket.accept()
            outcome = await self._talk(websocket, conversation)
        except (WebSocketDisconnect, RuntimeError) as error:  # the client disconnected during the handshake
            LOG.debug("session %s: %r", name, error)
        finally:
            self._free_slot(conversation)
            self._metrics.ended(outcome)
            LOG.info("session %s ended: %s, %d units", name, outcome, conversation.n_units)

    async def _lease(self, conversation: Conversation) -> SlotLease:
        until = time.monotonic() + WAIT_FOR_SLOT_S
        while True:
            try:
                return await self._service.open(conversation.name, conversation.emit)
            except SlotError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(POLL_S)

    async def _talk(self, websocket: WebSocket, conversation: Conversation) -> str:
        """Run a conversation. Returns: its outcome, for metrics and the log."""
        answering = asyncio.create_task(conversation.run())
        reading = asyncio.create_task(_read(websocket, conversation))
        writing = asyncio.create_task(_write(websocket, conversation))
        watching = asyncio.create_task(until_gone(websocket))
        tasks: tuple[asyncio.Task[Any], ...] = (answering, reading, writing, watching)
        self.conversations[conversation] = answering
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                _log_errors(conversation, tasks)
                return "disconnect"
            end = conversation.end_if_cancelled if answering.cancelled() else answering.result()
            # The slot is freed before the close frame is sent, since the client may reconnect immediately.
            self._free_slot(conversation)
            reading.cancel()
            with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
                async with asyncio.timeout(FLUSH_S):
                    await conversation.outbox.join()
                    await websocket.close(end.code, end.reason)
            return end.reason
        finally:
            del self.conversations[conversation]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _free_slot(self, conversation: Conversation) -> None:
        if lease := conversation.detach():
            self._service.close(lease)

    def end_all(self, code: ErrorCode, text: str) -> None:
        """End every conversation with an error.

        Args:
            code: DRAINING before a restart; otherwise the engine has failed.
            text: the error's text.
        """
        end = ConversationEnd(CloseCode.INTERNAL_ERROR, CloseReason.ENGINE)
        if code is ErrorCode.DRAINING:
            end = ConversationEnd(CloseCode.SERVICE_RESTART, CloseReason.DRAINING)
        for conversation, task in self.conversations.items():
            if not task.done():  # a done task has ended its conversation already
                conversation.end(Error(error=text, code=code), end)
                task.cancel()


async def _read(websocket: WebSocket, conversation: Conversation) -> None:
    """Pass each message to the conversation, until the client disconnects."""
    spec = Spec()
    while True:
        event = await websocket.receive()
        if event["type"] == "websocket.disconnect":
            return
        data = event.get("text")
        if data is None:
            data = event["bytes"]
        received = time.monotonic()
        message: ClientMessage | WireError
        try:
            message = await asyncio.to_thread(_parse, data, spec) if len(data) > LONG_MESSAGE else _parse(data, spec)
        except WireError as error:
            message = error
        if isinstance(message, Prepare):
            spec = message.spec  # the messages after it may already use the encoding it requests
        await conversation.receive(message, len(data), received)


def _parse(data: str | bytes, spec: Spec) -> ClientMessage:
    if len(data) > MAX_MESSAGE:
        expected, got = f"at most {MAX_MESSAGE // 2**20} MiB", f"{len(data) / 2**20:.0f} MiB"
        raise WireError(ErrorCode.TOO_LARGE, "message", expected=expected, got=got)
    if isinstance(data, bytes):
        return read_binary(data, spec)
    if (n_values := sum(map(data.count, "[{,"))) > MAX_VALUES:
        raise WireError(ErrorCode.TOO_LARGE, "message", expected=f"at most {MAX_VALUES} values", got=n_values)
    return read_text(data)


def _log_errors(conversation: Conversation, tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Log what ended a task, except a disconnect of the client."""
    for task in tasks:
        error = task.exception() if task.done() else None
        if not isinstance(error, (WebSocketDisconnect, RuntimeError, type(None))):
            LOG.error("session %s: %r", conversation.name, error, exc_info=error)


async def _write(websocket: WebSocket, conversation: Conversation) -> None:
    while True:
        message, spec = await conversation.outbox.get()
        try:
            data = write(message, spec)
            async with asyncio.timeout(STUCK_S):
                await (websocket.send_text(data) if isinstance(data, str) else websocket.send_bytes(data))
        except TimeoutError:
            raise WebSocketDisconnect from None
        finally:
            conversation.outbox.task_done()


def _reason(error: ModelError) -> str:
    """An error's text, cut to the 123 bytes of a close frame."""
    return str(error).encode()[:120].decode(errors="ignore")
