"""Stock sessions in a process of their own: real-time sound in, and what the client notices of each spoken unit.

`python -m benchmarks.doors.stock_load` reads a `StockLoad` as JSON from standard input. It writes a line `begin` when
all sessions are configured, `end` after the last sound, and one line of JSON with what the sessions saw. Imports the
standard library and a client, see `stock_session`.
"""

import asyncio
import json
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.doors.stock_session import CLIENT, Json, Loop, StockSession, stock_session

LAST_S = 1.5  # after the last sound, in which the last unit is answered
UNIT = re.compile(r"second (\d+)\.")
TRANSCRIPT, SOUND, DONE = "response.output_audio_transcript.delta", "response.output_audio.delta", "response.done"


@dataclass(frozen=True)
class StockLoad:
    """Sessions of the gateway on `port`.

    Attributes:
        sessions: of this process.
        first: number of the first one among all, `total`; each begins at its own offset within a second.
        seconds: of sound.
        chunk_ms: length of each append.
        sound: file with the sound that every client repeats, PCM16 at 24 kHz.
    """

    port: int
    sessions: int
    first: int
    total: int
    seconds: float
    chunk_ms: int
    sound: str


@dataclass
class Seen:
    """What one client noticed. reply_ms: from the last sound of a unit to its first event, for units that speak."""

    reply_ms: list[float] = field(default_factory=list)
    n_events: int = 0
    n_sound_bytes: int = 0
    n_responses: int = 0


async def _follow(session: StockSession, seen: Seen) -> None:
    while True:
        event = await session.receive()
        seen.n_events += 1
        kind = event["type"]
        if kind == TRANSCRIPT:
            for number in UNIT.findall(event["delta"]):
                with suppress(StopIteration):  # a unit that silence has completed, before its sound was sent
                    sent_at = session.sent_by(1000.0 * int(number))
                    seen.reply_ms.append(1000 * (time.monotonic() - sent_at))
        elif kind == SOUND:
            seen.n_sound_bytes += len(event["delta"]) * 3 // 4
        elif kind == DONE:
            seen.n_responses += 1


async def _run(load: StockLoad, number: int, sound: Loop, together: asyncio.Barrier) -> Seen:
    seen = Seen()
    async with stock_session(load.port) as session:
        await session.update(audio={"input": {"turn_detection": {"type": "semantic_vad"}}})
        if await together.wait() == 0:
            print("begin", flush=True)
        following = asyncio.create_task(_follow(session, seen))
        start_ms = len(sound.pcm16) // 48 * number // load.total
        chunks = sound.chunks(load.chunk_ms, start_ms, round(1000 * load.seconds / load.chunk_ms))
        await session.stream(chunks, load.chunk_ms, number / load.total)
        await asyncio.sleep(LAST_S)
        if following.done():
            following.result()
        following.cancel()
        if await together.wait() == 0:
            print("end", flush=True)
    return seen


async def _run_all(load: StockLoad) -> Json:
    sound = Loop(Path(load.sound).read_bytes())
    together = asyncio.Barrier(load.sessions)
    runs = [_run(load, load.first + number, sound, together) for number in range(load.sessions)]
    seen = await asyncio.gather(*runs)
    return {
        "client": CLIENT,
        "reply_ms": [ms for one in seen for ms in one.reply_ms],
        "n_events": sum(one.n_events for one in seen),
        "n_sound_bytes": sum(one.n_sound_bytes for one in seen),
        "n_responses": sum(one.n_responses for one in seen),
    }


def main() -> None:
    load = StockLoad(**json.loads(sys.stdin.readline()))
    print(json.dumps(asyncio.run(_run_all(load))), flush=True)


if __name__ == "__main__":
    main()
