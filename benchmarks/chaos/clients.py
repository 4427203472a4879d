"""Live sessions in real time that resume, and what each of them gets, unit by unit."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from clients.duplex import DuplexClient, connect
from clients.errors import ClientError
from clients.resumption import ConnectionChange
from worker.config.service import ROOT
from worker.loop.results import SOUND_RATE
from worker.media import read_units
from worker.protocol.gateway_messages import SessionMoved, SessionMoving
from worker.protocol.messages import Error, Result, Spec

VIDEO = ROOT / "assets/warmup.mp4"
# The embedded model with these settings speaks and listens in turns.
CONFIG = {
    "force_listen_count": 1,
    "length_penalty": 0.2,
    "listen_top_k": 60,
    "max_new_speak_tokens_per_chunk": 8,
    "drain_s": 1,
}
SPEC = Spec(sound_in="pcm16", sound_out="pcm16", resume=True)
RETRY_S = 0.25  # between attempts to begin again
DEADLINE_S = 1.0
PHASE = 0.25  # of the time between two units, by which those of the sessions are apart


class Fingerprint(NamedTuple):
    """What is the same in two runs of a unit with the same text ids. The speech draws other tokens after a move."""

    is_listen: bool
    text: str
    n_tokens: int
    context_rows: int


@dataclass
class Unit:
    """One unit. Times are monotonic s. n_begun: conversations begun before its own. sound_s: of its answer.

    end_of_turn: whether the speech of a turn ends with it.
    """

    number: int
    sent_at: float
    n_begun: int = 0
    answered_at: float | None = None
    fingerprint: Fingerprint | None = None
    sound_s: float = 0.0
    error: str = ""
    end_of_turn: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether it may still get a result."""
        return self.answered_at is None and not self.error

    @property
    def is_late(self) -> bool:
        return self.is_waiting or (self.answered_at is not None and self.answered_at - self.sent_at > DEADLINE_S)


class FaultSign(NamedTuple):
    """A sign of a fault. at: monotonic s."""

    at: float
    who: str
    text: str


@cache
def sounds() -> Sequence[np.ndarray]:
    """The seconds of the warm-up video, [16000] float32 each."""
    return [unit.sound for unit in read_units(VIDEO)]


@dataclass
class ChaosClient:
    """One session at real-time pace. If its conversation ends it begins another one, as a user does.

    Args:
        url: of the gateway, or of a proxy in front of it.
        name: id of the session.
        seed: of the session, and which second of the sound is its first.
        pace_s: between two units.
        config: settings of the session, except for the seed.

    Attributes:
        units: in the order of sending.
        notices: of the client.
        session_id: of the present conversation.
        moves: messages `session_moved`.
    """

    url: str
    name: str
    seed: int
    pace_s: float = 1.0
    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)
    units: list[Unit] = field(default_factory=list)
    notices: list[FaultSign] = field(default_factory=list)
    moves: list[SessionMoved] = field(default_factory=list)
    session_id: str = ""
    n_begun: int = 0
    prepared: asyncio.Event = field(default_factory=asyncio.Event)
    _is_over: bool = False
    _waiting: list[Unit] = field(default_factory=list)

    @property
    def n_answered(self) -> int:
        """Units with a result."""
        return sum(unit.fingerprint is not None for unit in self.units)

    def stop(self) -> None:
        """Send no further unit."""
        self._is_over = True

    async def run(self, begin: asyncio.Event) -> None:
        """Send units until `stop`. begin: set when all sessions send their first unit."""
        while not self._is_over:
            self.session_id = self.name if self.n_begun == 0 else f"{self.name}_{self.n_begun}"
            try:
                async with connect(self.url, self.session_id, on_connection=self._on_connection) as client:
                    await client.prepare(config={**self.config, "seed": self.seed}, spec=SPEC)
                    self.prepared.set()
                    await begin.wait()
                    await self._talk(client)
            except ClientError as error:
                self._note(f"conversation ended: {error}")
                for unit in self._waiting:
                    unit.error = unit.error or "the conversation ended"
                self._waiting.clear()
                if self.prepared.is_set():
                    self.n_begun += bool(self.units) and self.units[-1].n_begun == self.n_begun
                await asyncio.sleep(RETRY_S)

    async def _talk(self, client: DuplexClient) -> None:
        sending = asyncio.create_task(self._send(client))
        receiving = asyncio.create_task(self._receive(client))
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                with suppress(TimeoutError):
                    async with asyncio.timeout(30):
                        await client.stop()
                        await receiving
            else:
                receiving.result()
        finally:
            for task in (sending, receiving):
                task.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)

    async def _send(self, client: DuplexClient) -> None:
        """Send units in real time; after a break, those of the time since then are not sent."""
        seconds = sounds()
        await asyncio.sleep(PHASE * self.pace_s * (self.seed % 4))
        begun, n_sent = time.monotonic(), 0
        while not self._is_over:
            unit = Unit(len(self.units), time.monotonic(), self.n_begun)
            self.units.append(unit)
            self._waiting.append(unit)
            await client.send_unit(seconds[(n_sent + 3 * self.seed) % len(seconds)])
            n_sent += 1
            await asyncio.sleep(begun + n_sent * self.pace_s - time.monotonic())

    async def _receive(self, client: DuplexClient) -> None:
        async for message in client:
            if isinstance(message, SessionMoved):
                self.moves.append(message)
                self._note("session_moved")
            elif isinstance(message, SessionMoving):
                self._note(message.type)
            elif isinstance(message, Result | Error):
                self._answer(message)

    def _answer(self, message: Result | Error) -> None:
        if isinstance(message, Error):
            self._note(f"error {message.code}")
            if not self._waiting:
                return
        unit = self._waiting.pop(0)
        unit.answered_at = time.monotonic()
        if isinstance(message, Error):
            unit.error = str(message.code)
            return
        unit.fingerprint = Fingerprint(
            message.is_listen,
            message.text,
            message.n_tokens,
            message.kv_cache_length,
        )
        unit.end_of_turn = message.end_of_turn
        if message.audio_data is not None:
            unit.sound_s = len(message.audio_data.samples("audio_data")) / SOUND_RATE

    def _on_connection(self, change: ConnectionChange) -> None:
        self._note("connection replaced" if change.is_back else "connection lost")

    def _note(self, text: str) -> None:
        self.notices.append(FaultSign(time.monotonic(), "client", text))


class LiveGroup:
    """`async with LiveGroup(urls, name) as group:` has all sessions prepared, and they begin together.

    Args:
        urls: one for each session.
        name: prefix of their ids.
        pace_s: between two units of a session.
        config: settings of all sessions, except for the seed.
    """

    def __init__(self, urls: Sequence[str], name: str, pace_s: float = 1.0, config: Mapping[str, Any] = CONFIG):
        # The prefix is that of sessions without pictures.
        self.clients = [
            ChaosClient(url, f"adx_{name}_{number}", number, pace_s, config) for number, url in enumerate(urls)
        ]
        self._begin = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "LiveGroup":
        for client in self.clients:  # one after the other, so that each gets the same slot in every run
            self._tasks.append(asyncio.create_task(client.run(self._begin), name=client.name))
            await client.prepared.wait()
        self._begin.set()
        return self

    async def __aexit__(self, *_: Any) -> None:
        for client in self.clients:
            client.stop()
        await asyncio.wait(self._tasks, timeout=40)
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
