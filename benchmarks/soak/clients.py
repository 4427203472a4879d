"""Clients of a soak: one that stays, and visits that come and go in every way that a session can begin and end."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from clients.duplex import DuplexClient, connect
from clients.errors import ConnectionLost, ServerError
from clients.half_duplex import connect_half_duplex, half_duplex_settings
from clients.socket_client import SocketClient
from worker.protocol.half_duplex_messages import TurnDone
from worker.protocol.messages import Error, Result, Spec

RATE = 16_000
PERIOD, SPEAKING = 20, range(3, 8)  # units of a period, those that must speak
STAYING_WINDOW = {"mode": "basic", "high_tokens": 400, "low_tokens": 300}
VISIT_WINDOW = {"mode": "context", "max_units": 8, "previous_max_tokens": 60}
PROMPT = "You are a helpful assistant."
MAX_WAIT_S = 60.0


@dataclass(frozen=True)
class UnitTime:
    """A unit as its client measured it. at: seconds of the monotonic clock. stays: of the session that stays."""

    at: float
    ms: float
    spoken: bool
    stays: bool


class SoakClients:
    """The clients of one soak.

    Args:
        url: ws:// address of the gateway.
        seconds: length of one visit, about.

    Attributes:
        units: finished units; taken out by the sampler.
        counts: visits that ended as expected, by kind.
        faults: what went wrong, in words.
    """

    def __init__(self, url: str, seconds: int):
        self._url, self._seconds = url, seconds
        self.units: deque[UnitTime] = deque()
        self.counts: dict[str, int] = {}
        self.faults: list[str] = []
        rng = np.random.default_rng(0)
        self._sound = (0.1 * rng.standard_normal((32, RATE))).astype(np.float32)
        self.kinds: dict[str, Callable[[int], Awaitable[None]]] = {
            "voice": self._voice,
            "resumed": self._resumed,
            "half_duplex": self._half_duplex,
            "chat": self._chat,
            "abandoned": self._abandoned,
            "restarts": self._restarts,
            "dropped": self._dropped,
            "queued": self._queued,
        }

    async def stay(self, until: float) -> None:
        """One session up to a time of the monotonic clock; begins again where it is lost, which is a fault."""
        while time.monotonic() < until:
            try:
                async with connect(self._url, "soak_stays") as client:
                    config = {"window": STAYING_WINDOW, "force_listen_count": 0, "seed": 1}
                    await client.prepare(PROMPT, config=config, spec=Spec(sound_in="pcm16", sound_out="pcm16"))
                    await self._units(client, 10**9, until=until, stays=True)
                    await client.stop()
            except Exception as error:
                self.faults.append(f"the session that stays: {error}")
                await asyncio.sleep(1)

    async def visits(self, until: float, first: int) -> None:
        """Visits one after another, of each kind in turn, beginning with the `first`."""
        number = first
        while time.monotonic() < until:
            await self.visit(list(self.kinds)[number % len(self.kinds)], number)
            number += 1

    async def visit(self, kind: str, number: int) -> None:
        """One visit."""
        try:
            async with asyncio.timeout(3 * self._seconds + 2 * MAX_WAIT_S):
                await self.kinds[kind](number)
            self.counts[kind] = self.counts.get(kind, 0) + 1
        except Exception as error:  # any end but the expected one is a finding, and the run goes on
            self.faults.append(f"{kind} {number}: {type(error).__name__}: {error}")
            await asyncio.sleep(1)

    # --- kinds of visits ----------------------------------------------------------------------

    async def _voice(self, number: int) -> None:
        """A duplex session with a voice of its own."""
        async with connect(self._url, f"soak_voice_{number}") as client:
            await self._prepare(client, number, voice=0.3 * np.tile(self._sound[number % 32], 3))
            await self._units(client, self._seconds)
            await client.stop()

    async def _resumed(self, number: int) -> None:
        """A session whose connection is cut twice, and that goes on each time."""
        async with connect(self._url, f"soak_resumed_{number}") as client:
            await self._prepare(client, number, resume=True)
            for _ in range(2):
                await self._units(client, max(2, self._seconds // 3), cut=True)
            await self._units(client, max(2, self._seconds // 3))
            await client.stop()

    async def _half_duplex(self, number: int) -> None:
        """Turns in half duplex."""
        settings = half_duplex_settings({"generation": {"max_new_tokens": 12}})
        async with connect_half_duplex(self._url, f"soak_half_{number}") as client:
            await client.prepare((PROMPT,), settings)
            n_answers = 0

            async def listen() -> None:
                nonlocal n_answers
                async for message in client:
                    n_answers += isinstance(message, TurnDone)

            listening = asyncio.create_task(listen())
            for half in range(2 * self._seconds):
                loud = half % 12 < 6
                await client.send_sound(self._sound[half % 32][: RATE // 2] * (3.0 if loud else 0.0))
                await asyncio.sleep(0.5)
            await client.stop()
            await listening

    async def _chat(self, number: int) -> None:
        """Chat completions over HTTP, whole and streamed, one of them left."""
        base = self._url.replace("ws", "http", 1)
        body: dict[str, Any] = {
            "model": "default",
            "max_tokens": 24,
            "messages": [{"role": "user", "content": "Hello"}],
        }
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=MAX_WAIT_S) as http:
            models = (await http.get("/v1/models")).raise_for_status().json()["data"]
            body["model"] = models[0]["id"]
            (await http.post("/v1/chat/completions", json=body)).raise_for_status()
            for read_all in (True, False):
                async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
                    answer.raise_for_status()
                    async for _ in answer.aiter_lines():
                        if not read_all:
                            break
        await asyncio.sleep(2)

    async def _abandoned(self, number: int) -> None:
        """A session that may be resumed, and whose client never comes back: its slot is free after the grace."""
        async with connect(self._url, f"soak_abandoned_{number}") as client:
            grace_s = await self._prepare(client, number, resume=True)
            await self._units(client, max(2, self._seconds // 4))
            client._reading.cancel()  # it would open another connection
            _cut(client)
            with suppress(asyncio.CancelledError):
                await client._reading
        await asyncio.sleep(grace_s + 2)

    async def _restarts(self, number: int) -> None:
        """A session that is prepared again, interrupted, paused, adjusted and given a text."""
        async with connect(self._url, f"soak_restarts_{number}") as client:
            for _ in range(2):
                await self._prepare(client, number)
                await self._units(client, max(2, self._seconds // 4))
                await client.insert_text("A text.")
                await client.interrupt()
                await client.pause()
                await client.resume()
                await client.adjust(config={"temperature": 0.5})
            await client.stop()

    async def _dropped(self, number: int) -> None:
        """A session that cannot be resumed and whose connection is cut."""
        async with connect(self._url, f"soak_dropped_{number}") as client:
            await self._prepare(client, number)
            await self._units(client, max(2, self._seconds // 4))
            _cut(client)
            with suppress(ConnectionLost):
                async for _ in client:
                    pass

    async def _queued(self, number: int) -> None:
        """A session, and two clients that wait for a slot meanwhile: one gets it, the other leaves the queue."""
        first = asyncio.create_task(self._voice(number))
        await asyncio.sleep(2)
        with suppress(TimeoutError):
            async with asyncio.timeout(3), connect(self._url, f"soak_leaves_{number}"):
                pass  # with free slots it gets one
        await self._dropped(number)
        await first

    # --- parts --------------------------------------------------------------------------------

    async def _prepare(
        self, client: DuplexClient, number: int, *, voice: np.ndarray | None = None, resume: bool = False
    ) -> float:
        """Returns: the time for which the session outlives its connection, in s."""
        spec = Spec(partial_results=True, sound_in="pcm16", sound_out="pcm16", resume=resume)
        config = {"window": VISIT_WINDOW, "force_listen_count": 0, "seed": number}
        prepared = await client.prepare(PROMPT, ref_audio=voice, config=config, spec=spec)
        return prepared.resume_grace_s or 0.0

    async def _units(
        self, client: DuplexClient, n: int, *, until: float = float("inf"), stays: bool = False, cut: bool = False
    ) -> None:
        """Units in real time, one result each. cut: whether the connection is cut while the last one runs."""
        begun = time.monotonic()
        for number in range(n):
            await asyncio.sleep(max(0.0, begun + number - time.monotonic()))
            if time.monotonic() >= until:
                break
            speaks, sent_at = number % PERIOD in SPEAKING, time.monotonic()
            await client.send_unit(self._sound[(7 * number) % 32], force_speak=speaks, force_listen=not speaks)
            if cut and number == n - 1:
                _cut(client)
            async for message in client:
                if isinstance(message, Error):
                    raise ServerError("audio_chunk", str(message.code), message.error)
                if isinstance(message, Result):
                    break
            else:
                raise ConnectionLost(self._url, expected="a result", got="the end of the session")
            if not cut:
                now = time.monotonic()
                self.units.append(UnitTime(now, 1000 * (now - sent_at), not message.is_listen, stays))


def _cut(client: SocketClient[Any]) -> None:
    """End the connection without a close frame, as a lost network does."""
    client._socket.transport.abort()
