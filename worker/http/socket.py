"""One WebSocket from handshake to close: starts a conversation, runs its read, answer, write and watch tasks, ends it.

Contains no handling of messages; the conversations have it.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from models.errors import ModelError
from worker.decoding import DecodingThreads
from worker.http.error_codes import code_of
from worker.http.metrics import WorkerMetrics
from worker.http.slot_keeper import GatewayLink, SlotKeeper
from worker.http.socket_conversation import ConversationEnd, SocketConversation
from worker.protocol.codec import Message
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.connection import MAX_MESSAGE, bytes_of, send_in_time, until_gone
from worker.protocol.gateway_messages import Decided
from worker.protocol.messages import Error, Prepared, Spec, write
from worker.protocol.session_id import DEFAULT_ID, session_id_of
from worker.protocol.takeover.message_bytes import ByteBudget
from worker.protocol.takeover.session_journal import SessionJournal
from worker.protocol.takeover.slot_messages import KEEP_FIRST, KEEP_SLOT, TAKE_SLOT, TakeSlot
from worker.protocol.wire import WireError
from worker.service import Service
from worker.status import State

LOG = logging.getLogger(__name__)
TAKE_S, MAX_TAKE_CHARS = 5.0, 2000  # of the first message of a gateway that takes a session over
MAX_JOURNAL_BYTES = 256 * 2**20  # of all conversations
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
        self._keepers: dict[Talk, SlotKeeper] = {}
        self._journals = ByteBudget(MAX_JOURNAL_BYTES)

    @property
    def conversations(self) -> Collection[Talk]:
        """The open conversations."""
        return self._talks.keys()

    @property
    def n_kept(self) -> int:
        """Conversations that have no connection and wait for a gateway."""
        return sum(keeper.is_waiting for keeper in self._keepers.values())

    @property
    def journal_bytes(self) -> int:
        """Bytes of the journals that rebuild open conversations on other workers."""
        return self._journals.used

    def keeps(self, session_id: str, token: str, owner: str) -> bool:
        """Whether a gateway may take a session over. Arguments as in `SlotKeeper.accepts`."""
        return self._keeper_of(session_id, token, owner) is not None

    def give_up(self, session_id: str, token: str, owner: str) -> bool:
        """End a session that is kept; another worker has it. Arguments as in `keeps`. Returns: whether there is one."""
        found = self._keeper_of(session_id, token, owner)
        if found is not None:
            found[1].give_up()
        return found is not None

    def _keeper_of(self, session_id: str, token: str, owner: str) -> tuple[Talk, SlotKeeper] | None:
        for conversation, keeper in self._keepers.items():
            if conversation.name == session_id and keeper.accepts(token, owner):
                return conversation, keeper
        return None

    async def serve(
        self, websocket: WebSocket, open_talk: OpenTalk, default_id: str = DEFAULT_ID, *, keeps: bool = False
    ) -> None:
        """Serve a socket from handshake to close. The handshake is refused if the conversation cannot start.

        Args:
            websocket: the socket.
            open_talk: makes the conversation from service, metrics and session id.
            default_id: the session id of a client that gives none.
            keeps: a gateway may let the conversation outlive its socket.
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
        self._metrics.opened()
        keeper = SlotKeeper(journal=SessionJournal(self._journals) if keeps else None)
        if keeps:
            self._keepers[conversation] = keeper
        await self._serve_link(websocket, conversation, keeper, keeper.newest, websocket.accept)

    async def take(self, websocket: WebSocket) -> None:
        """Serve a socket of a gateway that takes a session over from another one; anything else is refused."""
        name = session_id_of(websocket.query_params.get("session_id"))
        await websocket.accept()
        try:
            request = await _take_request(websocket)
            found = self._keeper_of(name, request.token, request.owner)
            if found is None:
                expected = "a session that is kept, with its newest token and its key"
                raise WireError(ErrorCode.RESUME_REFUSED, "take_slot", expected=expected, got="none")
            conversation, keeper = found
            before, link = keeper.take(request)
        except WebSocketDisconnect:
            return
        except WireError as error:
            with suppress(WebSocketDisconnect, RuntimeError):
                await websocket.close(CloseCode.POLICY_VIOLATION, _reason(error))
            return
        LOG.info("session %s goes on with another gateway", name)

        async def take() -> None:
            await before.released.wait()
            keeper.greet(link, request.received, paused=conversation.paused)

        await self._serve_link(websocket, conversation, keeper, link, take)

    async def _serve_link(
        self,
        websocket: WebSocket,
        conversation: Talk,
        keeper: SlotKeeper,
        link: GatewayLink,
        begin: Callable[[], Awaitable[None]],
    ) -> None:
        """Serve one connection until the conversation is over, or another connection has taken it."""
        outcome = "lost"
        try:
            await begin()
            outcome = await self._run_conversation(websocket, conversation, keeper, link)
        except (WebSocketDisconnect, RuntimeError) as error:  # the client disconnected during the handshake
            LOG.debug("session %s: %r", conversation.name, error)
        finally:
            link.released.set()
            if not link.taken.is_set():
                self._keepers.pop(conversation, None)
                if (answering := self._talks.pop(conversation, None)) is not None:  # cancelled before it was served
                    answering.cancel()
                keeper.close()
                conversation.leave()
                self._metrics.ended(outcome)
                LOG.info("session %s ended: %s, %d units", conversation.name, outcome, conversation.n_units)
        if link.taken.is_set():
            with suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
                async with asyncio.timeout(FLUSH_S):
                    await websocket.close(CloseCode.REPLACED, CloseReason.TAKEN)

    async def _run_conversation(
        self, websocket: WebSocket, conversation: Talk, keeper: SlotKeeper, link: GatewayLink
    ) -> str:
        """Run a conversation over one connection. Returns: its outcome, for metrics and the log."""
        answering = self._talks.get(conversation) or asyncio.create_task(conversation.run())
        reading = asyncio.create_task(_read(websocket, conversation, keeper, link, self._service.decoders))
        writing = asyncio.create_task(_write(websocket, conversation, keeper, link))
        watching = asyncio.create_task(until_gone(websocket))
        taken = asyncio.create_task(link.taken.wait())
        tasks: tuple[asyncio.Task[Any], ...] = (reading, writing, watching, taken)
        self._talks[conversation] = answering
        try:
            await asyncio.wait((answering, *tasks), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and not link.taken.is_set():
                _log_errors(conversation, (answering, *tasks))
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                if keeper.terms is None or not await _is_kept(conversation, keeper, (answering, reading, taken)):
                    return "disconnect"
            if link.taken.is_set():
                return "taken"
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
            ended = tasks if link.taken.is_set() else (answering, *tasks)
            if answering in ended:  # from here on no connection can take it, also while the tasks end
                del self._talks[conversation]
                self._keepers.pop(conversation, None)
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)

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


async def _take_request(websocket: WebSocket) -> TakeSlot:
    """The first message of a connection that takes a session over. Raises: WireError; WebSocketDisconnect."""
    try:
        async with asyncio.timeout(TAKE_S):
            event = await websocket.receive()
    except TimeoutError:
        raise WireError(ErrorCode.BAD_MESSAGE, "message", expected="take_slot", got="none in time") from None
    if event["type"] == "websocket.disconnect":
        raise WebSocketDisconnect
    text = event.get("text")
    if text is None or len(text) > MAX_TAKE_CHARS:
        raise WireError(ErrorCode.BAD_MESSAGE, "message", expected="a short take_slot", got="another message")
    return TAKE_SLOT.read_text(text)


async def _is_kept(
    conversation: Talk, keeper: SlotKeeper, tasks: "tuple[asyncio.Task[Any], asyncio.Task[int], asyncio.Task[Any]]"
) -> bool:
    """Wait for another gateway after a connection is lost.

    Args:
        conversation: it goes on meanwhile.
        keeper: whose terms give the time.
        tasks: the conversation, the reading of the lost connection, and the wait for another one.
    Returns:
        False if the gateway has closed the connection, or none has come in time; True if the conversation is over, or
        another connection has taken it.
    """
    assert keeper.terms is not None, "expected a gateway that keeps the slot"
    answering, reading, taken = tasks
    given_up = asyncio.create_task(keeper.given_up.wait(), name="given-up")
    keeping = asyncio.create_task(_keep_messages(conversation, keeper), name="keep")
    keeper.is_waiting = True
    try:
        async with asyncio.timeout(keeper.terms.grace_s):
            while not (answering.done() or taken.done()):
                if reading.done() and (reading.exception() or reading.result() != CloseCode.ABNORMAL):
                    return False
                if given_up.done():
                    return False
                waiting = [task for task in (*tasks, given_up) if not task.done()]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return True
    except TimeoutError:
        LOG.warning("session %s: no gateway has taken it over in time", conversation.name)
        return taken.done()
    finally:
        keeper.is_waiting = False
        for task in (keeping, given_up):
            task.cancel()
        await asyncio.gather(keeping, given_up, return_exceptions=True)


async def _read(
    websocket: WebSocket, conversation: Talk, keeper: SlotKeeper, link: GatewayLink, decoders: DecodingThreads
) -> int:
    """Pass each message to the conversation, until the client disconnects. Returns: the close code."""
    held = bytes_of(websocket)
    while True:
        event = await websocket.receive()
        if event["type"] == "websocket.disconnect":
            return int(event.get("code") or CloseCode.ABNORMAL)
        data: str | bytes | None = event.get("text")
        if data is None:
            data = event["bytes"]
        received, n_bytes = time.monotonic(), len(data)
        n_held = sys.getsizeof(data) if n_bytes > LONG_MESSAGE else 0
        if held is not None:
            held.add(n_held)
        try:
            if isinstance(data, str) and data.startswith(KEEP_FIRST):
                keeper.keep(link, KEEP_SLOT.read_text(data))
                continue
            if n_bytes > LONG_MESSAGE:
                message = await decoders.run(_parse, conversation, data)
            else:
                message = _parse(conversation, data)
        except WireError as error:
            message = error.with_traceback(None)  # whose frames hold the message
            n_bytes = 0
        finally:
            journaled = data if keeper.has_journal else ""
            del event, data
        await conversation.receive(message, n_bytes, received)
        keeper.count_received(journaled)
        del journaled
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


async def _write(websocket: WebSocket, conversation: Talk, keeper: SlotKeeper, link: GatewayLink) -> None:
    greetings, link.greeting = link.greeting, ()
    for greeting in greetings:
        await _send(websocket, greeting if isinstance(greeting, str | bytes) else write(greeting))
    del greetings
    while True:
        message, spec = await conversation.outbox.get()
        try:
            await _send(websocket, _kept(message, spec, keeper))
        finally:
            conversation.outbox.task_done()


async def _send(websocket: WebSocket, data: str | bytes) -> None:
    try:
        await send_in_time(websocket, data)
    except TimeoutError:
        raise WebSocketDisconnect from None


async def _keep_messages(conversation: Talk, keeper: SlotKeeper) -> None:
    """Keep messages while there is no connection."""
    while True:
        message, spec = await conversation.outbox.get()
        try:
            _kept(message, spec, keeper)
        finally:
            conversation.outbox.task_done()


def _kept(message: Message, spec: Spec, keeper: SlotKeeper) -> str | bytes:
    """A message as it is sent. It is kept, if the session may go on with another gateway."""
    data = write(message, spec)
    if isinstance(message, Prepared) and not spec.resume:
        keeper.forget()
    keeper.answered(message, data, is_kept=spec.resume)
    if not isinstance(message, Decided):
        if spec.resume:
            keeper.add(data, spec.sound_out)
        else:
            keeper.count_sent()
    return data


def _reason(error: ModelError) -> str:
    """An error's text, cut to the 123 bytes of a close frame."""
    return str(error).encode()[:120].decode(errors="ignore")
