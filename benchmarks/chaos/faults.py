"""The faults: how each is caused, which sessions it hits, and how long the others are watched."""

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import websockets

from benchmarks.chaos.clients import FaultSign, LiveGroup
from benchmarks.chaos.figures import FaultRow
from benchmarks.chaos.network import FaultyProxy
from benchmarks.chaos.system import N_WORKERS, System

BEFORE_S = 5.0  # of conversation before a fault
NETWORK_S, QUIET_S = 20.0, 5.0
MAX_UNREAD_S, MAX_GONE_S = 60.0, 90.0
LEAK_BYTES = 3 * 10**9
CLOCK_JUMP_S = 7200.0
ALL = ("gateway", "worker_0", "worker_1")
ALOUD = {"force_listen_count": 0, "listen_prob_scale": 0.01, "max_new_speak_tokens_per_chunk": 4}


@dataclass
class Scene:
    """Four live sessions, two on each worker, and a fault.

    proxy: in front of the gateway, for the first two sessions of a fault of the network. hit: numbers of the sessions
    that the fault hits.
    """

    system: System
    group: LiveGroup
    proxy: FaultyProxy
    row: FaultRow
    hit: set[int] = field(default_factory=set)

    async def hit_worker(self) -> str:
        """Let the fault hit the worker of the first session. Returns: its stem."""
        names = [client.session_id for client in self.group.clients]
        workers = await self.system.workers_of(*names)
        number = workers[names[0]]
        self.hit = {index for index, name in enumerate(names) if workers.get(name) == number}
        return f"worker_{number}"

    def begin(self, at: float | None = None) -> None:
        """The fault begins. at: monotonic s; None: now."""
        self.row.at = time.monotonic() if at is None else at

    async def until_replaced(self, stem: str, pid: int) -> None:
        """Wait until another process serves in the place of this one, and count the time."""
        await self.system.wait_replaced(stem, pid)
        ready = await self.system.wait_for(
            lambda answer: answer.get("ready_workers") == N_WORKERS, "/readyz", f"{N_WORKERS} workers"
        )
        self.row.back_s = ready - self.row.at

    def notice(self, who: str, text: str) -> None:
        self.row.notices.append(FaultSign(time.monotonic(), who, text))


Cause = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """One row of the table. disk: the folder whose file system it needs. is_network: two sessions use the proxy."""

    name: str
    what: str
    cause: Cause
    disk: str = ""
    is_network: bool = False


# --- processes ------------------------------------------------------------------------------------


async def _signal(scene: Scene, number: int) -> None:
    stem = await scene.hit_worker()
    pid = scene.system.pid(stem)
    scene.begin(scene.system.signal(stem, number))
    await scene.until_replaced(stem, pid)


async def _leak(scene: Scene) -> None:
    stem = await scene.hit_worker()
    pid = scene.system.pid(stem)
    scene.begin(await scene.system.cause(stem, "memory", bytes=LEAK_BYTES))
    await scene.until_replaced(stem, pid)


async def _device(scene: Scene, calls: int) -> None:
    stem = await scene.hit_worker()
    pid = scene.system.pid(stem)
    scene.begin(await scene.system.cause(stem, "device", calls=calls))
    if calls:
        await asyncio.sleep(QUIET_S)
        return
    try:
        async with asyncio.timeout(MAX_GONE_S):
            await scene.until_replaced(stem, pid)
    except TimeoutError:
        scene.system.signal(stem, signal.SIGKILL)
        await scene.system.wait_replaced(stem, pid)


async def _gateway(scene: Scene, number: int) -> None:
    scene.hit = set(range(len(scene.group.clients)))
    pid = scene.system.pid("gateway")
    scene.begin(scene.system.signal("gateway", number))
    await scene.until_replaced("gateway", pid)


async def _clock(scene: Scene, seconds: float) -> None:
    scene.begin()
    for stem in ALL:
        await scene.system.cause(stem, "clock", seconds=seconds)
    await asyncio.sleep(2 * QUIET_S)
    for stem in ALL:
        await scene.system.cause(stem, "clock", seconds=-seconds)


# --- folders --------------------------------------------------------------------------------------


async def _disk(scene: Scene, name: str, *, is_full: bool) -> None:
    """Make a folder unusable, begin a session, and kill a worker, which has to come back."""
    disk = scene.system.disks[name]
    scene.row.folder_at = time.monotonic()
    await asyncio.to_thread(disk.fill if is_full else disk.forbid_writing)
    try:
        await asyncio.sleep(QUIET_S)
        stem = await scene.hit_worker()
        pid = scene.system.pid(stem)
        scene.begin(scene.system.signal(stem, signal.SIGKILL))
        async with LiveGroup([scene.system.url], f"new_{scene.row.name}") as group:
            await asyncio.sleep(QUIET_S)
        scene.row.has_new_session = any(unit.fingerprint for unit in group.clients[0].units)
        async with asyncio.timeout(MAX_GONE_S):
            await scene.until_replaced(stem, pid)
    except TimeoutError:
        scene.notice("benchmark", f"no other process within {MAX_GONE_S:g} s")
    finally:
        await asyncio.to_thread(disk.recover)
        await scene.system.wait_for(
            lambda answer: answer.get("ready_workers") == N_WORKERS, "/readyz", "a worker that comes back"
        )


# --- network --------------------------------------------------------------------------------------


async def _blackhole(scene: Scene) -> None:
    scene.hit = {0, 1}
    scene.begin()
    scene.proxy.blackhole()
    end = time.monotonic() + MAX_GONE_S
    while time.monotonic() < end and not all(_is_back(scene, number) for number in scene.hit):
        await asyncio.sleep(0.1)


def _is_back(scene: Scene, number: int) -> bool:
    client = scene.group.clients[number]
    return any(one.text == "connection replaced" or client.n_begun for one in client.notices if one.at > scene.row.at)


async def _network(scene: Scene, delay_s: float, loss: float) -> None:
    scene.hit = {0, 1}
    scene.begin()
    scene.proxy.delay_s, scene.proxy.loss = delay_s, loss
    await asyncio.sleep(NETWORK_S)
    scene.proxy.delay_s = scene.proxy.loss = 0.0


async def _slow_reader(scene: Scene) -> None:
    """A fifth client in the same system that sends units and reads nothing."""
    name = "unread"
    limit, before = "unread_timeout_s", await scene.system.limit_count("unread_timeout_s")
    chunk = json.dumps({"type": "audio_chunk", "audio_base64": "AAAA" * 21_334, "force_speak": True})
    uri = f"{scene.system.url}/ws/duplex/adx_{name}"
    async with websockets.connect(uri, max_queue=1, compression=None, ping_interval=None, close_timeout=1) as socket:
        await socket.send(json.dumps({"type": "prepare", "config": ALOUD}))
        while json.loads(await socket.recv())["type"] != "prepared":
            pass
        sending = asyncio.create_task(_send_on(socket, chunk))
        scene.begin()
        try:
            async with asyncio.timeout(MAX_UNREAD_S):
                while await scene.system.limit_count(limit) == before:
                    await asyncio.sleep(0.1)
                scene.notice("gateway", f"limit {limit}")
                while await scene.system.workers_of(f"adx_{name}"):
                    await asyncio.sleep(0.1)
                scene.row.back_s = time.monotonic() - scene.row.at
        except TimeoutError:
            scene.notice("benchmark", f"still served after {MAX_UNREAD_S:g} s")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        socket.transport.abort()


async def _send_on(socket: websockets.ClientConnection, chunk: str) -> None:
    while True:
        await socket.send(chunk)
        await asyncio.sleep(1)


FAULTS = (
    Fault("kill", "kill -9 of a worker", partial(_signal, number=signal.SIGKILL)),
    Fault("stop", "SIGSTOP of a worker", partial(_signal, number=signal.SIGSTOP)),
    Fault("drain", "SIGTERM of a worker", partial(_signal, number=signal.SIGTERM)),
    Fault("leak", "a worker above its limit of memory", _leak),
    Fault("device-once", "the device throws in the middle of a unit, once", partial(_device, calls=1)),
    Fault("device", "the device throws in the middle of a unit, and from then on", partial(_device, calls=0)),
    Fault("gateway-kill", "kill -9 of the gateway", partial(_gateway, number=signal.SIGKILL)),
    Fault("gateway-restart", "SIGTERM of the gateway", partial(_gateway, number=signal.SIGTERM)),
    *(
        Fault(
            f"{disk}-{'full' if is_full else 'read-only'}",
            f"{what} {'full' if is_full else 'read-only'}, then kill -9 of a worker",
            partial(_disk, name=disk, is_full=is_full),
            disk,
        )
        for disk, what in (("logs", "log folder"), ("data", "folder of recordings"), ("cache", "folder of kernels"))
        for is_full in (True, False)
    ),
    Fault("blackhole", "a connection that carries nothing any more", _blackhole, is_network=True),
    Fault("delay", "200 ms of delay each way", partial(_network, delay_s=0.2, loss=0.0), is_network=True),
    Fault(
        "loss",
        "200 ms of delay each way and 10 % loss",
        partial(_network, delay_s=0.2, loss=0.1),
        is_network=True,
    ),
    Fault("slow-reader", "a client that does not read", _slow_reader),
    Fault("clock-forward", "wall clock two hours forward, then back", partial(_clock, seconds=CLOCK_JUMP_S)),
    Fault("clock-back", "wall clock two hours back, then forward", partial(_clock, seconds=-CLOCK_JUMP_S)),
)
