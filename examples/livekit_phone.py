"""An agent that answers phone calls: LiveKit SIP puts each call into a room, where this agent talks through the server.

    pip install "livekit-agents[openai]" soundfile soxr
    python examples/livekit_phone.py start   # answers calls; needs LIVEKIT_URL, its key and secret
    python examples/livekit_phone.py call assets/ref_audio/default.wav --save reply.wav

`call` needs no LiveKit server: the agent's session takes the file as a line's sound, 8 kHz in blocks of 20 ms, and the
file that it saves is what the caller hears.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence

import aiohttp
import numpy as np
import soundfile
import soxr
from livekit import rtc
from livekit.agents import Agent, AgentServer, AgentSession, JobContext, cli
from livekit.agents.voice.io import AudioInput, AudioOutput, AudioOutputCapabilities
from livekit_agent import realtime_model

LINE_RATE = 8000
FRAME = LINE_RATE // 50  # samples in 20 ms
BASE_URL = os.environ.get("OPENAI_BASE_URL", "http://localhost:8006/v1")
API_KEY = os.environ.get("OPENAI_API_KEY", "none")
INSTRUCTIONS = "You answer the phone. Be brief."
server = AgentServer()


@server.rtc_session()
async def answer(context: JobContext) -> None:
    """Talk to the caller in the room of a call."""
    session = AgentSession(llm=realtime_model(BASE_URL, API_KEY))
    await session.start(Agent(instructions=INSTRUCTIONS), room=context.room)


class Caller(AudioInput):
    """The caller's side of a line: a sound file in real time, then silence."""

    def __init__(self, path: str):
        super().__init__(label="caller")
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
        samples = soxr.resample(samples[:, 0], rate, LINE_RATE)
        self._pcm = (np.clip(samples, -1, 1) * 32767).round().astype("<i2")
        self._started_at = time.monotonic()
        self._n_frames = 0
        self.ended = asyncio.Event()

    async def __anext__(self) -> rtc.AudioFrame:
        start = self._n_frames * FRAME
        self._n_frames += 1
        await asyncio.sleep(max(0.0, self._started_at + self._n_frames * FRAME / LINE_RATE - time.monotonic()))
        part = self._pcm[start : start + FRAME]
        if len(part) < FRAME:
            self.ended.set()
            part = np.concatenate((part, np.zeros(FRAME - len(part), "<i2")))
        return rtc.AudioFrame(part.tobytes(), LINE_RATE, 1, FRAME)


class Earpiece(AudioOutput):
    """What the caller hears, s16le at 8 kHz."""

    def __init__(self, limit: float) -> None:
        super().__init__(label="earpiece", capabilities=AudioOutputCapabilities(pause=False), sample_rate=LINE_RATE)
        self.pcm = bytearray()
        self.heard_enough = asyncio.Event()
        self._limit = int(limit * LINE_RATE) * 2
        self._n_segment = 0

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        self.pcm += bytes(frame.data)
        self._n_segment += frame.samples_per_channel
        if len(self.pcm) >= self._limit:
            self.heard_enough.set()

    def flush(self) -> None:
        super().flush()
        self._finish(interrupted=False)

    def clear_buffer(self) -> None:
        self._finish(interrupted=True)

    def _finish(self, *, interrupted: bool) -> None:
        if self._n_segment:
            self.on_playback_finished(playback_position=self._n_segment / LINE_RATE, interrupted=interrupted)
            self._n_segment = 0


async def call(options: argparse.Namespace) -> bytes:
    """One call. Returns: what the caller heard, s16le at 8 kHz."""
    async with aiohttp.ClientSession() as http:
        session = AgentSession(llm=realtime_model(options.base_url, options.api_key, http))
        caller, earpiece = Caller(options.input), Earpiece(options.limit)
        session.input.audio, session.output.audio = caller, earpiece
        await session.start(Agent(instructions=INSTRUCTIONS))
        if options.ask:
            await caller.ended.wait()
            session.generate_reply()
        await earpiece.heard_enough.wait()
        await session.interrupt()
        await session.aclose()
    return bytes(earpiece.pcm)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="livekit_phone.py call", description=call.__doc__)
    parser.add_argument("input", help="sound file")
    parser.add_argument("--save", default="reply.wav", help="where the sound of the line goes")
    parser.add_argument("--limit", type=float, default=10, help="hang up after this much speech, in s")
    parser.add_argument("--ask", action="store_true", help="ask for an answer instead of waiting for one")
    parser.add_argument("--base-url", default=BASE_URL)
    parser.add_argument("--api-key", default=API_KEY)
    options = parser.parse_args(arguments)
    samples = np.frombuffer(asyncio.run(call(options)), "<i2")
    soundfile.write(options.save, samples, LINE_RATE)
    print(f"{len(samples) / LINE_RATE:.1f} s of sound in {options.save}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["call"]:
        main(sys.argv[2:])
    else:
        cli.run_app(server)
