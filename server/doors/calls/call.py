"""One call: the channel of its session, the track of its sound, and the sockets that follow it."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from starlette.types import Message, Receive

from server.access.identity import Identity
from server.doors.calls.processes import ANSWER_S, START_S, PeerProcess
from server.doors.core.event_writer import EventWriter
from server.doors.errors import ApiError
from server.doors.live.ends import MAX_FRAME
from server.doors.live.sound.resample import floats_of
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.items import new_id
from server.doors.realtime.session import RealtimeSession
from server.peers.frames import NUMBER, POSITION, FrameKind, LinkFrame
from worker.protocol.codes import CloseCode

MAX_WAITING = 256  # events of the client's channel that are not handled; a socket that follows has one
MAX_WAITING_CHARS = MAX_FRAME  # characters of these
LOST = (CloseCode.INTERNAL_ERROR, "Connection lost")


class _WaitingEvent(NamedTuple):
    """An event that is not handled. on_taken: called when its turn has come."""

    message: Message
    on_taken: Callable[[], None]


class CallSession(Protocol):
    """The session of a call."""

    @property
    def session(self) -> RealtimeSession | None:
        """None until it has begun."""

    def hear(self, samples: np.ndarray) -> None:
        """Add sound of the client's track, [n] float32 at 16 kHz."""


class WebRtcCall:
    """A call between its offer and its end.

    Args:
        identity: whose call it is.
        process: holds its connection.
        paced: slows the reading of events down to the limits of the client.
    """

    def __init__(self, identity: Identity, process: PeerProcess, paced: Callable[[Receive], Receive]):
        self.id, self.identity = new_id("rtc"), identity
        self._process, self._number = process, process.add(self)
        self._answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._events: asyncio.Queue[_WaitingEvent] = asyncio.Queue()
        self._n_waiting = self._n_waiting_chars = 0  # events of the client's channel
        self._paced: Receive | None = paced(self._next_event)
        self._gone = asyncio.Event()
        self._is_lost = self._is_hung_up = False
        self._session: CallSession | None = None
        self._followers: list[EventWriter] = []
        self.ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    async def open(self, offer: str) -> str:
        """The answer to the client's offer. Raises: ApiError."""
        try:
            async with asyncio.timeout(START_S):
                await self._process.start()
            self._send(FrameKind.OFFER, offer.encode())
            async with asyncio.timeout(ANSWER_S):
                return await self._answer
        except TimeoutError:
            raise ApiError(503, f"sdp: expected an answer within {ANSWER_S:.0f} s, got none") from None

    def attach(self, session: CallSession) -> None:
        """Give what the client sends to a session from now on."""
        self._session = session

    def hang_up(self) -> None:
        """End the call: `wait_gone` returns, which ends its session."""
        self._is_hung_up = True
        self._gone.set()

    # --- the channel of the session ------------------------------------------------------------

    async def receive(self) -> Message:
        """The next event, as fast as the client may send."""
        assert self._paced is not None, "receive: expected a call that is not closed"
        return await self._paced()

    async def send_text(self, data: str) -> None:
        """Send an event to the client, and to all that follow the call."""
        self._send(FrameKind.EVENT, data.encode())
        for follower in self._followers:
            follower.put_text(data)

    async def close(self, code: int, reason: str | None) -> None:
        """End the connection, and drop what refers to the call."""
        self._process.remove(self._number)
        self._session = self._paced = None
        if not self.ended.done():
            self.ended.set_result(LOST if self._is_lost else (code, reason or ""))

    async def wait_gone(self) -> bool:
        """Wait until the client has gone. Returns: whether by `hang_up`."""
        await self._gone.wait()
        return self._is_hung_up

    # --- sockets that follow the call ----------------------------------------------------------

    def follow(self, writer: EventWriter) -> None:
        """Send all events to this socket too, after `session.created` if that was sent before."""
        session = None if self._session is None else self._session.session
        if session is not None:
            EventSender(writer.put)("session.created", session=session.described())
        self._followers.append(writer)

    def unfollow(self, writer: EventWriter) -> None:
        self._followers.remove(writer)

    async def put(self, message: Message) -> None:
        """Have an event of a socket handled after all earlier ones. Returns when its turn has come."""
        taken = asyncio.Event()
        self._events.put_nowait(_WaitingEvent(message, taken.set))
        await taken.wait()

    async def _next_event(self) -> Message:
        event = await self._events.get()
        event.on_taken()
        return event.message

    # --- the track of sound --------------------------------------------------------------------

    def play(self, number: int, pcm16: bytes) -> None:
        """Add sound of a response."""
        self._send(FrameKind.PLAY, NUMBER.pack(number), pcm16)

    def end(self, number: int) -> None:
        """The response has no more sound."""
        self._send(FrameKind.END, NUMBER.pack(number))

    def clear(self) -> None:
        """Drop all sound that was not sent."""
        self._send(FrameKind.CLEAR)

    def _send(self, kind: FrameKind, *parts: bytes) -> None:
        self._process.send(kind, self._number, *parts)

    # --- the process ---------------------------------------------------------------------------

    def on_lost(self) -> None:
        """The process has ended."""
        self._is_lost = True
        self._gone.set()
        if not self._answer.done():
            self._answer.set_exception(ApiError(503, "The process of the call has ended", headers={"retry-after": "1"}))

    def on_frame(self, frame: LinkFrame) -> None:
        """The process sends something."""
        if frame.kind in (FrameKind.ANSWER, FrameKind.REFUSED, FrameKind.GONE):
            self._on_connection(frame.kind, frame.data.decode(errors="replace"))
        elif self._session is not None:
            self._on_media(frame, self._session)

    def _on_connection(self, kind: FrameKind, text: str) -> None:
        if kind is FrameKind.GONE:
            self._gone.set()
        if self._answer.done():
            return
        if kind is FrameKind.ANSWER:
            self._answer.set_result(text)
        elif kind is FrameKind.REFUSED:
            self._answer.set_exception(ApiError(400, f"sdp: {text}", param="sdp", code="invalid_value"))
        else:
            self._answer.set_exception(ApiError(503, f"sdp: {text}"))

    def _on_media(self, frame: LinkFrame, call_session: CallSession) -> None:
        if frame.kind is FrameKind.HEARD:
            call_session.hear(floats_of(frame.data))
            return
        if frame.kind is FrameKind.EVENT:
            self._on_event(frame.data.decode(errors="replace"))
            return
        session = call_session.session
        if session is None or session.playback is None:
            return
        if frame.kind is FrameKind.PICTURE:
            session.add_frame(frame.data)
        elif frame.kind is FrameKind.STARTED:
            session.playback.on_started(*NUMBER.unpack(frame.data))
        elif frame.kind is FrameKind.STOPPED:
            session.playback.on_stopped(*NUMBER.unpack(frame.data))
        elif frame.kind is FrameKind.CLEARED:
            session.playback.on_cleared(*POSITION.unpack(frame.data))

    def _on_event(self, text: str) -> None:
        """Have an event of the client's channel handled after all earlier ones."""
        if self._n_waiting >= MAX_WAITING or self._n_waiting_chars > MAX_WAITING_CHARS:
            self._gone.set()  # it sends much faster than its events are handled
            return
        self._count_waiting(1, len(text))
        on_taken = partial(self._count_waiting, -1, -len(text))
        self._events.put_nowait(_WaitingEvent({"type": "websocket.receive", "text": text}, on_taken))

    def _count_waiting(self, n_events: int, n_chars: int) -> None:
        self._n_waiting += n_events
        self._n_waiting_chars += n_chars
