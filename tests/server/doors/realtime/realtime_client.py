"""A Realtime client that keeps a log of all events, and sound for it."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import soundfile
import websockets

from server.doors.live.sound.resample import StreamResampler, pcm16_of
from tests.server.doors.realtime.event_log import EventLog
from tests.server.live_gateway import ANSWER_S

QUESTION = Path(__file__).parents[3] / "data" / "question.wav"
Json = dict[str, Any]


class RealtimeClient:
    """One Realtime session, whose events are checked one by one. log: all events received so far."""

    def __init__(self, socket: websockets.ClientConnection):
        self.socket = socket
        self.log: list[Json] = []
        self._checks = EventLog()

    async def send(self, kind: str, **fields: Any) -> None:
        if fields.get("previous_item_id") == "root":
            self._checks.roots_due += 1
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def append(self, pcm16: bytes) -> None:
        await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm16).decode())

    async def receive(self, seconds: float = ANSWER_S) -> Json:
        async with asyncio.timeout(seconds):
            data = await self.socket.recv()
        assert isinstance(data, str), "expected a text frame"
        event: Json = json.loads(data)
        self._checks.take(event, len(data.encode()))
        self.log.append(event)
        return event

    async def until(self, kind: str, seconds: float = ANSWER_S, *, with_errors: bool = False) -> Json:
        """The next event of this type. with_errors: errors may come before it."""
        async with asyncio.timeout(seconds):
            while (event := await self.receive(seconds))["type"] != kind:
                assert with_errors or event["type"] != "error", f"expected {kind}, got {event}"
        return event

    async def answer(self, kind: str, **fields: Any) -> Json:
        """Send an event. Returns: the next event."""
        await self.send(kind, **fields)
        return await self.receive()

    async def update(self, **session: Any) -> Json:
        """Send `session.update`. Returns: the session after it."""
        await self.send("session.update", session={"type": "realtime", **session})
        return (await self.until("session.updated"))["session"]

    async def closed(self, seconds: float = ANSWER_S) -> tuple[int, str]:
        """Read events until the server closes the socket. Returns: code and reason of the close frame."""
        with suppress(websockets.ConnectionClosed):
            while True:
                await self.receive(seconds)
        assert self.socket.close_code is not None
        return self.socket.close_code, self.socket.close_reason or ""

    def kinds(self, since: str = "") -> list[str]:
        """The types in the log. since: from the first event of this type on."""
        kinds = [event["type"] for event in self.log]
        return kinds[kinds.index(since) :] if since else kinds


@asynccontextmanager
async def realtime(port: int, query: str = "?model=gpt-realtime", **options: Any) -> AsyncIterator[RealtimeClient]:
    """A client whose session is created. options: of `websockets.connect`."""
    url = f"ws://127.0.0.1:{port}/v1/realtime{query}"
    async with websockets.connect(url, compression=None, max_size=2**20, proxy=None, **options) as socket:
        client = RealtimeClient(socket)
        event = await client.receive()
        assert event["type"] == "session.created", event
        yield client


def silence(seconds: float) -> bytes:
    """PCM16 at 24 kHz."""
    return bytes(2 * round(24_000 * seconds))


def speech() -> bytes:
    """A spoken question, PCM16 at 24 kHz."""
    sound, rate = soundfile.read(QUESTION, dtype="float32")
    return pcm16_of(StreamResampler(rate, 24_000).push(sound))
