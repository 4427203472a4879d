"""One WebSocket from handshake to close: starts a conversation, runs its read, answer, write and watch tasks, ends it.

Contains no handling of messages; the conversations have it.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from models.errors import ModelError
from worker.decoding import DecodingThreads
from worker.http.error_codes import code_of
from worker.http.metrics import WorkerMetrics
from worker.http.socket_conversation import ConversationEnd, SocketConversation
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.connection import MAX_MESSAGE, STUCK_S, bytes_of, until_gone
from worker.protocol.messages import Error, write
from worker.protocol.session_id import DEFAULT_ID, session_id_of
from worker.protocol.wire import WireError
from worker.service import Service
from worker.status import State

LOG = logging.getLogger(__name__)
FLUSH_S = 2.0  # time to send the remaining messages at the end of a conversation
LONG_MESSAGE = 2**20  # bytes; longer messages are parsed on a thread
MAX_VALUES = 20_000  # JSON values per message, of which a sound is one; parsing millions would block the event loop


Talk = SocketConversation[Any]
OpenTalk = Callable[[Service, WorkerMetrics, str], Talk]


class WorkerSockets:
    """All WebSockets of one worker."""

    def __init__(self, service: Service, metrics: WorkerMetrics):
        self._service, self._metrics = service, metrics
        self._talks: dict[Talk, asyncio.Task[ConversationEnd]] = {}

    @property
    def conversations(self) -> Collection[Talk]:
        """The open conversations."""
        return self._talks.keys()

    async def serve(self, websocket: WebSocket, open_talk: OpenTalk, default_id: str = DEFAULT_ID) -> None:
        """Serve a socket from handshake to close. The handshake is refused if the conversation cannot start.

        Args:
            websocket: the socket.
            open_talk: makes the conversation from service, metrics and session id.
            default_id: the session id of a client that gives none.
        """
        name = session_id_of(websocket.query_params.get("session_id"), default_id)
        conversation = open_talk(self._service, self._metrics, name)
        try:
            await conversation.start()
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
            outcome = await self._run_conversation(websocket, conversation)
        except (WebSocketDisconnect, RuntimeError) as error:  # the client disconnected during the handshake
            LOG.debug("session %s: %r", name, error)
        finally:
            conversation.leave()
            self._metrics.ended(outcome)
            LOG.info("session %s ended: %s, %d units", name, outcome, conversation.n_units)

    async def _run_conversation(self, websocket: WebSocket, conversation: Talk) -> str:
        """Run a conversation. Returns: its outcome, for metrics and the log."""
        answering = asyncio.create_task(conversation.run())
        reading = asyncio.create_task(_read(websocket, conversation, self._service.decoders))
        writing = asyncio.create_task(_write(websocket, conversation))
        watching = asyncio.create_task(until_gone(websocket))
        tasks: tuple[asyncio.Task[Any], ...] = (answering, reading, writing, watching)
        self._talks[conversation] = answering
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                _log_errors(conversation, tasks)
                return "disconnect"
            end = conversation.end_if_cancelled if answering.cancelled() else answering.result()
            # The slot is freed before the close frame is sent, since the client may reconnect immediately.
            conversation.leave()
            reading.cancel()
            with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
                async with asyncio.timeout(FLUSH_S):
                    await conversation.outbox.join()
                    await websocket.close(end.code, end.reason)
            return end.reason
        finally:
            del self._talks[conversation]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def run_without_socket(self, conversation: Talk, running: Coroutine[Any, Any, ConversationEnd]) -> None:
        """Run a conversation of an HTTP request to its end, which `end_all` may bring about, and free its slot.

        Args:
            conversation: the conversation.
            running: its answer.
        """
        task = asyncio.create_task(running)
        self._talks[conversation] = task
        self._metrics.opened()
        outcome = "lost"
        try:
            await asyncio.wait([task])
            outcome = (conversation.end_if_cancelled if task.cancelled() else task.result()).reason
        finally:
            del self._talks[conversation]
            task.cancel()
            conversation.leave()
            self._metrics.ended(outcome)

    def end_all(self, code: ErrorCode, text: str) -> None:
        """End every conversation with an error.

        Args:
            code: DRAINING before a restart; otherwise the engine has failed.
            text: the error's text.
        """
        end = ConversationEnd(CloseCode.INTERNAL_ERROR, CloseReason.ENGINE)
        if code is ErrorCode.DRAINING:
            end = ConversationEnd(CloseCode.SERVICE_RESTART, CloseReason.DRAINING)
        for conversation, task in self._talks.items():
            if not task.done():  # a done task has ended its conversation already
                conversation.end(Error(error=text, code=code), end)
                task.cancel()


async def _read(websocket: WebSocket, conversation: Talk, decoders: DecodingThreads) -> None:
    """Pass each message to the conversation, until the client disconnects."""
    held = bytes_of(websocket)
    while True:
        event = await websocket.receive()
        if event["type"] == "websocket.disconnect":
            return
        data: str | bytes | None = event.get("text")
        if data is None:
            data = event["bytes"]
        received, n_bytes = time.monotonic(), len(data)
        n_held = sys.getsizeof(data) if n_bytes > LONG_MESSAGE else 0
        if held is not None:
            held.add(n_held)
        try:
            if n_bytes > LONG_MESSAGE:
                message = await decoders.run(_parse, conversation, data)
            else:
                message = _parse(conversation, data)
        except WireError as error:
            message = error.with_traceback(None)  # whose frames hold the message
            n_bytes = 0
        finally:
            del event, data
        await conversation.receive(message, n_bytes, received)
        if held is not None:
            held.add(-n_held)


def _parse(conversation: Talk, data: str | bytes) -> object:
    if len(data) > MAX_MESSAGE:
        expected, got = f"at most {MAX_MESSAGE // 2**20} MiB", f"{len(data) / 2**20:.0f} MiB"
        raise WireError(ErrorCode.TOO_LARGE, "message", expected=expected, got=got)
    if isinstance(data, str) and (n_values := sum(map(data.count, "[{,"))) > MAX_VALUES:
        raise WireError(ErrorCode.TOO_LARGE, "message", expected=f"at most {MAX_VALUES} values", got=n_values)
    return conversation.parse(data)


def _log_errors(conversation: Talk, tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Log what ended a task, except a disconnect of the client."""
    for task in tasks:
        error = task.exception() if task.done() else None
        if not isinstance(error, (WebSocketDisconnect, RuntimeError, type(None))):
            LOG.error("session %s: %r", conversation.name, error, exc_info=error)


async def _write(websocket: WebSocket, conversation: Talk) -> None:
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
