"""Clients of WebRTC calls in a process of their own: each speaks, hears and counts the packets that it gets.

`python -m benchmarks.doors.call_load` reads a `CallLoad` as a line of JSON and writes `begin` once all calls are
connected. They speak after the end of its standard input. It writes `warm` before it counts, `end` after the time, and
its counts. Needs the extra `webrtc`.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import aioice.ice
import httpx
import numpy as np
from aiortc import (
    AudioStreamTrack,
    MediaStreamTrack,
    RTCConfiguration,
    RTCPeerConnection,
    RTCSessionDescription,
    VideoStreamTrack,
)
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame, VideoFrame

RATE, PACKET = 24_000, 480  # Hz and samples of the microphone
CALLS = "/v1/realtime/calls"
LOOPBACK = "127.0.0.1"
CONNECT_S = 40.0  # the server ends a call that is not connected after 30 s
MAX_ATTEMPTS = 5
WARM_S = 3.0  # of speech before the count: detectors and encoders begin
WIDTH, HEIGHT = 640, 480


@dataclass(frozen=True)
class CallLoad:
    """What one process does.

    Attributes:
        port: of the gateway.
        calls: number of calls.
        seconds: that are counted.
        speech_file: PCM16 at 24 kHz, which each repeats from another place.
        fps: frames a second of video; 0: none.
    """

    port: int
    calls: int
    seconds: float
    speech_file: str
    fps: int = 0


class Microphone(AudioStreamTrack):
    """Sound of the user: what was said, then silence."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting = memoryview(b"")
        self._at = 0
        self._begun: float | None = None

    def say(self, pcm16: bytes) -> None:
        """Say this after all earlier sound. pcm16: at 24 kHz."""
        self._waiting = memoryview(bytes(self._waiting) + pcm16)

    async def recv(self) -> AudioFrame:
        """The next 20 ms, when they are due."""
        now = time.monotonic()
        self._begun = now if self._begun is None else self._begun
        await asyncio.sleep(self._begun + self._at / RATE - now)
        packet, self._waiting = self._waiting[: 2 * PACKET], self._waiting[2 * PACKET :]
        samples = np.frombuffer(bytes(packet).ljust(2 * PACKET, b"\0"), "<i2")[None]
        frame = AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, self._at, Fraction(1, RATE)
        self._at += PACKET
        return frame


class Camera(VideoStreamTrack):
    """Frames of noise, which costs a decoder more than one colour."""

    def __init__(self, fps: int):
        super().__init__()
        self._fps, self._at, self._begun = fps, 0, time.monotonic()
        noise = np.random.default_rng(1).integers(0, 255, (HEIGHT // 8, WIDTH // 8, 3), np.uint8)
        self._picture = noise.repeat(8, 0).repeat(8, 1)

    async def recv(self) -> VideoFrame:
        await asyncio.sleep(self._begun + self._at / self._fps - time.monotonic())
        frame = VideoFrame.from_ndarray(np.roll(self._picture, 4 * self._at, 1), format="rgb24")
        frame.pts, frame.time_base = self._at, Fraction(1, self._fps)
        self._at += 1
        return frame


@dataclass
class ReceivedSound:
    """What one client got.

    gap_ms: longest time between two packets of sound. started: responses that sounded. n_failed: attempts to connect.
    """

    packets: int = 0
    gap_ms: float = 0.0
    started: int = 0
    n_failed: int = 0


class LoadedCall:
    """One call, silent until `speak`, and what it hears from `reset` on."""

    def __init__(self, load: CallLoad, offset: int):
        sound = Path(load.speech_file).read_bytes()
        at = offset * 9973 * 2 % len(sound)
        self._speech = (sound[at:] + sound[:at]) * (1 + round((load.seconds + WARM_S) * 2 * RATE) // len(sound))
        self.heard = ReceivedSound()
        self._at = 0.0
        self._microphone = Microphone()
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.connection.addTrack(self._microphone)
        if load.fps:
            self.connection.addTrack(Camera(load.fps))
        channel = self.connection.createDataChannel("oai-events")
        self.created = asyncio.Event()
        channel.on("message", self._on_event)
        self.connection.on("track", self._on_track)

    async def connect(self, http: httpx.AsyncClient) -> None:
        """Begin the call, and wait for its session. Raises: TimeoutError; httpx.HTTPError if it is refused."""
        await self.connection.setLocalDescription(await self.connection.createOffer())
        offer = self.connection.localDescription.sdp
        answer = await http.post(CALLS, content=offer, headers={"Content-Type": "application/sdp"})
        answer.raise_for_status()
        await self.connection.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        async with asyncio.timeout(CONNECT_S):
            await self.created.wait()

    def speak(self) -> None:
        """Speak from now on."""
        self._microphone.say(self._speech)

    def reset(self) -> None:
        """Forget what was heard."""
        self.heard, self._at = ReceivedSound(), time.monotonic()

    def _on_event(self, text: str) -> None:
        kind = json.loads(text)["type"]
        if kind == "session.created":
            self.created.set()
        elif kind == "output_audio_buffer.started":
            self.heard.started += 1

    def _on_track(self, track: MediaStreamTrack) -> None:
        self._listening = asyncio.create_task(self._listen(track))

    async def _listen(self, track: MediaStreamTrack) -> None:
        while True:
            try:
                await track.recv()
            except MediaStreamError:
                return
            now = time.monotonic()
            self.heard.packets += 1
            self.heard.gap_ms = max(self.heard.gap_ms, 1000 * (now - self._at)) if self._at else 0.0
            self._at = now


async def _connected(load: CallLoad, number: int, http: httpx.AsyncClient) -> tuple[LoadedCall, int]:
    """A call, and the number of attempts that failed before it: on a busy machine a handshake may take too long.

    Raises: RuntimeError if all fail.
    """
    for n_failed in range(MAX_ATTEMPTS):
        call = LoadedCall(load, number)
        try:
            await call.connect(http)
        except (TimeoutError, httpx.HTTPError) as error:
            reason = repr(error)
            await call.connection.close()
        else:
            return call, n_failed
    raise RuntimeError(f"call {number}: expected a session in {MAX_ATTEMPTS} attempts, got {reason}")


async def run(load: CallLoad) -> list[ReceivedSound]:
    """Run the calls. Returns: what each heard."""
    aioice.ice.get_host_addresses = lambda use_ipv4, use_ipv6: [LOOPBACK]
    async with httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{load.port}", timeout=CONNECT_S, trust_env=False) as http:
        calls = [await _connected(load, number, http) for number in range(load.calls)]
        print("begin", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for call, _ in calls:
            call.speak()
        await asyncio.sleep(WARM_S)
        print("warm", flush=True)
        for call, _ in calls:
            call.reset()
        await asyncio.sleep(load.seconds)
        print("end", flush=True)
        for call, n_failed in calls:
            call.heard.n_failed = n_failed
            await call.connection.close()
    return [call.heard for call, _ in calls]


def main() -> None:
    given: Mapping[str, Any] = json.loads(sys.stdin.readline())
    heard = asyncio.run(run(CallLoad(**given)))
    print(json.dumps([asdict(one) for one in heard]), flush=True)


if __name__ == "__main__":
    main()
