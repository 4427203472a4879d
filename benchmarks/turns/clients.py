"""Users of the turns benchmark, in a process of their own: they ask in real time and note when answers sound.

`python -m benchmarks.turns.clients` reads a `TurnLoad` as JSON from standard input and writes one line of JSON: a
`SessionRun` for each session.
"""

import asyncio
import io
import json
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.playback import needed_delay
from benchmarks.turns.pieces import PieceEnds
from benchmarks.turns.questions import RATE, Conditions, UserSound, load_questions, user_sound
from clients.duplex import DuplexClient, connect
from clients.turn_wait import WorkerTimes
from clients.units import UnitEnd
from worker.protocol.messages import Error, Partial, Result, Spec
from worker.protocol.wire import SOUND_RATE

SPEC = Spec(partial_results=True, sound_in="pcm16", sound_out="pcm16")
PICTURE_SIDE = 448
HALF = RATE // 2  # from the begin of a unit to its picture


@dataclass(frozen=True)
class TurnLoad:
    """Sessions that ask questions of a gateway or a worker.

    Attributes:
        prefix: beginning of the sessions' names.
        n_questions: of each session.
        piece_ms: sound in one message.
        spoken_piece_ms: the same while the user speaks and right after that.
        pictures: whether each unit gets one, half a second before its second is full.
        config: settings of the sessions.
    """

    url: str
    sessions: int
    n_questions: int
    conditions: Conditions
    config: dict[str, Any]
    prefix: str
    piece_ms: int = 100
    spoken_piece_ms: int = 40
    pictures: bool = True
    seed: int = 0


@dataclass
class AnsweredTurn:
    """A turn of the model, as the client got it. Times in ms.

    Attributes:
        position: samples of the user's sound up to the piece that its first unit ran with.
        sound_at: arrival of its first sound, since the first sample of the user's sound; None without sound.
        early, shift_ms: of its first unit's result.
        model, vocoder: in the worker, as in `clients.turn_wait`; None without sound.
        playback: delay with which a player of the turn, as far as it has come, has no gap.
    """

    position: int
    sound_at: float | None
    early: bool
    shift_ms: float
    model: float | None
    vocoder: float | None
    playback: float = 0.0


@dataclass
class SessionRun:
    """What one session asked and got. n_late: units whose result came more than a second after its last piece."""

    questions: list[dict[str, Any]]
    turns: list[AnsweredTurn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    late_sends_ms: list[float] = field(default_factory=list)
    n_units: int = 0
    n_late: int = 0


class _User:
    """One session. begin: clock reading of the first sample of its sound."""

    def __init__(self, load: TurnLoad, number: int, together: asyncio.Barrier):
        self._load, self._number, self._together = load, number, together
        rng = np.random.default_rng((load.seed, number))
        self._sound: UserSound = user_sound(load_questions(), load.n_questions, load.conditions, rng)
        self._ends = PieceEnds(self._sound.samples, load.piece_ms, load.spoken_piece_ms)
        self._unit_end = UnitEnd()
        self._run = SessionRun([one._asdict() for one in self._sound.questions])
        self._picture_due = HALF
        self._sent: deque[tuple[int, float]] = deque()  # last sample of each open piece, and when it was sent
        self._first_sound: float | None = None  # of the unit in flight
        self._pieces: list[tuple[float, float]] = []  # arrival and length in s of the turn's sound
        self._is_speaking = False
        self._picture = _jpeg() if load.pictures else b""

    async def run(self) -> SessionRun:
        load, loop = self._load, asyncio.get_running_loop()
        async with connect(load.url, f"{load.prefix}{self._number}") as client:
            await client.prepare(config={**load.config, "seed": load.seed + self._number}, spec=SPEC)
            await self._together.wait()
            self._begin = loop.time() + self._number / load.sessions
            receiving = asyncio.create_task(self._receive(client))
            try:
                await self._send(client)
                await client.stop()
                await receiving
            finally:
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
        return self._run

    async def _send(self, client: DuplexClient) -> None:
        loop, samples, begin = asyncio.get_running_loop(), self._sound.samples, 0
        while (end := self._ends.next(begin, self._unit_end.rest)) is not None:
            due = self._begin + end / RATE
            await asyncio.sleep(due - loop.time())
            jpegs = []
            if self._picture and end > self._picture_due:
                jpegs, self._picture_due = [self._picture], end + 2 * HALF
            now = loop.time()
            self._run.late_sends_ms.append(1000 * (now - due))
            self._sent.append((end, now))
            self._unit_end.sent(end - begin)
            await client.send_unit(samples[begin:end], jpegs)
            begin = end

    async def _receive(self, client: DuplexClient) -> None:
        loop = asyncio.get_running_loop()
        async for message in client:
            now = loop.time()
            if isinstance(message, Partial | Result) and message.audio_data:
                self._first_sound = now if self._first_sound is None else self._first_sound
                self._pieces.append((now, len(message.audio_data.samples("audio_data")) / SOUND_RATE))
            if isinstance(message, Result):
                self._answered(message, now)
            elif isinstance(message, Error):
                self._sent.popleft()
                self._unit_end.refused()
                self._pieces.clear()
                self._run.errors.append(f"{message.code}: {message.error}")

    def _answered(self, result: Result, now: float) -> None:
        end, sent = self._sent.popleft()
        self._unit_end.answered(ends_unit=not result.incomplete)
        if result.incomplete:
            return
        self._picture_due = self._unit_end.edge + HALF
        self._run.n_units += 1
        self._run.n_late += now - sent > 1
        if not result.is_listen and not self._is_speaking:
            sound_at = None if self._first_sound is None else 1000 * (self._first_sound - self._begin)
            times, shift_ms = WorkerTimes.of(result) or (None, None), result.shift_ms or 0.0
            self._run.turns.append(AnsweredTurn(end, sound_at, bool(result.early), shift_ms, *times))
        self._is_speaking = not result.is_listen and not result.end_of_turn
        if self._run.turns and self._pieces:
            self._run.turns[-1].playback = 1000 * needed_delay(self._pieces)
        if not self._is_speaking:
            self._pieces.clear()
        self._first_sound = None


def _jpeg() -> bytes:
    """A picture of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (PICTURE_SIDE, PICTURE_SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=70)
    return file.getvalue()


async def ask(load: TurnLoad) -> list[SessionRun]:
    """Run all sessions. Raises: ClientError."""
    together = asyncio.Barrier(load.sessions)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_User(load, number, together).run()) for number in range(load.sessions)]
    return [task.result() for task in tasks]


def load_of(given: Mapping[str, Any]) -> TurnLoad:
    """The load from its JSON."""
    conditions = dict(given["conditions"])
    conditions["pauses_ms"] = tuple(conditions["pauses_ms"])
    return TurnLoad(**{**given, "conditions": Conditions(**conditions)})


def main() -> None:
    load = load_of(json.loads(sys.stdin.read()))
    print(json.dumps([asdict(run) for run in asyncio.run(ask(load))]), flush=True)


if __name__ == "__main__":
    main()
