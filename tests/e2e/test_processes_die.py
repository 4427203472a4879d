"""Real processes that are killed, hang and restart during conversations, and hundreds of clients that disconnect.

Two workers with one slot each, and one gateway. The tests run in this order, and each but the last leaves both workers
ready. After a test that ended a process, the next one, or its repetition, starts all processes again.
"""

import asyncio
import json
import random
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import WebSocketException

from clients.duplex import DuplexClient, connect
from clients.errors import ConnectionLost
from tests.e2e.serving import ServerProcess, free_port, gateway
from tests.worker.http.client_scripts import ALOUD, QUIET, TURNS_QUIET, assert_same_results, chunk, sound_of
from tests.worker.http.processes import WorkerProcess, running
from worker.protocol.messages import Error, Result, Spec

pytestmark = pytest.mark.alone
FLAGS = ("--max-sessions", "1", "--max-warmup-chunks", "5")  # the model speaks in the last two
TIMEOUT_S = 1.5  # service.worker_timeout_s
DRAIN_S, HANDED_S = 60.0, 15.0  # until a gateway ends; without waiting for sessions to end
LOST_S = 1.0  # from the end of a worker to the close of its clients
BACK_S = 5.0  # until all slots are free again
TALK_S = 240.0  # of one test on a loaded machine; exceeding it means a hang
N_CLIENTS = 200


class Cluster:
    """All processes. workers: in the order of the gateway."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self._running_workers = ExitStack()
        self.workers: list[WorkerProcess] = []
        self.gateway: ServerProcess | None = None

    def start(self) -> None:
        for index in range(2):
            folder = self.folder / f"worker_{index}"
            folder.mkdir(exist_ok=True)
            self.workers.append(self._running_workers.enter_context(running(folder, *FLAGS, until=None)))
        for worker in self.workers:
            worker.wait_state("IDLE")
        self.start_gateway()

    def stop(self) -> None:
        if self.gateway is not None:
            self.stop_gateway()
        self._running_workers.close()
        self.workers.clear()

    @property
    def runs(self) -> bool:
        """Whether all processes have been started and none has ended."""
        return self.gateway is not None and all(one.process.poll() is None for one in (self.gateway, *self.workers))

    def start_gateway(self) -> None:
        """Start the gateway, for the first time or again."""
        self._running = gateway(
            self.folder,
            [worker.port for worker in self.workers],
            config={"service": {"worker_timeout_s": TIMEOUT_S}},
            port=self.port,
        )
        self.gateway = self._running.__enter__()

    def stop_gateway(self) -> None:
        self._running.__exit__(None, None, None)
        self.gateway = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def ask(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return json.load(answer)

    def wait(self, holds: Callable[[dict[str, Any]], bool], what: str, timeout: float = BACK_S) -> dict[str, Any]:
        """Wait until /status meets a condition."""
        until = time.monotonic() + timeout
        while not holds(status := self.ask("/status")):
            assert time.monotonic() < until, f"expected {what} within {timeout:g} s, got {status}\n{self.gateway.log}"
            time.sleep(0.05)
        return status

    def wait_idle(self) -> None:
        """Wait until there is no connection and no ticket, and every slot is free at the gateway and at the workers."""
        slots = {"total": 2, "free": 2, "leased": 0}
        self.wait(
            lambda status: (status["slots"], status["connections"]) == (slots, 0), "two free slots and no connection"
        )
        status = self.ask("/status")
        assert (status["queue_length"], status["running_tasks"]) == (0, []), status
        for worker in self.workers:
            worker.wait_free(1, BACK_S)

    def worker_of(self, session_id: str) -> WorkerProcess:
        tasks = {task["session_id"]: task["worker_id"] for task in self.ask("/status")["running_tasks"]}
        return self.workers[int(tasks[session_id].removeprefix("worker_"))]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(processes: Cluster) -> Cluster:
    """The processes, all of them running."""
    if not processes.runs:
        processes.stop()
        processes.start()
    return processes


@asynccontextmanager
async def talking(cluster: Cluster, name: str, config: dict[str, Any] = ALOUD) -> AsyncIterator[DuplexClient]:
    async with connect(cluster.url, name) as client:
        await client.prepare(config=config)
        yield client


async def unit(client: DuplexClient, number: int = 0) -> Result:
    await client.send_unit(sound_of(number))
    result = await anext(client)
    assert isinstance(result, Result), f"expected a result, got {result!r}"
    return result


async def receive_worker_lost(client: DuplexClient) -> float:
    """Expect `worker_lost` and close code 1011. Returns: the time of arrival, monotonic s."""
    error = await anext(client)
    assert isinstance(error, Error) and error.code == "worker_lost", f"expected worker_lost, got {error!r}"
    with pytest.raises(ConnectionLost, match="close code 1011"):
        await anext(client)
    return time.monotonic()


def test_hundreds_of_clients_disconnect(cluster: Cluster) -> None:
    """They disconnect in the queue, in the handshake and in a unit, with and without a close frame."""
    dice = random.Random(1)

    async def one_client(number: int) -> None:
        with suppress(WebSocketException, OSError, TimeoutError):
            async with (
                asyncio.timeout(20),
                connect_socket(f"{cluster.url}/ws/duplex/omni_{number}", proxy=None) as socket,
            ):
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

    async def all_clients() -> None:
        for begin in range(0, N_CLIENTS, 40):
            await asyncio.gather(*(one_client(number) for number in range(begin, begin + 40)))

    asyncio.run(all_clients())
    cluster.wait_idle()


def test_hanging_worker_loses_only_its_sessions(cluster: Cluster) -> None:
    """SIGSTOP: its client gets an error, the other session continues, and after SIGCONT the worker serves again."""

    async def both() -> None:
        async with talking(cluster, "omni_stays") as stays, talking(cluster, "omni_hangs") as hangs:
            await unit(stays)
            await unit(hangs)
            worker = cluster.worker_of("omni_hangs")
            worker.process.send_signal(signal.SIGSTOP)
            try:
                begin = time.monotonic()
                await hangs.send_unit(sound_of(1))
                seconds = await receive_worker_lost(hangs) - begin
                assert seconds < 2 * TIMEOUT_S + LOST_S, f"expected it after {TIMEOUT_S} s, got {seconds:.2f} s"
                await unit(stays, 1)
                assert cluster.ask("/readyz")["ready_workers"] == 1
            finally:
                worker.process.send_signal(signal.SIGCONT)
            await stays.stop()

    asyncio.run(both())
    cluster.wait_idle()


def test_killed_gateway_frees_all_slots(cluster: Cluster) -> None:
    """Clients lose their connections, workers end their sessions, and the next gateway finds all slots free."""

    async def talk() -> None:
        async with talking(cluster, "omni_one") as one, talking(cluster, "omni_two") as two:
            await one.send_unit(sound_of(0))
            await two.send_unit(sound_of(0))
            cluster.gateway.process.kill()
            for client in (one, two):
                with pytest.raises(ConnectionLost):
                    while True:
                        await anext(client)

    asyncio.run(talk())
    for worker in cluster.workers:
        worker.wait_free(1, BACK_S)
    cluster.stop_gateway()
    cluster.start_gateway()
    cluster.wait_idle()
    assert asyncio.run(_one_unit(cluster, "omni_again")).is_listen is False


async def restart(cluster: Cluster, number: signal.Signals = signal.SIGKILL) -> None:
    """End the gateway with a signal and start another one."""
    begin = time.monotonic()
    cluster.gateway.process.send_signal(number)
    status = await asyncio.to_thread(cluster.gateway.process.wait, DRAIN_S)
    seconds = time.monotonic() - begin
    assert number == signal.SIGKILL or (status == 0 and seconds < HANDED_S), f"got status {status} in {seconds:.1f} s"
    await asyncio.to_thread(cluster.stop_gateway)
    await asyncio.to_thread(cluster.start_gateway)


def test_sessions_outlive_their_gateway(cluster: Cluster) -> None:
    """The workers keep them if it is killed, and if it drains; the next gateway takes them over with their tokens.

    It loses and repeats nothing.

    It has what rebuilds them too, so that one goes on with the other worker when its own hangs.
    """

    async def undisturbed() -> list[Result]:
        async with connect(cluster.url, "adx_alone") as client:
            await client.prepare(config=TURNS_QUIET)
            results = [await unit(client, number) for number in range(8)]
            await client.stop()
            return results

    async def disturbed(name: str, reached: asyncio.Barrier) -> list[Result]:
        async with connect(cluster.url, name) as client:
            await client.prepare(config=TURNS_QUIET, spec=Spec(resume=True))
            results = []
            for number in range(6):
                await client.send_unit(sound_of(number))
                if number in (2, 4):
                    await reached.wait()  # the answer is on its way
                    await reached.wait()  # the next gateway runs
                results.append(await anext(client))
            if name == "adx_one":
                results += await moved(client)
            await client.stop()
            return results

    async def moved(client: DuplexClient) -> list[Result]:
        """Two more units, after the other session has left its worker and this one's hangs."""
        await asyncio.to_thread(cluster.wait, lambda status: status["slots"]["leased"] == 1, "one session")
        worker = cluster.worker_of("adx_one")
        worker.process.send_signal(signal.SIGSTOP)
        try:
            await client.send_unit(sound_of(6))
            moving, moved = await anext(client), await anext(client)
            assert (moving.type, moved.type) == ("session_moving", "session_moved"), (moving, moved)
            assert (moved.restored, moved.omitted, moved.dropped) == (6, 0, 0), moved
            return [await anext(client), await unit(client, 7)]
        finally:
            worker.process.send_signal(signal.SIGCONT)

    async def both() -> list[list[Result]]:
        reached = asyncio.Barrier(3)
        talks = [asyncio.create_task(disturbed(name, reached)) for name in ("adx_one", "adx_two")]
        async with asyncio.timeout(TALK_S):
            for number in (signal.SIGKILL, signal.SIGTERM):
                await reached.wait()
                await restart(cluster, number)
                await reached.wait()
            return await asyncio.gather(*talks)

    expected = asyncio.run(undisturbed())
    for results in asyncio.run(both()):
        assert_same_results(results, expected[: len(results)], "with two lost gateways")
    cluster.wait_idle()


def test_a_kept_session_is_taken_with_its_newest_token_only(cluster: Cluster) -> None:
    async def answer(token: str, received: int) -> tuple[Any, dict[str, Any]]:
        socket = await connect_socket(f"{cluster.url}/ws/duplex/adx_one?resume=1", proxy=None, ping_interval=None)
        await socket.send(json.dumps({"type": "resume_session", "token": token, "received": received}))
        return socket, json.loads(await socket.recv())

    async def refused(token: str) -> None:
        socket, message = await answer(token, 1)
        assert message["code"] == "resume_refused", f"expected a refusal, got {message}"
        await socket.wait_closed()
        assert socket.close_code == 1008, f"expected 1008, got {socket.close_code}"

    async def story() -> None:
        async with connect_socket(f"{cluster.url}/ws/duplex/adx_one", proxy=None) as socket:
            await socket.send(json.dumps({"type": "prepare", "config": QUIET, "spec": {"resume": True}}))
            while (prepared := json.loads(await socket.recv()))["type"] != "prepared":
                pass
            await socket.send(json.dumps(chunk(0)))
            assert json.loads(await socket.recv())["type"] == "result"
            await restart(cluster)
        first = prepared["resume_token"]
        await refused("x" * len(first))
        second, resumed = await answer(first, 1)
        assert (resumed["received"], resumed["next"], resumed["lost"]) == (2, 2, 0), resumed
        assert json.loads(await second.recv())["current_time"] == 1, "expected the result that the client lacks"
        await second.send(json.dumps(chunk(1)))  # shows that the client has the new token
        assert json.loads(await second.recv())["current_time"] == 2
        await restart(cluster)
        await refused(first)
        third, resumed = await answer(resumed["resume_token"], 3)
        assert (resumed["received"], resumed["next"], resumed["lost"]) == (3, 4, 0), resumed
        await third.send(json.dumps({"type": "stop"}))
        assert json.loads(await third.recv())["type"] == "stopped"
        await refused(resumed["resume_token"])

    asyncio.run(asyncio.wait_for(story(), TALK_S))
    cluster.wait_idle()


async def _one_unit(cluster: Cluster, name: str) -> Result:
    async with talking(cluster, name) as client:
        result = await unit(client)
        await client.stop()
        return result


def test_killed_worker_loses_only_its_sessions(cluster: Cluster) -> None:
    """kill -9: its client gets an error within a second, and a waiting client gets the other worker's slot."""

    async def three() -> None:
        async with talking(cluster, "omni_stays") as stays, talking(cluster, "omni_dies") as dies:
            waiting = asyncio.create_task(_one_unit(cluster, "omni_waits"))
            await asyncio.to_thread(cluster.wait, lambda status: status["queue_length"] == 1, "one waiting client")
            await unit(dies)
            await dies.send_unit(sound_of(1))
            worker = cluster.worker_of("omni_dies")
            begin = time.monotonic()
            worker.process.kill()
            seconds = await receive_worker_lost(dies) - begin
            assert seconds < LOST_S, f"expected the error within {LOST_S} s, got {seconds:.2f} s"
            await unit(stays)
            await stays.stop()
            assert isinstance(await asyncio.wait_for(waiting, 10), Result)

    asyncio.run(three())
    status = cluster.wait(
        lambda status: status["slots"] == {"total": 1, "free": 1, "leased": 0}, "one slot, which is free"
    )
    assert (status["queue_length"], status["offline_workers"]) == (0, 1), status
