"""Real processes that die, hang and come back while people talk through them; people who come and go by the hundred.

Two workers with a slot each, one gateway. The tests run in their order and leave both workers ready, all but the last.
"""

import asyncio
import json
import random
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import WebSocketException

from clients.duplex import DuplexClient, connect
from clients.errors import ConnectionLost
from tests.e2e.serving import Program, free_port, gateway
from tests.worker.http.client_scripts import ALOUD, QUIET, chunk, sound_of
from tests.worker.http.processes import WorkerProcess, running
from worker.protocol.messages import Error, Result

pytestmark = pytest.mark.alone
FLAGS = ("--max-sessions", "1", "--max-warmup-chunks", "5")  # the last two of which speak
TIMEOUT_S = 1.5  # service.worker_timeout_s
LOST_S = 1.0  # from a worker's death to its clients' goodbye
BACK_S = 5.0  # until everything is as it was
N_STORM = 200


class Town:
    """Everything that runs. workers: by their index at the gateway."""

    def __init__(self, folder: Path, port: int, workers: list[WorkerProcess]):
        self.folder, self.port, self.workers = folder, port, workers
        self.gateway: Program | None = None
        self.begin()

    def begin(self) -> None:
        """Start the gateway, again if there was one."""
        self._kept = gateway(
            self.folder,
            [worker.port for worker in self.workers],
            config={"service": {"worker_timeout_s": TIMEOUT_S}},
            port=self.port,
        )
        self.gateway = self._kept.__enter__()

    def end(self) -> None:
        self._kept.__exit__(None, None, None)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def ask(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return json.load(answer)

    def wait(self, fits: Callable[[dict[str, Any]], bool], what: str, timeout: float = BACK_S) -> dict[str, Any]:
        """Until /status fits."""
        until = time.monotonic() + timeout
        while not fits(status := self.ask("/status")):
            assert time.monotonic() < until, f"expected {what} within {timeout:g} s, got {status}\n{self.gateway.log}"
            time.sleep(0.05)
        return status

    def wait_quiet(self) -> None:
        """Nobody talks or waits, and every slot can be lent, here and at the workers."""
        slots = {"total": 2, "free": 2, "leased": 0}
        self.wait(lambda status: (status["slots"], status["connections"]) == (slots, 0), "two free slots, nobody there")
        status = self.ask("/status")
        assert (status["queue_length"], status["running_tasks"]) == (0, []), status
        for worker in self.workers:
            worker.wait_free(1, BACK_S)

    def worker_of(self, session_id: str) -> WorkerProcess:
        tasks = {task["session_id"]: task["worker_id"] for task in self.ask("/status")["running_tasks"]}
        return self.workers[int(tasks[session_id].removeprefix("worker_"))]


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folders = [tmp_path_factory.mktemp(f"worker_{index}") for index in range(2)]
    with (
        running(folders[0], *FLAGS, until=None) as one,
        running(folders[1], *FLAGS, until=None) as other,
    ):
        for worker in (one, other):
            worker.wait_state("IDLE")
        town = Town(tmp_path_factory.mktemp("gateway"), free_port(), [one, other])
        try:
            yield town
        finally:
            town.end()


@asynccontextmanager
async def talking(town: Town, name: str, config: dict[str, Any] = ALOUD) -> AsyncIterator[DuplexClient]:
    async with connect(town.url, name) as client:
        await client.prepare(config=config)
        yield client


async def unit(client: DuplexClient, number: int = 0) -> Result:
    await client.send_unit(sound_of(number))
    result = await anext(client)
    assert isinstance(result, Result), f"expected a result, got {result!r}"
    return result


async def goodbye(client: DuplexClient) -> float:
    """What a client hears of its worker's end: an error that says so, a proper close. Returns: when, monotonic s."""
    error = await anext(client)
    assert isinstance(error, Error) and error.code == "worker_lost", f"expected worker_lost, got {error!r}"
    with pytest.raises(ConnectionLost, match="close code 1011"):
        await anext(client)
    return time.monotonic()


def test_hundreds_come_and_go(town: Town) -> None:
    """In the queue, in the handshake, in a unit; with a goodbye and without."""
    dice = random.Random(1)

    async def visit(number: int) -> None:
        with suppress(WebSocketException, OSError, TimeoutError):
            async with asyncio.timeout(20), connect_socket(f"{town.url}/ws/duplex/omni_{number}", proxy=None) as socket:
                how = dice.randrange(4)
                if how:
                    await socket.send(json.dumps({"type": "prepare", "config": QUIET}))
                    await socket.send(json.dumps(chunk(number)))
                if how == 1:
                    await asyncio.wait_for(socket.recv(), 0.5)
                if how == 2:
                    await socket.send('{"type": "stop"}')
                if how == 3 or dice.random() < 0.3:
                    socket.transport.abort()

    async def storm() -> None:
        for begin in range(0, N_STORM, 40):
            await asyncio.gather(*(visit(number) for number in range(begin, begin + 40)))

    asyncio.run(storm())
    town.wait_quiet()


def test_a_worker_that_hangs(town: Town) -> None:
    """SIGSTOP: its client is told, the other one notices nothing, and afterwards it serves again."""

    async def both() -> None:
        async with talking(town, "omni_stays") as stays, talking(town, "omni_hangs") as hangs:
            await unit(stays)
            await unit(hangs)
            worker = town.worker_of("omni_hangs")
            worker.process.send_signal(signal.SIGSTOP)
            try:
                begin = time.monotonic()
                await hangs.send_unit(sound_of(1))
                seconds = await goodbye(hangs) - begin
                assert seconds < 2 * TIMEOUT_S + LOST_S, f"expected it after {TIMEOUT_S} s, got {seconds:.2f} s"
                await unit(stays, 1)
                assert town.ask("/readyz")["ready_workers"] == 1
            finally:
                worker.process.send_signal(signal.SIGCONT)
            await stays.stop()

    asyncio.run(both())
    town.wait_quiet()


def test_the_gateway_is_killed(town: Town) -> None:
    """Its clients lose their connections, the workers their sessions, and the next gateway finds everything free."""

    async def talk() -> None:
        async with talking(town, "omni_one") as one, talking(town, "omni_two") as two:
            await one.send_unit(sound_of(0))
            await two.send_unit(sound_of(0))
            town.gateway.process.kill()
            for client in (one, two):
                with pytest.raises(ConnectionLost):
                    while True:
                        await anext(client)

    asyncio.run(talk())
    for worker in town.workers:
        worker.wait_free(1, BACK_S)
    town.end()
    town.begin()
    town.wait_quiet()
    assert asyncio.run(_one_unit(town, "omni_again")).is_listen is False


async def _one_unit(town: Town, name: str) -> Result:
    async with talking(town, name) as client:
        result = await unit(client)
        await client.stop()
        return result


def test_a_worker_is_killed_in_a_unit(town: Town) -> None:
    """kill -9: its client is told within a second; who waits is served by the other worker as soon as that is free."""

    async def three() -> None:
        async with talking(town, "omni_stays") as stays, talking(town, "omni_dies") as dies:
            waiting = asyncio.create_task(_one_unit(town, "omni_waits"))
            await asyncio.to_thread(town.wait, lambda status: status["queue_length"] == 1, "one who waits")
            await unit(dies)
            await dies.send_unit(sound_of(1))
            worker = town.worker_of("omni_dies")
            begin = time.monotonic()
            worker.process.kill()
            seconds = await goodbye(dies) - begin
            assert seconds < LOST_S, f"expected the goodbye within {LOST_S} s, got {seconds:.2f} s"
            await unit(stays)
            await stays.stop()
            assert isinstance(await asyncio.wait_for(waiting, 10), Result)

    asyncio.run(three())
    status = town.wait(lambda status: status["slots"] == {"total": 1, "free": 1, "leased": 0}, "one slot, and it free")
    assert (status["queue_length"], status["offline_workers"]) == (0, 1), status
