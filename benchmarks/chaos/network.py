"""A TCP proxy on loopback whose connections can be slow, lossy, or discard all data."""

import asyncio
import random
from contextlib import suppress
from typing import Self

PIECE = 2**16
MIN_RETRANSMISSION_S = 0.2  # of TCP, on top of a round trip


class FaultyProxy:
    """`async with FaultyProxy(port) as proxy:` forwards connections to a port of this machine.

    With several ports, a connection goes to the first one that accepts it, as behind a load balancer.

    A loss is a stall of one direction, since TCP keeps the order: what was read at once waits for a retransmission
    timeout of 200 ms and a round trip, which doubles while the retransmission is lost too.

    Attributes:
        port: its own.
        delay_s: of each direction.
        loss: probability that a piece, or its retransmission, is lost.
    """

    def __init__(self, *targets: int, seed: int = 0):
        self.port, self.delay_s, self.loss = 0, 0.0, 0.0
        self._targets, self._dice = targets, random.Random(seed)
        self._swallowing: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        tasks = [*self._tasks, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def blackhole(self) -> None:
        """Discard the data of the present connections, in both directions. New connections work."""
        self._swallowing |= self._tasks

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for target in self._targets:
            with suppress(OSError):
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target)
                break
        else:
            writer.transport.abort()
            return
        ways = ((reader, there_writer), (there_reader, writer))
        tasks = [asyncio.create_task(self._forward(*way)) for way in ways]
        self._tasks.update(tasks)
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._tasks.difference_update(tasks)
            self._swallowing.difference_update(tasks)
            for one in (writer, there_writer):
                one.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: a piece leaves in order, `delay_s` after it came or later."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        own = asyncio.current_task()
        loop = asyncio.get_running_loop()

        async def write() -> None:
            while True:
                due, data = await pieces.get()
                await asyncio.sleep(due - loop.time())
                if own in self._swallowing:
                    continue
                if not data:
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()

        writing = asyncio.create_task(write())
        due = 0.0
        try:
            with suppress(OSError):
                while data := await reader.read(PIECE):
                    due = max(due, loop.time() + self._time_of_piece())
                    await pieces.put((due, data))
            await pieces.put((due, b""))
            await writing
        finally:
            writing.cancel()

    def _time_of_piece(self) -> float:
        seconds, timeout_s = self.delay_s, MIN_RETRANSMISSION_S + 2 * self.delay_s
        while self._dice.random() < self.loss:
            seconds += timeout_s
            timeout_s *= 2
        return seconds
