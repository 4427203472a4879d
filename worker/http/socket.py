"""One WebSocket from its handshake to its close: slot, four tasks (read, answer, write, watch), slot back.

Knows sockets and close codes. Does not know what messages mean (`conversation`).
"""

import asyncio
import logging
import re
import time
from collections.abc import Iterable
from contextlib import suppress

from starlette.websockets import WebSocket, WebSocketDisconnect

from models.errors import ModelError, SlotError
from worker.http.conversation import FAILED, RESTART, Conversation, ConversationEnd
from worker.http.error_codes import code_of
from worker.http.metrics import WorkerMetrics
from worker.protocol.codes import CloseReason, ErrorCode
from worker.protocol.connection import MAX_MESSAGE, STUCK_S, until_gone
from worker.protocol.messages import ClientMessage, Error, Prepare, Spec, read_binary, read_text, write
from worker.protocol.wire import WireError
from worker.service import Service, SlotLease
from worker.status import State

LOG = logging.getLogger(__name__)
TRY_LATER = 1013
WAIT_FOR_SLOT_S, POLL_S = 5.0, 0.05
LAST_WORDS_S = 2.0  # for what is still to be sent when a conversation is over
LONG_MESSAGE = 2**20  # is read on a thread of its own
MAX_VALUES = 20_000  # of a message; a sound is one value, and millions of small ones would hold everybody up
ODD = re.compile(r"[^A-Za-z0-9_-]")


class WorkerSockets:
    """All duplex sockets of one worker."""

    def __init__(self, service: Service, metrics: WorkerMetrics):
        self._service, self._metrics = service, metrics
        self.conversations: dict[Conversation, asyncio.Task[ConversationEnd]] = {}

    async def serve(self, websocket: WebSocket) -> None:
        """From handshake to close. Without a free slot within 5 s the handshake is refused."""
        name = ODD.sub("_", websocket.query_params.get("session_id") or "duplex")[:128]
        conversation = Conversation(self._service, self._metrics, name)
        try:
            conversation.lease = await self._lease(conversation)
        except ModelError as error:
            draining = self._service.status.state is State.DRAINING
            self._metrics.refused(ErrorCode.DRAINING if draining else code_of(error))
            LOG.info("session %s refused: %s", name, error)
            await websocket.close(TRY_LATER, _reason(error))
            return
        lease, how = conversation.lease, "lost"
        self._metrics.opened()
        try:
            await websocket.accept()
            how = await self._talk(websocket, conversation)
        except (WebSocketDisconnect, RuntimeError) as error:  # it went away during the handshake
            LOG.debug("session %s: %r", name, error)
        finally:
            if conversation.lease is not None:
                self._service.close(lease)
            self._metrics.ended(how)
            LOG.info("session %s ended: %s, %d units", name, how, conversation.n_units)

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
        """Returns: how it ended."""
        answering = asyncio.create_task(conversation.run())
        reading = asyncio.create_task(_read(websocket, conversation))
        writing = asyncio.create_task(_write(websocket, conversation))
        watching = asyncio.create_task(until_gone(websocket))
        tasks = (answering, reading, writing, watching)
        self.conversations[conversation] = answering
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                _report(conversation, tasks)
                return "disconnect"
            goodbye = conversation.farewell if answering.cancelled() else answering.result()
            # The slot is free before the client hears that it is over: it may come back at once.
            self._service.close(conversation.lease)
            conversation.lease = None
            reading.cancel()
            with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await conversation.outbox.join()
                    await websocket.close(goodbye.code, goodbye.reason)
            return goodbye.reason
        finally:
            del self.conversations[conversation]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end_all(self, code: ErrorCode, text: str) -> None:
        """End every conversation with an error, as before a restart."""
        is_draining = code is ErrorCode.DRAINING
        farewell = ConversationEnd(*((RESTART, CloseReason.DRAINING) if is_draining else (FAILED, CloseReason.ENGINE)))
        for conversation, task in self.conversations.items():
            if not task.done():  # otherwise it is saying its last words
                conversation.end(Error(error=text, code=code), farewell)
                task.cancel()


async def _read(websocket: WebSocket, conversation: Conversation) -> None:
    """Everything that comes, until the client is gone."""
    spec = Spec()
    while True:
        event = await websocket.receive()
        if event["type"] == "websocket.disconnect":
            return
        data = event.get("text")
        if data is None:
            data = event["bytes"]
        received = time.monotonic()
        try:
            message = await asyncio.to_thread(_parse, data, spec) if len(data) > LONG_MESSAGE else _parse(data, spec)
        except WireError as error:
            message = error
        if isinstance(message, Prepare):
            spec = message.spec  # what follows may already come in the form it asks for
        await conversation.take(message, len(data), received)


def _parse(data: str | bytes, spec: Spec) -> ClientMessage:
    if len(data) > MAX_MESSAGE:
        expected, got = f"at most {MAX_MESSAGE // 2**20} MiB", f"{len(data) / 2**20:.0f} MiB"
        raise WireError(ErrorCode.TOO_LARGE, "message", expected=expected, got=got)
    if isinstance(data, bytes):
        return read_binary(data, spec)
    if (n_values := sum(map(data.count, "[{,"))) > MAX_VALUES:
        raise WireError(ErrorCode.TOO_LARGE, "message", expected=f"at most {MAX_VALUES} values", got=n_values)
    return read_text(data)


def _report(conversation: Conversation, tasks: Iterable["asyncio.Task[None]"]) -> None:
    """What ended a task and is not the client's going away is a fault of ours."""
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
    """Fits a close frame: 123 bytes."""
    return str(error).encode()[:120].decode(errors="ignore")
