"""A client of sessions with `mode`, and its sounds."""

import asyncio
import base64
import io
import json
import wave
from typing import Any

import numpy as np
import websockets

from tests.server.live_gateway import ANSWER_S

Json = dict[str, Any]
SECOND = base64.b64encode(bytes(4 * 16_000)).decode()


class ModeClient:
    """One connection."""

    def __init__(self, socket: websockets.ClientConnection):
        self.socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def receive(self, kind: str) -> Json:
        """The next event, which must be of this type. A busy worker may make a client wait again, which is left out."""
        async with asyncio.timeout(ANSWER_S):
            event = json.loads(await self.socket.recv())
            while event["type"] == "session.queue_update" != kind:
                event = json.loads(await self.socket.recv())
        assert event["type"] == kind, f"expected {kind}, got {str(event)[:300]}"
        return event

    async def queue_done(self) -> None:
        """Wait for a slot; a busy machine may report places in the queue before it."""
        async with asyncio.timeout(ANSWER_S):
            while (event := json.loads(await self.socket.recv()))["type"] != "session.queue_done":
                assert event["type"] in ("session.queued", "session.queue_update"), event

    async def created(self, **payload: Any) -> Json:
        """Begin in the newer form, as soon as there is a slot."""
        await self.queue_done()
        await self.send("session.init", payload=payload)
        return await self.receive("session.created")

    async def unit(self, **fields: Any) -> Json:
        """Send a second of silence. Returns: the first delta of its answer."""
        await self.send("input.append", input={"audio": SECOND, **fields})
        return await self.receive("response.output.delta")

    async def closed(self) -> tuple[str, int | None]:
        """The reason of `session.closed` and the close code."""
        reason = (await self.receive("session.closed"))["reason"]
        await self.socket.wait_closed()
        return reason, self.socket.close_code


async def connect(port: int, query: str) -> ModeClient:
    url = f"ws://127.0.0.1:{port}/v1/realtime?{query}"
    return ModeClient(await websockets.connect(url, compression=None, proxy=None, max_size=None, close_timeout=2))


def samples_of(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def wav_text(seconds: float) -> str:
    """A WAV file of a tone, in base64."""
    steps = (8000 * np.sin(np.arange(int(16_000 * seconds)) / 6)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(steps.tobytes())
    return base64.b64encode(file.getvalue()).decode()
