"""A client of calls: a peer connection on the loopback address, with a log of events and of what it hears."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCPeerConnection,
    RTCSessionDescription,
    VideoStreamTrack,
)
from aiortc.mediastreams import MediaStreamError

from benchmarks.doors.call_load import CALLS, Microphone
from tests.server.doors.realtime.event_log import EventLog
from tests.server.live_gateway import ANSWER_S, wait_until

Json = dict[str, Any]


class CallClient:
    """One call. log: all events so far. heard: [n] int16 of the server's track, mono at 48 kHz."""

    def __init__(self, *, with_video: bool):
        self.microphone, self.log = Microphone(), list[Json]()
        self._heard: list[np.ndarray] = []
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.connection.addTrack(self.microphone)
        if with_video:
            self.connection.addTrack(VideoStreamTrack())
        self.channel = self.connection.createDataChannel("oai-events")
        self.channel.on("message", lambda text: self.log.append(json.loads(text)))
        self.connection.on("track", self._listen)
        self.call_id = ""

    def _listen(self, track: MediaStreamTrack) -> None:
        async def listen() -> None:
            while True:
                try:
                    frame = await track.recv()
                except MediaStreamError:
                    return
                self._heard.append(frame.to_ndarray()[0, ::2])

        self._listening = asyncio.create_task(listen())

    @property
    def heard(self) -> np.ndarray:
        return np.concatenate(self._heard) if self._heard else np.zeros(0, np.int16)

    async def offer(self) -> str:
        await self.connection.setLocalDescription(await self.connection.createOffer())
        return self.connection.localDescription.sdp

    async def accept(self, answer: str, location: str) -> None:
        """Connect. location: header of the answer."""
        self.call_id = location.removeprefix(f"{CALLS}/")
        await self.connection.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        await self.until("session.created")

    async def send(self, kind: str, **fields: Any) -> None:
        self.channel.send(json.dumps({"type": kind, **fields}))

    async def until(self, kind: str, n: int = 1) -> Json:
        """The event of this type that is the n-th; waits for it."""

        def found() -> list[Json]:
            return [event for event in self.log if event["type"] == kind][n - 1 :]

        await wait_until(found, f"{kind}, got {self.kinds()}", ANSWER_S)
        return found()[0]

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.log]


@asynccontextmanager
async def calling(
    http: httpx.AsyncClient, session: Json | None = None, *, with_video: bool = False, **headers: str
) -> AsyncIterator[CallClient]:
    """A client whose call has a session; its events are checked at the end.

    session: its settings. headers: of the request.
    """
    client = CallClient(with_video=with_video)
    try:
        parts = {"sdp": (None, await client.offer(), "application/sdp")}
        if session is not None:
            parts["session"] = (None, json.dumps(session), "application/json")
        answer = await http.post(CALLS, files=parts, headers=headers)
        assert answer.status_code == 201, answer.text
        assert answer.headers["content-type"] == "application/sdp"
        await client.accept(answer.text, answer.headers["location"])
        yield client
        checks = EventLog()
        for event in client.log:
            checks.take(event)
    finally:
        await client.connection.close()
