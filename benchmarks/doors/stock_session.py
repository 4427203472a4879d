"""One Realtime session of a stock client: the openai SDK where it is installed, else the same events on a WebSocket.

Runs in an environment without the server's dependencies: imports the standard library and one of both clients.
"""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

try:
    from openai import AsyncOpenAI

    CLIENT = "openai"
except ImportError:
    CLIENT = "websockets"

RATE = 24_000
BYTES_PER_MS = 48
MODEL = "gpt-realtime"
MAX_FRAME = 2**20
Json = dict[str, Any]


class _Connection(Protocol):
    async def send(self, event: Json) -> None: ...
    async def receive(self) -> Json: ...


class _SdkConnection:
    def __init__(self, connection: Any):
        self._connection = connection

    async def send(self, event: Json) -> None:
        await self._connection.send(event)

    async def receive(self) -> Json:
        event = await self._connection.recv()
        fields: Json = event.to_dict(mode="python")
        return fields


class _PlainConnection:
    def __init__(self, socket: Any):
        self._socket = socket

    async def send(self, event: Json) -> None:
        await self._socket.send(json.dumps(event))

    async def receive(self) -> Json:
        fields: Json = json.loads(await self._socket.recv())
        return fields


class StockSession:
    """A session that is created. sent_at: monotonic s at which each chunk of sound was sent, with its last ms."""

    def __init__(self, connection: _Connection):
        self._connection = connection
        self.sent_at: list[tuple[float, float]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        await self._connection.send({"type": kind, **fields})

    async def receive(self) -> Json:
        """The next event. Raises: RuntimeError for an `error` event."""
        event = await self._connection.receive()
        if event["type"] == "error":
            raise RuntimeError(f"expected an event, got the error {event['error']}")
        return event

    async def until(self, *kinds: str) -> Json:
        """The next event of one of these types."""
        while (event := await self.receive())["type"] not in kinds:
            pass
        return event

    async def update(self, **session: Any) -> None:
        """Change settings of the session."""
        await self.send("session.update", session={"type": "realtime", **session})
        await self.until("session.updated")

    async def stream(self, sound: Iterator[bytes], chunk_ms: int, delay_s: float = 0.0) -> None:
        """Send chunks of sound at the pace of the clock, beginning after a delay, until there are none."""
        begin, ms = time.monotonic() + delay_s, 0.0
        for chunk in sound:
            await asyncio.sleep(begin + (ms + chunk_ms) / 1000 - time.monotonic())
            ms += chunk_ms
            self.sent_at.append((time.monotonic(), ms))
            await self.send("input_audio_buffer.append", audio=base64.b64encode(chunk).decode("ascii"))

    def sent_by(self, ms: float) -> float:
        """When the sound up to `ms` was sent, monotonic s."""
        return next(at for at, upto in self.sent_at if upto >= ms)


@asynccontextmanager
async def stock_session(port: int) -> AsyncIterator[StockSession]:
    """A session of the gateway on this port of this machine."""
    if CLIENT == "openai":
        client = AsyncOpenAI(api_key="none", base_url=f"http://127.0.0.1:{port}/v1")
        async with client.realtime.connect(model=MODEL) as connection:
            session = StockSession(_SdkConnection(connection))
            await session.until("session.created")
            yield session
        return
    import websockets

    url = f"ws://127.0.0.1:{port}/v1/realtime?model={MODEL}"
    async with websockets.connect(url, compression=None, max_size=MAX_FRAME, proxy=None) as socket:
        session = StockSession(_PlainConnection(socket))
        await session.until("session.created")
        yield session


class Loop(NamedTuple):
    """Sound that repeats. pcm16: at 24 kHz."""

    pcm16: bytes

    def chunks(self, chunk_ms: int, start_ms: int = 0, n: int | None = None) -> Iterator[bytes]:
        """Chunks of sound. start_ms: where to begin. n: number of chunks; None: without end."""
        size = chunk_ms * BYTES_PER_MS
        n_chunks = len(self.pcm16) // size
        number = start_ms // chunk_ms
        while n is None or n > 0:
            at = number % n_chunks * size
            yield self.pcm16[at : at + size]
            number, n = number + 1, None if n is None else n - 1
