"""Synthetic sessions of a fleet, in one process of their own.

`python -m benchmarks.fleet.clients` reads a `FleetLoad` as JSON from standard input. It writes one line at the end of
each phase, whose name is in `PHASES`, and one line of JSON with a `FleetOutcome`. Sound is silence; it is sent and
received as in a conversation, and not decoded.
"""

import asyncio
import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import websockets

from server.serving import raise_file_limit
from worker.protocol.messages import AudioChunk, Prepare, Spec, Stop, write
from worker.protocol.wire import Sound, read_header

# start: nothing is connected. begin: after `idle_s` of that. admitted: every slot has a session. idle: after `idle_s`
# without a message. served: after the units. queued: the waiting clients wait. released: all of them had a slot.
PHASES = ("start", "begin", "admitted", "idle", "served", "queued", "released")
SPEC = Spec(sound_in="pcm16", sound_out="pcm16")
UNIT_SAMPLES = 16_000
ANSWER_S = 120.0
MAX_FRAME = 2**22


@dataclass(frozen=True)
class FleetLoad:
    """What the clients do.

    urls: of the gateways, used in turns. sessions: as many as there are slots. waiting: further clients. units: of each
    session. interval_s: seconds between two units of a session. idle_s: of the phases without messages. at_once:
    handshakes in progress at a time.
    """

    urls: tuple[str, ...]
    sessions: int
    waiting: int
    units: int
    interval_s: float
    idle_s: float
    at_once: int


@dataclass
class FleetOutcome:
    """What the clients measured; times in ms.

    admission: from the start of the handshake to the slot. prepared: from there to the answer to `prepare`. replies: of
    units. waits: from the stop of a session to the slot of a waiting client. order: numbers of waiting clients, by
    arrival, in the order in which they got their slots.
    """

    admission: list[float] = field(default_factory=list)
    prepared: list[float] = field(default_factory=list)
    replies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    admission_wall_s: float = 0.0


class _Session:
    """One client's connection."""

    def __init__(self, socket: websockets.ClientConnection):
        self._socket = socket

    @classmethod
    async def open(cls, url: str, name: str) -> "_Session":
        socket = await websockets.connect(
            f"{url}/ws/duplex/{name}",
            max_size=MAX_FRAME,
            compression=None,
            proxy=None,
            ping_interval=None,
            open_timeout=ANSWER_S,
        )
        return cls(socket)

    async def until(self, kind: str, seconds: float | None = ANSWER_S) -> None:
        """Wait for a message of this type. Raises: RuntimeError for an error message; TimeoutError."""
        async with asyncio.timeout(seconds):
            while True:
                data = await self._socket.recv()
                header = json.loads(data) if isinstance(data, str) else read_header(data)
                if header["type"] == kind:
                    return
                if header["type"] == "error":
                    raise RuntimeError(f"clients: expected {kind}, got {header}")

    async def send(self, message: str | bytes) -> None:
        await self._socket.send(message)

    async def stop(self) -> None:
        await self._socket.send(write(Stop()))
        await self.until("stopped")
        with suppress(websockets.ConnectionClosed):
            await self._socket.recv()


async def run(load: FleetLoad) -> FleetOutcome:
    """Run all phases."""
    outcome = FleetOutcome()
    chunk = write(AudioChunk(audio_base64=Sound(bytes(2 * UNIT_SAMPLES), "pcm16")), SPEC)
    _phase("start")
    await asyncio.sleep(load.idle_s)
    _phase("begin")
    sessions = await _admit(load, outcome)
    _phase("admitted")
    await asyncio.sleep(load.idle_s)
    _phase("idle")
    async with asyncio.TaskGroup() as group:
        for number, session in enumerate(sessions):
            group.create_task(_talk(session, load, load.interval_s * number / load.sessions, chunk, outcome))
    _phase("served")
    got_slot: asyncio.Queue[int] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        waiting = []
        for number in range(load.waiting):  # one after the other, so that their order is known
            session = await _Session.open(load.urls[number % len(load.urls)], f"adx_waiting_{number}")
            await session.until("queued")
            group.create_task(_wait_for_slot(number, session, got_slot))
            waiting.append(session)
        _phase("queued")
        # Each session ends when the last freed slot has a waiting client, which keeps it.
        for session in sessions[: load.waiting]:
            begun = time.perf_counter()
            await session.stop()
            outcome.order.append(await got_slot.get())
            outcome.waits.append(1000 * (time.perf_counter() - begun))
    async with asyncio.TaskGroup() as group:
        for session in (*sessions[load.waiting :], *waiting):
            group.create_task(session.stop())
    _phase("released")
    return outcome


async def _admit(load: FleetLoad, outcome: FleetOutcome) -> list[_Session]:
    at_once = asyncio.Semaphore(load.at_once)

    async def one(number: int) -> _Session:
        async with at_once:
            begun = time.perf_counter()
            session = await _Session.open(load.urls[number % len(load.urls)], f"adx_fleet_{number}")
            await session.until("queue_done")
            admitted = time.perf_counter()
            await session.send(write(Prepare(spec=SPEC)))
            await session.until("prepared")
            outcome.admission.append(1000 * (admitted - begun))
            outcome.prepared.append(1000 * (time.perf_counter() - admitted))
            return session

    begun = time.perf_counter()
    sessions = await asyncio.gather(*(one(number) for number in range(load.sessions)))
    outcome.admission_wall_s = time.perf_counter() - begun
    return sessions


async def _talk(session: _Session, load: FleetLoad, phase_s: float, chunk: str | bytes, outcome: FleetOutcome) -> None:
    """Send units at their times; a late answer delays the next unit of this session only."""
    loop = asyncio.get_running_loop()
    begin = loop.time() + phase_s
    for unit in range(load.units):
        await asyncio.sleep(max(0.0, begin + unit * load.interval_s - loop.time()))
        sent = time.perf_counter()
        await session.send(chunk)
        await session.until("result")
        outcome.replies.append(1000 * (time.perf_counter() - sent))


async def _wait_for_slot(number: int, session: _Session, got_slot: "asyncio.Queue[int]") -> None:
    await session.until("queue_done", None)
    got_slot.put_nowait(number)


def _phase(name: str) -> None:
    print(name, flush=True)


def main() -> None:
    raise_file_limit()
    given = json.loads(sys.stdin.readline())
    load = FleetLoad(**{**given, "urls": tuple(given["urls"])})
    print(json.dumps(asdict(asyncio.run(run(load)))), flush=True)


if __name__ == "__main__":
    main()
