"""A client of vLLM-Omni sessions, which acknowledges all events as the stock client does."""

import asyncio
import base64
import json
from typing import Any

import websockets

from tests.server.live_gateway import ANSWER_S

Json = dict[str, Any]
SECOND = base64.b64encode(bytes(2 * 16_000)).decode()
SOUND, TRANSCRIPT = "response.output_audio.delta", "response.output_audio_transcript.delta"


class OmniClient:
    """One session. log: all events, whose numbers must rise."""

    def __init__(self, socket: websockets.ClientConnection):
        self.socket = socket
        self.log: list[Json] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def until(self, kind: str, seconds: float = ANSWER_S) -> Json:
        """The next event of this type. All events are acknowledged, as the stock client does."""
        async with asyncio.timeout(seconds):
            while True:
                event = json.loads(await self.socket.recv())
                last = self.log[-1]["server_event_seq"] if self.log else 0
                assert event["server_event_seq"] > last and event["event_id"] and event["session_id"]
                self.log.append(event)
                if event["type"] not in ("session.closed", "session.expired"):
                    await self.send("session.event_ack", server_event_seq=event["server_event_seq"])
                if event["type"] == kind:
                    return event

    async def begin(self, **session: Any) -> Json:
        """Begin as the stock client does. Returns: the session."""
        given = {"modalities": ["audio", "text"], "turn_detection": None, "extra_body": {"auto_response": True}}
        await self.send("session.update", session={**given, **session})
        created = await self.until("session.created")
        await self.until("session.updated")
        return created["session"]

    async def append(self, **fields: Any) -> None:
        await self.send("input_audio_buffer.append", **{"audio": SECOND, "format": "pcm16", **fields})

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.log]
