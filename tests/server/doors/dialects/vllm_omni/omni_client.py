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

UNNUMBERED = ("session.resumed", "session.replaced", "session.resync_required")


class OmniClient:
    """One session. log: all events. n_received: number of the last one; none may be missing."""

    def __init__(self, socket: websockets.ClientConnection):
        self.socket = socket
        self.log: list[Json] = []
        self.n_received = 0

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def until(self, kind: str, seconds: float = ANSWER_S) -> Json:
        """The next event of this type. All events are acknowledged, as the stock client does."""
        async with asyncio.timeout(seconds):
            while True:
                event = json.loads(await self.socket.recv())
                self.log.append(event)
                if event["type"] in UNNUMBERED:
                    assert "server_event_seq" not in event and event["session_id"]
                else:
                    assert event["server_event_seq"] == self.n_received + 1 and event["event_id"]
                    self.n_received += 1
                    if event["type"] not in ("session.closed", "session.expired"):
                        await self.send("session.event_ack", server_event_seq=self.n_received)
                if event["type"] == kind:
                    return event

    async def begin(self, **session: Any) -> Json:
        """Begin as the stock client does. Returns: the session."""
        given = {"modalities": ["audio", "text"], "turn_detection": None, "extra_body": {"auto_response": True}}
        await self.send("session.update", session={**given, **session})
        created = await self.until("session.created")
        await self.until("session.updated")
        return created["session"]

    def abort(self) -> None:
        """Lose the connection without a close frame."""
        self.socket.transport.abort()

    async def resume(self, socket: websockets.ClientConnection, **fields: Any) -> None:
        """Ask to continue over another connection. fields: other ones than the right ones."""
        self.socket = socket
        credentials = [event for event in self.log if event["type"] in ("session.created", "session.resumed")][-1]
        last = {"last_received_server_event_seq": self.n_received}
        right = {name: credentials[name] for name in ("session_id", "resume_token")}
        await self.send("session.resume", **{**right, **last, **fields})

    async def append(self, **fields: Any) -> None:
        await self.send("input_audio_buffer.append", **{"audio": SECOND, "format": "pcm16", **fields})

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.log]
