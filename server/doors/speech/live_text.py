"""`/v1/audio/speech/stream`: text that arrives in pieces, and its sound, over a WebSocket.

The client sends `session.config`, any number of `input.text`, and `input.done`. It gets `audio.start`, binary frames
with the sound in the format that it asked for, `audio.done` and `session.done`. An `error` ends the connection.
"""

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from starlette.websockets import WebSocket, WebSocketDisconnect

from server.access.identity import Identity, identity_of
from server.access.shares import run_shared
from server.doors.core.chat_turn import DoorTurn, TurnFinished, TurnSound
from server.doors.core.request_fields import RequestFields
from server.doors.core.sound_formats import ENCODERS, SoundEncoder
from server.doors.core.sound_response import usage_of
from server.doors.errors import ApiError, error_response, invalid
from server.doors.speech.request import SpeechOrder, order_of
from server.doors.speech.routes import PARAMS, SpeechDoor, speak_turn
from worker.describe import shown
from worker.protocol.codes import CloseCode
from worker.protocol.speech_messages import MAX_LIVE_CHARS, MAX_SPEECH_CHARS, SpeakEnd, SpeakText

LIVE_TEXT_PATH = "/v1/audio/speech/stream"
MAX_MESSAGE = 24 * 2**20  # characters, as the body of `POST /v1/audio/speech`
CONFIG_S = 30.0  # time for the first message
LONG_MESSAGE = 65_536  # characters; longer messages, which have a voice, are parsed on a thread
KINDS = ("input.text", "input.done")


def add_live_text_socket(app: FastAPI, door: SpeechDoor) -> None:
    """Serve the socket."""

    @app.websocket(LIVE_TEXT_PATH)
    async def live_text(websocket: WebSocket) -> None:
        if (refusal := door.admission.refusal(websocket, "chat")) is not None:
            await websocket.send_denial_response(error_response(websocket.url.path, ApiError(403, refusal)))
            return
        await websocket.accept()
        with suppress(WebSocketDisconnect, RuntimeError):  # the client has gone
            await LiveTextSocket(door, websocket, identity_of(websocket)).serve()


class LiveTextSocket:
    """One connection."""

    def __init__(self, door: SpeechDoor, websocket: WebSocket, identity: Identity):
        self._door, self._websocket, self._identity = door, websocket, identity

    async def serve(self) -> None:
        """Speak one text. Raises: WebSocketDisconnect; RuntimeError if the client leaves while something is sent."""
        try:
            order = await self._order()
            request = await run_shared(speak_turn, self._door.voices, order, is_open=True)
            async with self._door.turns.open(request, self._identity) as turn:
                await self._converse(turn, order)
        except ApiError as error:
            await self._end(error.renamed(PARAMS))
        else:
            await self._websocket.close(CloseCode.NORMAL)

    async def _order(self) -> SpeechOrder:
        """The first message. Raises: ApiError."""
        try:
            async with asyncio.timeout(CONFIG_S):
                fields = await self._read()
        except TimeoutError:
            raise ApiError(400, f"session.config: expected within {CONFIG_S:g} s, got nothing") from None
        if (kind := fields.given.get("type")) != "session.config":
            raise invalid("type", expected="session.config", got=shown(kind))
        names = self._door.names
        order = await run_shared(order_of, fields, default_model=names.speech or names.served)
        if names.resolve_speech_for(order.model, self._identity) != names.speech:
            raise invalid("model", expected="a speech model, which alone takes text in pieces", got=order.model)
        return order

    async def _converse(self, turn: DoorTurn, order: SpeechOrder) -> None:
        """Pass on text and sound until the end of the sound."""
        reading = asyncio.create_task(self._pass_text(turn), name=f"text of {turn.session_id}")
        speaking = asyncio.create_task(self._pass_sound(turn, order), name=f"sound of {turn.session_id}")
        tasks = (reading, speaking)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not speaking.done():
                await reading  # raises its error, unless the text is complete
            await speaking
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_text(self, turn: DoorTurn) -> None:
        """Pass on messages of the client, also after its text: it may leave. Raises: ApiError; WebSocketDisconnect."""
        is_done, n_chars = False, 0
        while True:
            fields = await self._read()
            kind = fields.choice("type", KINDS)
            if is_done:
                raise invalid("type", expected="nothing after input.done", got=kind)
            if kind == "input.done":
                is_done = True
                await turn.send(SpeakEnd())
                continue
            text = fields.text("text")
            if len(text) > MAX_SPEECH_CHARS:
                raise invalid("text", expected=f"at most {MAX_SPEECH_CHARS} characters", got=f"{len(text)} characters")
            n_chars += len(text)
            if n_chars > MAX_LIVE_CHARS:  # here too: before the turn has a slot, its text is kept
                expected = f"at most {MAX_LIVE_CHARS} characters in all"
                raise invalid("text", expected=expected, got=f"{n_chars} characters")
            if text:
                await turn.send(SpeakText(text=text))

    async def _pass_sound(self, turn: DoorTurn, order: SpeechOrder) -> None:
        """Send the sound. Raises: ApiError."""
        loop, encoder, n_bytes = asyncio.get_running_loop(), SoundEncoder(order.format, order.speed), 0
        finished: TurnFinished | None = None
        await self._send(type="audio.start", sentence_index=0, format=order.format)
        async for event in turn.events():
            if isinstance(event, TurnSound):
                if data := await loop.run_in_executor(ENCODERS, encoder.push, event.pcm):
                    n_bytes += len(data)
                    await self._websocket.send_bytes(data)
            elif isinstance(event, TurnFinished):
                finished = event
        if data := await loop.run_in_executor(ENCODERS, encoder.finish):
            n_bytes += len(data)
            await self._websocket.send_bytes(data)
        assert finished is not None, "expected a turn that ends with its usage"
        await self._send(type="audio.done", sentence_index=0, total_bytes=n_bytes, error=False)
        await self._send(
            type="session.done", total_sentences=1, usage=usage_of(finished), finish_reason=finished.stopped
        )

    async def _read(self) -> RequestFields:
        """The next message. Raises: ApiError for anything but a JSON object; WebSocketDisconnect."""
        event = await self._websocket.receive()
        if event["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(event.get("code", CloseCode.NORMAL))
        text: str | None = event.get("text")
        if text is None:
            raise ApiError(400, "message: expected a text frame, got a binary frame", code="invalid_value")
        if len(text) > MAX_MESSAGE:
            raise ApiError(413, f"message: expected at most {MAX_MESSAGE} characters, got {len(text)}")
        if len(text) > LONG_MESSAGE:
            return await run_shared(RequestFields.of_body, text.encode())
        return RequestFields.of_body(text.encode())

    async def _send(self, **message: Any) -> None:
        await self._websocket.send_json(message)

    async def _end(self, error: ApiError) -> None:
        await self._send(type="error", message=str(error), error=error.fields())
        is_own = error.status >= 500
        await self._websocket.close(CloseCode.INTERNAL_ERROR if is_own else CloseCode.POLICY_VIOLATION)
