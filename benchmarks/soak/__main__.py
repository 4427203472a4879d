"""Hours of live sessions through gateway and worker: what grows, and what stays in use after all clients have left.

`python -m benchmarks.soak --help` lists the options; README.md explains the result. One session lasts to the end
and evicts continuously; short ones, called visits, run beside it. Exit status: 1 if a bound fails, something is left
over or a visit ends in another way than expected, 0 otherwise.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.serve.processes import ServedProgram, free_port
from benchmarks.soak.clients import SoakClients, UnitTime
from benchmarks.soak.sampler import Sample, Sampler, left_over, note_other_programs, unit_windows
from benchmarks.soak.slopes import BoundVerdict, Slope, slope_row
from models.checkpoint.embedded import TINY
from models.errors import ModelError

MINUTE = 60.0
MAX_RSS_MB_PER_HOUR = 1.0
MAX_SHARE_PER_HOUR = 0.05  # of the mean
# Program, key of a sample, title, unit, largest growth in an hour (None: no verdict).
BOUNDS = (
    ("gateway", "rss_mb", "RSS", "MB", MAX_RSS_MB_PER_HOUR),
    ("worker", "rss_mb", "RSS", "MB", MAX_RSS_MB_PER_HOUR),
    ("worker", "device_allocated_mb", "device memory", "MB", MAX_RSS_MB_PER_HOUR),
    ("gateway", "fds", "descriptors", "", 1.0),
    ("worker", "fds", "descriptors", "", 1.0),
    ("gateway", "threads", "threads", "", None),
    ("worker", "threads", "threads", "", None),
    ("gateway", "queue", "queue", "", 1.0),
    ("gateway", "cpu_ms_per_unit", "CPU a unit", "ms", None),
    ("worker", "cpu_ms_per_unit", "CPU a unit", "ms", None),
)
N_WINDOWS = 20  # of unit times, after the warm-up
SETTLE_S = 90.0  # for slots and descriptors to be given back


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=120, help="length of the long session")
    parser.add_argument("--warm", type=float, default=10, help="first minutes, which slopes leave out")
    parser.add_argument("--sample-s", type=float, default=15, help="seconds between samples")
    parser.add_argument("--visit-s", type=int, default=24, help="approximate seconds of a visit")
    parser.add_argument("--visitors", type=int, default=1, help="visits at the same time; 0: none")
    parser.add_argument("--model-path", type=Path, default=TINY, help="checkpoint folder; default: %(default)s")
    parser.add_argument("--device", default="auto", help="device of the worker: auto, cpu, cuda, cuda:N")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="compile at start")
    parser.add_argument("--grace-s", type=float, default=10, help="service.resume_grace_s of the gateway")
    other = "cores of other programs above which a twentieth of the run is left out of the slopes of unit times"
    parser.add_argument("--max-other-cpu", type=float, default=0.1, help=f"{other}; default: %(default)s")
    parser.add_argument("--json", type=Path, help="result file, rewritten with each sample")
    options = parser.parse_args(arguments)
    if not 0 <= options.warm < options.minutes:
        parser.error(f"--minutes: expected more than --warm ({options.warm:g}), got {options.minutes:g}")
    return options


class Soak:
    """One run. Writes the result after each sample.

    Args:
        options: of the command.
        command: the command itself.
    """

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options = options
        self._units: list[UnitTime] = []
        self.result: dict[str, Any] = {
            "command": command,
            "environment": report.environment(torch.device("cpu")) | {"load_average": os.getloadavg()[0]},
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "is_complete": False,
            "verdicts": [],
            "left_over": None,
            "visits": {},
            "faults": [],
            "windows": [],
            "n_disturbed": 0,
            "samples": [],
        }

    def run(self) -> bool:
        """Returns: whether no bound fails, nothing is left over and no visit fails."""
        with ExitStack() as stack:
            gateway, worker = self._start(stack)
            asyncio.run(self._soak(gateway, worker))
        self.result["is_complete"] = True
        self._judge()
        self._save()
        for row in self.result["verdicts"]:
            print(verdict_line(row))
        if self.result["n_disturbed"]:
            print(f"{self.result['n_disturbed']} windows of unit times are left out: other programs used more CPU time")
        for line in (*self.result["faults"], *self.result["left_over"]):
            print(f"fault: {line}")
        return not (
            self.result["faults"]
            or self.result["left_over"]
            or any(row["verdict"] is BoundVerdict.FAILS for row in self.result["verdicts"])
        )

    def _start(self, stack: ExitStack) -> tuple[ServedProgram, ServedProgram]:
        options = self.options
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        environ = {"DUOLOGUE_SERVICE_DATA_DIR": folder, "DUOLOGUE_SERVICE_RESUME_GRACE_S": f"{options.grace_s:g}"}
        flags = ["--port", "0", "--device", options.device, "--max-sessions", str(1 + max(1, options.visitors))]
        flags += ["--compile" if options.compile else "--no-compile"]
        flags += ["--model-path", str(options.model_path)]
        worker = stack.enter_context(ServedProgram("worker.main", *flags, environ=environ))
        worker.wait_ready(state="IDLE")
        flags = ["--port", str(free_port()), "--workers", f"127.0.0.1:{worker.port}", "--log-dir", folder]
        gateway = stack.enter_context(ServedProgram("server.main", *flags, environ=environ))
        gateway.wait_ready("/readyz", ready=True)
        return gateway, worker

    async def _soak(self, gateway: ServedProgram, worker: ServedProgram) -> None:
        options, clients = self.options, SoakClients(f"ws://127.0.0.1:{gateway.port}", self.options.visit_s)
        await self._every_kind(clients)  # connection pools and threads grow once
        self._began = time.monotonic()
        sampler = Sampler(gateway, worker, self._began)
        before = await self._settled(sampler, None)
        self.result["before"] = before
        clients.units.clear()
        until = time.monotonic() + options.minutes * MINUTE
        self._began = time.monotonic()
        sampler = Sampler(gateway, worker, self._began)
        running = [asyncio.create_task(clients.stay(until))]
        running += [asyncio.create_task(clients.visits(until, first)) for first in range(options.visitors)]
        while not all(task.done() for task in running):
            await asyncio.wait(running, timeout=options.sample_s, return_when=asyncio.ALL_COMPLETED)
            await self._sample(sampler, clients)
        for task in running:
            task.result()
        after = await self._settled(sampler, before)
        self.result |= {"after": after, "left_over": left_over(before, after)}

    async def _every_kind(self, clients: SoakClients) -> None:
        for number, kind in enumerate(clients.kinds):
            await clients.visit(kind, number)
        print(f"one visit of each kind: {clients.counts}", file=sys.stderr, flush=True)

    async def _settled(self, sampler: Sampler, expected: Sample | None) -> Sample:
        """The state without clients, once nothing is left over, or after a while. expected: the state to come back."""
        end = time.monotonic() + SETTLE_S
        before = expected
        while True:
            await asyncio.sleep(5)
            now = await asyncio.to_thread(sampler.sample)
            if (before is not None and not left_over(before, now)) or time.monotonic() > end:
                return now
            before = expected or now

    async def _sample(self, sampler: Sampler, clients: SoakClients) -> None:
        units = [clients.units.popleft() for _ in range(len(clients.units))]
        self._units += units
        row = await asyncio.to_thread(sampler.sample, units)
        self.result["samples"].append(row)
        self.result |= {"visits": clients.counts, "faults": clients.faults}
        self._judge()
        self._save()
        gateway, worker = row["gateway"], row["worker"]
        print(
            f"{row['s'] / MINUTE:7.1f} min  RSS {gateway['rss_mb']:7.1f} {worker['rss_mb']:7.1f} MB  "
            f"fds {gateway['fds']:3} {worker['fds']:3}  threads {gateway['threads']:3} {worker['threads']:3}  "
            f"units {row['units']:3} late {row['late']:2}  faults {len(clients.faults)}",
            flush=True,
        )

    def _judge(self) -> None:
        """Slopes and verdicts of what has been measured so far."""
        warm_s = self.options.warm * MINUTE
        window_s = (self.options.minutes - self.options.warm) * MINUTE / N_WINDOWS
        self.result["windows"] = unit_windows(self._units, self._began, window_s)
        samples = [row for row in self.result["samples"] if row["s"] >= warm_s]
        note_other_programs(self.result["windows"], self.result["samples"], window_s)
        warm = [row for row in self.result["windows"] if row["s"] - window_s / 2 >= warm_s]
        windows = [row for row in warm if (row["other_cpu"] or 0.0) <= self.options.max_other_cpu]
        self.result["n_disturbed"] = len(warm) - len(windows)
        rows = []
        for program, key, title, unit, bound in BOUNDS:
            slope = _slope(samples, program, key)
            if slope is not None or key != "device_allocated_mb":
                rows.append(slope_row(f"{program} {title}", unit, slope, bound))
        for key in ("listen_p50", "listen_p99", "speak_p50", "speak_p99"):
            slope = Slope.of(*_columns(windows, key))
            bound = None if slope is None else MAX_SHARE_PER_HOUR * slope.mean
            rows.append(slope_row(f"unit {key.replace('_', ' ')}", "ms", slope, bound))
        self.result["verdicts"] = rows

    def _save(self) -> None:
        if self.options.json is not None:
            report.write_json(self.options.json, self.result)


def _slope(samples: list[Sample], program: str, key: str) -> Slope | None:
    return Slope.of(*_columns([{"s": row["s"], **row[program]} for row in samples], key))


def _columns(rows: list[Sample], key: str) -> tuple[list[float], list[float]]:
    """Times and values of the rows that have this value."""
    used = [row for row in rows if row.get(key) is not None]
    return [row["s"] for row in used], [row[key] for row in used]


def verdict_line(row: dict[str, Any]) -> str:
    """One line of the table."""
    if "per_hour" not in row:
        return f"{row['name']:22} too few samples"
    bound = "" if row["bound"] is None else f"  bound {row['bound']:+.2f}: {row['verdict']}"
    return (
        f"{row['name']:22} mean {row['mean']:9.2f} {row['unit']:2}  an hour {row['per_hour']:+8.3f} "
        f"[{row['low']:+.3f}, {row['high']:+.3f}]{bound}"
    )


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        is_good = Soak(parse(arguments), ["python", "-m", "benchmarks.soak", *arguments]).run()
    except ModelError as error:
        sys.exit(f"benchmarks.soak: {error}")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
