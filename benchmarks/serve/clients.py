"""Live clients in a separate process, so that they do not slow down the measured processes.

`python -m benchmarks.serve.clients` reads a `Load` as JSON from standard input. It writes a line `begin` when all
clients are prepared, `end` after the last result, and one line of JSON with the outcome of every unit.
"""

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import websockets

from benchmarks.worker.process import MAX_FRAME, ClientScript
from clients.address import TargetAddress
from worker.key_text import CLIENT_KEY_VARIABLE
from worker.protocol.gateway_messages import Queued, QueueDone, QueueUpdate
from worker.protocol.messages import (
    Partial,
    Prepare,
    Prepared,
    Result,
    ServerMessage,
    Spec,
    Stop,
    Stopped,
    read_server,
    write,
)

STAGES = ("wait", "sound", "first_sound")


@dataclass(frozen=True)
class Load:
    """Concurrent clients of `url`, a gateway or a worker. Each sends a unit every second, with its own phase.

    video: media file to send. sound: its encoding. partial: request partial results. config: session settings.
    """

    url: str
    sessions: int
    units: int
    video: str
    sound: str = "pcm16"
    partial: bool = True
    config: dict[str, Any] | None = None


class _Client:
    """One client. units: outcomes; times in ms."""

    def __init__(self, load: Load, number: int, chunks: list[str | bytes], together: asyncio.Barrier):
        self._load, self._number, self._chunks, self._together = load, number, chunks, together
        self._spec = Spec(partial_results=load.partial, sound_in=load.sound, sound_out=load.sound)
        self._sent: list[float] = []
        self.units: list[dict[str, Any]] = []

    async def run(self) -> None:
        load, address = self._load, TargetAddress.of(self._load.url, f"omni_bench_{self._number}")
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(CLIENT_KEY_VARIABLE)) else None
        async with websockets.connect(
            address.url, additional_headers=headers, max_size=MAX_FRAME, compression=None, proxy=None
        ) as socket:
            self._socket = socket
            while address.is_gateway and not isinstance(await self._receive(QueueDone, Queued, QueueUpdate), QueueDone):
                pass  # a gateway may still hold the slots of earlier clients
            config = {**(load.config or {}), "seed": self._number}
            await socket.send(write(Prepare(config=config, spec=self._spec)))
            await self._receive(Prepared)
            if await self._together.wait() == 0:
                print("begin", flush=True)
            sending = asyncio.create_task(self._send())
            for number in range(load.units):
                await self._hear(number)
            await sending
            if await self._together.wait() == 0:
                print("end", flush=True)
            await socket.send(write(Stop()))
            await self._receive(Stopped)

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time() + self._number / self._load.sessions
        for unit in range(self._load.units):
            chunk = self._chunks[(unit + 3 * self._number) % len(self._chunks)]
            await asyncio.sleep(begin + unit - loop.time())
            self._sent.append(loop.time())
            await self._socket.send(chunk)

    async def _hear(self, number: int) -> None:
        """Receive a unit's messages up to its result."""
        loop, first, n_pieces = asyncio.get_running_loop(), None, 0
        while True:
            data = await self._socket.recv()
            ms = 1000 * (loop.time() - self._sent[number])
            message = read_server(data, self._spec)
            if not isinstance(message, Partial | Result):
                raise RuntimeError(f"client {self._number}: expected a result, got {message}")
            if message.audio_data:
                first, n_pieces = ms if first is None else first, n_pieces + 1
            if isinstance(message, Result):
                break
        self.units.append(
            {
                "is_listen": message.is_listen,
                "reply": ms,
                "first": first,
                "n_pieces": n_pieces,
                "lag": message.lag_ms,
                "wall": message.wall_clock_ms,
                "stages": {name: message.stages.get(name) for name in STAGES},
            }
        )

    async def _receive(self, *kinds: type) -> ServerMessage:
        message = read_server(await self._socket.recv(), self._spec)
        if not isinstance(message, kinds):
            raise RuntimeError(f"client {self._number}: expected {kinds[0].__name__}, got {message}")
        return message


async def _run(load: Load) -> list[dict[str, Any]]:
    spec = Spec(sound_in=load.sound, sound_out=load.sound)
    script = ClientScript.of(Path(load.video), load.units, spec, {})
    chunks = [script.chunk(number) for number in range(len(script.sounds))]
    together = asyncio.Barrier(load.sessions)
    clients = [_Client(load, number, chunks, together) for number in range(load.sessions)]
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.run())
    return [unit for client in clients for unit in client.units]


def main() -> None:
    load = Load(**json.loads(sys.stdin.read()))
    print(json.dumps(asyncio.run(_run(load))), flush=True)


if __name__ == "__main__":
    main()
