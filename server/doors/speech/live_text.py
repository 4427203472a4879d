"""`/v1/audio/speech/stream`: texts in pieces, and their sound, over a WebSocket, in the protocol of vLLM-Omni.

The client sends `session.config`, then for each utterance any number of `input.text`, and `input.done`. It gets
`audio.start`, binary frames with the sound in the format that it asked for, `audio.done` and `session.done`; the next
utterance may follow. `session.close` ends the connection, and so does an `error`.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.websockets import WebSocket, WebSocketDisconnect

from server.access.identity import Identity, identity_of
from server.access.limit import Limit
from server.access.shares import run_shared
from server.doors.core.chat_turn import ChatTurns, DoorTurn, TurnFinished, TurnSound, TurnStarted
from server.doors.core.door_needs import needs_asked
from server.doors.core.request_fields import RequestFields
from server.doors.core.sound_formats import ENCODERS, SoundEncoder
from server.doors.core.sound_response import usage_of
from server.doors.errors import ApiError, error_response, invalid
from server.doors.speech.request import SpeechOrder, live_order
from server.doors.speech.routes import PARAMS, SpeechDoor, speak_turn
from worker.config.access import ClientLimits
from worker.describe import shown
from worker.protocol.codes import CloseCode
from worker.protocol.speech_messages import MAX_LIVE_CHARS, MAX_SPEECH_CHARS, SpeakEnd, SpeakText
from worker.protocol.wire import SOUND_RATE

LIVE_TEXT_PATH = "/v1/audio/speech/stream"
MAX_MESSAGE = 24 * 2**20  # characters, as the body of `POST /v1/audio/speech`
CONFIG_S = 30.0  # time for the first message
LONG_MESSAGE = 65_536  # characters; longer messages, which have a voice, are parsed on a thread
MAX_AHEAD = 64  # messages that wait for the sound of an earlier utterance; more are not read
KINDS = ("session.config", "input.text", "input.done", "session.close")
TEXT_KINDS = ("input.text", "input.done")


@dataclass(frozen=True)
class LiveTextDoor:
    """What the socket uses. limits: times of an utterance. count: counts that a client has reached one of them."""

    speech: SpeechDoor
    limits: ClientLimits
    count: Callable[[Limit], None]


def add_live_text_socket(app: FastAPI, door: LiveTextDoor) -> None:
    """Serve the socket."""

    @app.websocket(LIVE_TEXT_PATH)
    async def live_text(websocket: WebSocket) -> None:
        try:
            turns = door.speech.turns.at(needs_asked(websocket).labels)
            if (refusal := door.speech.admission.refusal(websocket, "chat")) is not None:
                raise ApiError(403, refusal)
        except ApiError as error:
            await websocket.send_denial_response(error_response(websocket.url.path, error))
            return
        await websocket.accept()
        with suppress(WebSocketDisconnect, RuntimeError):  # the client has gone
            await LiveTextSocket(door, turns, websocket, identity_of(websocket)).serve()


class LiveTextSocket:
    """One connection."""

    def __init__(self, door: LiveTextDoor, turns: ChatTurns, websocket: WebSocket, identity: Identity):
        self._door, self._turns, self._websocket, self._identity = door, turns, websocket, identity
        self._messages: asyncio.Queue[RequestFields | ApiError] = asyncio.Queue(MAX_AHEAD)
        self._reading: asyncio.Task[None] | None = None  # ends when the client has gone
        self._n_spoken = 0  # utterances

    async def serve(self) -> None:
        """Speak texts. Raises: WebSocketDisconnect; RuntimeError if the client leaves while something is sent."""
        self._reading = asyncio.create_task(self._read(), name="messages of live text")
        try:
            order = await self._order(await self._first())
            while (kind := (fields := await self._next()).choice("type", KINDS)) != "session.close":
                if kind == "session.config":
                    order = await self._order(fields)
                else:
                    await self._utterance(order, fields)
        except ApiError as error:
            await self._end(error.renamed(PARAMS))
        else:
            await self._websocket.close(CloseCode.NORMAL)
        finally:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None  # its error has a frame of this object

    async def _first(self) -> RequestFields:
        """The message `session.config`. Raises: ApiError; WebSocketDisconnect."""
        try:
            async with asyncio.timeout(CONFIG_S):
                fields = await self._message()
        except TimeoutError:
            raise ApiError(400, f"session.config: expected within {CONFIG_S:g} s, got nothing") from None
        if (kind := fields.given.get("type")) != "session.config":
            raise invalid("type", expected="session.config", got=shown(kind))
        return fields

    async def _order(self, fields: RequestFields) -> SpeechOrder:
        """How the utterances after a `session.config` are spoken. Raises: ApiError."""
        names = self._door.speech.names
        order = await run_shared(live_order, fields, names.speech or names.served)
        if names.resolve_speech_for(order.model, self._identity) != names.speech:
            raise invalid("model", expected="a speech model, which alone takes text in pieces", got=order.model)
        return order

    # --- one utterance -------------------------------------------------------------------------

    async def _utterance(self, order: SpeechOrder, fields: RequestFields) -> None:
        """Speak a text up to `input.done`. fields: its first message. Raises: ApiError; WebSocketDisconnect."""
        while fields.given.get("type") == "input.text" and not _text_of(fields).strip():
            fields = await self._next(TEXT_KINDS)
        finished: TurnFinished | None = None
        if fields.given.get("type") == "input.text":
            request = await run_shared(speak_turn, self._door.speech.voices, order, is_open=True)
            async with self._turns.open(request, self._identity) as turn:
                finished = await self._converse(turn, order, _text_of(fields))
        usage = {} if finished is None else {"usage": usage_of(finished), "finish_reason": finished.stopped}
        n_sentences = 0 if finished is None else 1
        await self._send(type="session.done", utterance_index=self._n_spoken, total_sentences=n_sentences, **usage)
        self._n_spoken += 1

    async def _converse(self, turn: DoorTurn, order: SpeechOrder, text: str) -> TurnFinished:
        """Pass on text and sound until the end of the sound. text: the first one."""
        assert self._reading is not None, "expected a connection that is read"
        passing = asyncio.create_task(self._pass_text(turn, text), name=f"text of {turn.session_id}")
        speaking = asyncio.create_task(self._pass_sound(turn, order, text), name=f"sound of {turn.session_id}")
        limiting = asyncio.create_task(self._limit(turn), name=f"limit of {turn.session_id}")
        tasks = (passing, speaking, limiting)
        waiting: set[asyncio.Task[Any]] = {*tasks, self._reading}
        try:
            while not speaking.done():
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                ended.discard(speaking)
                while ended:
                    await ended.pop()  # raises its error, unless the text is complete
            return await speaking
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # An error has this frame, which would keep the whole connection until a full garbage collection.
            del passing, speaking, limiting, tasks, waiting, task

    async def _pass_text(self, turn: DoorTurn, text: str) -> None:
        """Pass on the text up to its end. Raises: ApiError."""
        n_chars = 0
        while True:
            n_chars += len(text)
            if n_chars > MAX_LIVE_CHARS:  # here too: before the turn has a slot, its text is kept
                expected = f"at most {MAX_LIVE_CHARS} characters in all"
                raise invalid("text", expected=expected, got=f"{n_chars} characters")
            if text:
                await turn.send(SpeakText(text=text))
            fields = await self._next(TEXT_KINDS)
            if fields.given["type"] == "input.done":
                await turn.send(SpeakEnd())
                return
            text = _text_of(fields)

    async def _pass_sound(self, turn: DoorTurn, order: SpeechOrder, text: str) -> TurnFinished:
        """Send the sound. text: that has arrived. Raises: ApiError."""
        loop, encoder, n_bytes = asyncio.get_running_loop(), SoundEncoder(order.format, order.speed), 0
        place = {"utterance_index": self._n_spoken, "sentence_index": 0}
        pcm_form = {"sample_rate": SOUND_RATE, "channels": 1} if order.format == "pcm" else {}
        whole = bytearray()
        finished: TurnFinished | None = None

        async def send(data: bytes) -> None:
            nonlocal n_bytes
            n_bytes += len(data)
            if not order.in_parts:
                whole.extend(data)
            elif data:
                await self._websocket.send_bytes(data)

        async for event in turn.events():
            if isinstance(event, TurnStarted):
                await self._send(type="audio.start", **place, sentence_text=text, format=order.format, **pcm_form)
            elif isinstance(event, TurnSound):
                await send(await loop.run_in_executor(ENCODERS, encoder.push, event.pcm))
            elif isinstance(event, TurnFinished):
                finished = event
        await send(await loop.run_in_executor(ENCODERS, encoder.finish))
        if whole:
            await self._websocket.send_bytes(bytes(whole))
        assert finished is not None, "expected a turn that ends with its usage"
        await self._send(type="audio.done", **place, total_bytes=n_bytes, error=False)
        return finished

    async def _limit(self, turn: DoorTurn) -> None:
        """Wait until the utterance has had its slot for too long. Raises: ApiError."""
        await turn.slot_given.wait()
        await asyncio.sleep(self._door.limits.live_text_s)
        raise self._limited(Limit.LIVE_TEXT, f"the end of an utterance within {self._door.limits.live_text_s:g} s")

    def _limited(self, limit: Limit, expected: str) -> ApiError:
        self._door.count(limit)
        return ApiError(400, f"{limit}: expected {expected}, got none", code="limit_reached")

    # --- messages ------------------------------------------------------------------------------

    async def _next(self, kinds: tuple[str, ...] = KINDS) -> RequestFields:
        """The next message, of one of these types. Raises: ApiError, also for a client that is silent for too long."""
        idle_s = self._door.limits.live_text_idle_s
        fields: RequestFields | None = None
        with suppress(TimeoutError):  # must not be the context of the error below: it has frames of this one
            async with asyncio.timeout(idle_s):
                fields = await self._message()
        if fields is None:
            raise self._limited(Limit.LIVE_TEXT_IDLE, f"a message within {idle_s:g} s")
        fields.choice("type", kinds)
        return fields

    async def _message(self) -> RequestFields:
        """The next message. Raises: ApiError for one that could not be read; WebSocketDisconnect."""
        assert self._reading is not None, "expected a connection that is read"
        taking = asyncio.create_task(self._messages.get())
        try:
            await asyncio.wait((taking, self._reading), return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                await self._reading  # raises
            message = await taking
            self._messages.task_done()
        finally:
            taking.cancel()
        if isinstance(message, ApiError):
            try:
                raise message
            finally:
                del message  # which has this frame
        return message

    async def _read(self) -> None:
        """Read messages, and errors in place of those that are no JSON object. Raises: WebSocketDisconnect."""
        while True:
            event = await self._websocket.receive()
            if event["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(event.get("code", CloseCode.NORMAL))
            text: str | None = event.get("text")
            try:
                message: RequestFields | ApiError = await _parsed(text)
            except ApiError as error:
                message = error
            await self._messages.put(message)
            if text is None or len(text) > LONG_MESSAGE:
                await self._messages.join()  # others are not kept beside a long one

    async def _send(self, **message: Any) -> None:
        await self._websocket.send_json(message)

    async def _end(self, error: ApiError) -> None:
        await self._send(type="error", message=str(error), error=error.fields())
        codes = {503: CloseCode.TRY_AGAIN_LATER, 429: CloseCode.TRY_AGAIN_LATER}
        is_own = error.status >= 500
        other = CloseCode.INTERNAL_ERROR if is_own else CloseCode.POLICY_VIOLATION
        await self._websocket.close(codes.get(error.status, other))


def _text_of(fields: RequestFields) -> str:
    """The characters of an `input.text`. Raises: ApiError."""
    text = fields.text("text")
    if len(text) > MAX_SPEECH_CHARS:
        raise invalid("text", expected=f"at most {MAX_SPEECH_CHARS} characters", got=f"{len(text)} characters")
    return text


async def _parsed(text: str | None) -> RequestFields:
    """The message in a text frame; None for a binary one. Raises: ApiError for anything but a JSON object."""
    if text is None:
        raise ApiError(400, "message: expected a text frame, got a binary frame", code="invalid_value")
    if len(text) > MAX_MESSAGE:
        raise ApiError(413, f"message: expected at most {MAX_MESSAGE} characters, got {len(text)}")
    if len(text) > LONG_MESSAGE:
        return await run_shared(RequestFields.of_body, text.encode())
    return RequestFields.of_body(text.encode())
