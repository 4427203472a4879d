"""Late units of a client in real time beside an abusive one: `python -m benchmarks.serve.fairness`.

The first client sends a unit a second. The abusive one runs in a process of its own, by default on other cores than
the servers where there are four or more. A unit is late if its result comes more than a second after it was sent. Each
client has a key: without one, programs of the gateway's machine have ten times the rates of other clients.
"""

import argparse
import asyncio
import base64
import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import psutil
import websockets
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serve.processes import ROOT, ServedProgram, free_port, other_cpu_s
from server.access.keys import hash_of
from worker.key_text import KEY_PREFIX

LIMITS = "duologue_gateway_limits"
MB = 10**6
ANSWER_S, CLOSE_S = 30.0, 1.0
CORES = ("auto", "split", "shared")
SOUND = base64.b64encode(np.zeros(16_000, np.float32).tobytes()).decode()
CHUNK = json.dumps({"type": "audio_chunk", "audio_base64": SOUND})
Socket = websockets.ClientConnection
GOOD, ABUSIVE = "good", "abusive"  # names of the keys


def key_of(name: str) -> str:
    """The key of a client of this benchmark."""
    return f"{KEY_PREFIX}{hashlib.sha256(name.encode()).hexdigest()}"


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(name)}"}


def connect(port: int, name: str) -> Any:
    """A duplex session that is not open yet. name: of its key."""
    url = f"ws://127.0.0.1:{port}/ws/duplex/{name}"
    options = {"proxy": None, "max_size": None, "compression": None, "close_timeout": CLOSE_S}
    return websockets.connect(url, additional_headers=bearer(name), **options)


async def until(socket: Socket, kind: str) -> dict[str, Any]:
    """The first message of this type."""
    async with asyncio.timeout(ANSWER_S):
        while True:
            message: dict[str, Any] = json.loads(await socket.recv())
            if message["type"] == kind:
                return message


async def real_time_client(port: int, n_units: int) -> list[float]:
    """Send units in real time. Returns: seconds from each unit to its result."""
    waits = []
    async with connect(port, GOOD) as socket:
        await socket.send(json.dumps({"type": "prepare"}))
        await until(socket, "prepared")
        begun = time.monotonic()
        for number in range(n_units):
            await asyncio.sleep(max(0.0, begun + number - time.monotonic()))
            sent_at = time.monotonic()
            await socket.send(CHUNK)
            await until(socket, "result")
            waits.append(time.monotonic() - sent_at)
    return waits


# --- abuse ----------------------------------------------------------------------------------------


async def _flood(port: int, messages: Callable[[int], str]) -> None:
    """Send messages as fast as the server reads them, and connect again after each end."""
    numbers = itertools.count()
    while True:
        with suppress(websockets.ConnectionClosed):
            async with connect(port, ABUSIVE) as socket:
                reading = asyncio.create_task(_drop(socket))
                try:
                    while True:
                        await socket.send(messages(next(numbers)))
                finally:
                    reading.cancel()


async def _drop(socket: Socket) -> None:
    with suppress(websockets.ConnectionClosed):
        async for _ in socket:
            pass


def _prepare_with_voice(number: int) -> str:
    voice = np.random.default_rng(number).standard_normal(48_000).astype(np.float32) / 10
    return json.dumps({"type": "prepare", "ref_audio_base64": base64.b64encode(voice.tobytes()).decode()})


async def _connect_storm(port: int) -> None:
    async def one() -> None:
        while True:
            with suppress(OSError, websockets.WebSocketException, TimeoutError):
                async with connect(port, ABUSIVE):
                    pass

    await asyncio.gather(*(one() for _ in range(20)))


async def _scrape(port: int) -> None:
    async with httpx.AsyncClient(trust_env=False, headers=bearer(ABUSIVE)) as http:
        while True:
            await http.get(f"http://127.0.0.1:{port}/metrics")


LONG = json.dumps({"type": "audio_chunk", "audio_base64": "A" * 40 * MB})
ABUSE: dict[str, Callable[[int], Awaitable[None]]] = {
    "bad-messages": lambda port: _flood(port, lambda _: '{"type": "nonsense"}'),
    "long-messages": lambda port: _flood(port, lambda _: LONG),
    "interrupts": lambda port: _flood(port, lambda _: '{"type": "interrupt"}'),
    "new-voices": lambda port: _flood(port, _prepare_with_voice),
    "unpaced-units": lambda port: _flood(port, lambda number: CHUNK if number else '{"type": "prepare"}'),
    "connects": _connect_storm,
    "metrics": _scrape,
}


# --- runs -----------------------------------------------------------------------------------------


def run_case(port: int, programs: Sequence[ServedProgram], case: str, n_units: int) -> dict[str, Any]:
    """One row: late units of the client in real time beside the abuse, and which limits it reached.

    `server_cpu` is the number of cores that each server used, and `other_cpu` that of all further programs of the
    machine, which also delay units.

    Args:
        port: of the gateway.
        programs: the servers.
        case: `control` or a key of `ABUSE`.
        n_units: units of the client in real time, one a second.
    """
    before, abuser = _limits(port), None
    begun, others_before = time.monotonic(), other_cpu_s(programs)
    servers_before = [program.cpu_s() for program in programs]
    if case != "control":
        command = [sys.executable, "-m", "benchmarks.serve.fairness", "--abuse", case, str(port)]
        abuser = psutil.Popen(command, cwd=ROOT)
    try:
        waits = asyncio.run(real_time_client(port, n_units))
        abuse_s = 0.0 if abuser is None else sum(abuser.cpu_times()[:2])
        seconds = time.monotonic() - begun
        other_cpu = (other_cpu_s(programs) - abuse_s - others_before) / seconds
        used = [program.cpu_s() - before for program, before in zip(programs, servers_before, strict=True)]
    finally:
        if abuser is not None:
            abuser.kill()
            abuser.wait()
    reached = {name: n - before.get(name, 0) for name, n in _limits(port).items() if n > before.get(name, 0)}
    late, longest = sum(wait > 1 for wait in waits), round(max(waits), 2)
    server_cpu = {program.name: round(one / seconds, 2) for program, one in zip(programs, used, strict=True)}
    figures = {"late": late, "longest_s": longest, "server_cpu": server_cpu, "other_cpu": round(other_cpu, 2)}
    return {"case": case, "units": n_units, **figures, "limits": reached}


def _limits(port: int) -> dict[str, int]:
    """How often each limit was reached."""
    answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, headers=bearer(GOOD)).raise_for_status()
    families = text_string_to_metric_families(answer.text)
    return {
        sample.labels["limit"]: int(sample.value)
        for family in families
        if family.name == LIMITS
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def share_cores(how: str = "auto") -> str:
    """Leave the upper half of the cores to the abuse.

    Args:
        how: `split`, `shared`, or `auto`: split where there are four cores or more.

    Returns: what was done, for the report.
    """
    cores = sorted(os.sched_getaffinity(0))
    least = {"split": 2, "auto": 4, "shared": len(cores) + 1}[how]
    if len(cores) < least:
        return f"the abuse shares the cores of the servers: {len(cores)}"
    kept = cores[: len(cores) // 2]
    os.sched_setaffinity(0, kept)
    return f"cores of the servers: {len(kept)}; of the abuse: {len(cores) - len(kept)}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve.fairness", description=(__doc__ or "").strip())
    parser.add_argument("--units", type=int, default=30, metavar="N", help="units of each case; default: 30")
    parser.add_argument("--cases", nargs="+", choices=["control", *ABUSE], default=["control", *ABUSE])
    parser.add_argument("--model-path", default="assets/tiny", metavar="DIR")
    parser.add_argument("--cores", choices=CORES, default=CORES[0], help="cores of the abuse; default: auto")
    parser.add_argument("--abuse", nargs=2, metavar=("CASE", "PORT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.abuse is not None:
        cores = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
        if cores:
            os.sched_setaffinity(0, cores)
        asyncio.run(_abuse(ABUSE[args.abuse[0]](int(args.abuse[1]))))
        return
    print(share_cores(args.cores), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        keys = [{"name": name, "hash": hash_of(key_of(name))} for name in (GOOD, ABUSIVE)]
        environ = {"DUOLOGUE_SERVICE_DATA_DIR": folder, "DUOLOGUE_SERVICE_API_KEYS": json.dumps(keys)}
        flags = ("--model-path", args.model_path, "--max-sessions", "2", "--port", "0")
        with ServedProgram("worker.main", *flags, environ=environ) as worker:
            worker.wait_ready(state="IDLE")
            flags = ("--port", str(free_port()), "--workers", f"127.0.0.1:{worker.port}")
            with ServedProgram("server.main", *flags, environ=environ) as gateway:
                gateway.wait_ready("/readyz", ready=True)
                for case in args.cases:
                    row = run_case(gateway.port, (worker, gateway), case, args.units)
                    print(json.dumps(row), flush=True)


async def _abuse(running: Awaitable[None]) -> None:
    await running


if __name__ == "__main__":
    main()
