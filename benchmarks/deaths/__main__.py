"""What the death of a worker or of a gateway costs live sessions: `python -m benchmarks.deaths`.

Two workers, on GPUs or on the CPU, serve one gateway of their own and two gateways with an authority. Needs no Ray.
"""

import argparse
import asyncio
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.chaos.clients import CONFIG, LiveGroup
from benchmarks.chaos.figures import Undisturbed
from benchmarks.chaos.network import FaultyProxy
from benchmarks.deaths.outcome import DeathOutcome, agreement, hit_by, lines, outcome_of
from benchmarks.deaths.programs import CLUSTER, SINGLE, ProgramLayout, Programs
from benchmarks.serve.processes import ROOT

TINY, REAL = "tiny", "real"
PARTS = ("worker", "cluster", "gateway")
BEFORE_S, AFTER_S, MAX_RECOVERY_S = 6.0, 5.0, 30.0
PACE_S = 0.4  # of the undisturbed run
# About half of the released model's tokens. With random weights 4 % of the units listened (results/deaths-h100x2.json).
LISTEN_TOP_K = 76_000
START_S, STOP_S = 240.0, 8.0  # limit of a start; an end


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deaths", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--config", default=TINY, help="tiny, real (released size, random weights, 19 GB) or a checkpoint folder"
    )
    parser.add_argument("--folder", type=Path, help="where --config real is written and kept; default: temporary")
    parser.add_argument("--gpus", type=_numbers, metavar="0,1", help="one worker on each; default: two on the CPU")
    parser.add_argument("--parts", type=_parts, default=PARTS, help="worker: one gateway; cluster, gateway: two")
    parser.add_argument("--sessions", type=_pair, default=(16, 32), help="of worker, and of the others; default: 16,32")
    parser.add_argument("--slots", type=int, default=32, help="of each worker; default: 32")
    parser.add_argument("--context-rows", type=int, default=1536, help="of a slot; default: 1536")
    parser.add_argument("--times", type=int, default=1, help="deaths of each part; default: 1")
    parser.add_argument("--units", type=int, default=24, help="of the undisturbed run; later ones are not compared")
    parser.add_argument("--cache-dir", type=Path, help="folder of compiled kernels; default: temporary")
    parser.add_argument("--logs", type=Path, help="folder for logs; default: temporary")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="end after this many seconds")
    parser.add_argument("--json", type=Path, help="result file, rewritten after each step")
    options = parser.parse_args(arguments)
    if options.gpus is not None and len(options.gpus) < 2:
        parser.error(f"--gpus: expected two GPUs or more, got {len(options.gpus)}")
    if max(options.sessions) > options.slots:
        parser.error(
            f"--slots: expected {max(options.sessions)} or more, so that one worker can die, got {options.slots}"
        )
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _pair(text: str) -> tuple[int, int]:
    first, second = _numbers(text)
    return first, second


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    return parts


class Deaths:
    """The parts of a run. result: gets the figures. save: called when it has changed."""

    def __init__(
        self, options: argparse.Namespace, programs: Programs, result: dict[str, Any], save: Callable[[], None]
    ):
        self._options, self._programs, self._result, self._save = options, programs, result, save
        self._config = CONFIG if options.config == TINY else {**CONFIG, "listen_top_k": LISTEN_TOP_K}
        self._undisturbed: dict[str, list[Undisturbed]] = {}
        self._n_groups = 0

    async def run(self) -> None:
        """All parts that there is time for."""
        parts, times = self._options.parts, range(self._options.times)
        for kind in dict.fromkeys(_kind(part) for part in parts):
            self._undisturbed[kind] = await self._run_undisturbed(kind)
        if len(self._undisturbed) > 1:
            self._result["undisturbed"]["both"] = agreement(*self._undisturbed.values())
        self._save()
        for part in parts:
            for _ in times if part != "gateway" else (0,):  # a killed gateway stays away
                if not self._has_time():
                    self._result["left_out"].append(part)
                    report.say(f"{part}: left out, no time")
                    continue
                outcome = await (self._kill_gateway() if part == "gateway" else self._kill_worker(part))
                self._show(outcome)
                if part != "gateway":
                    outcome.back = await self._programs.wait_back(outcome.at)
                    report.say(f"worker back after {outcome.back:.1f} s")
                    self._result["deaths"][-1] = outcome.to_json()
                    self._save()

    def _has_time(self) -> bool:
        needed_s = BEFORE_S + MAX_RECOVERY_S / 3 + AFTER_S + STOP_S
        return time.monotonic() - report.BEGAN + needed_s < float(self._options.budget_s)

    def _urls(self, kind: str) -> list[str]:
        """Of the gateways of each session."""
        names = (SINGLE,) if kind == "worker" else CLUSTER
        n = self._options.sessions[kind != "worker"]
        return [self._programs.url(names[index % len(names)]) for index in range(n)]

    def _group(self, urls: Sequence[str], pace_s: float = 1.0) -> LiveGroup:
        self._n_groups += 1
        return LiveGroup(urls, f"deaths_{self._n_groups}", pace_s, self._config)

    async def _run_undisturbed(self, kind: str) -> list[Undisturbed]:
        report.say(f"{kind}: undisturbed run of {len(self._urls(kind))} sessions")
        await self._programs.wait_ready()
        async with self._group(self._urls(kind), PACE_S) as group:
            while min(client.n_answered for client in group.clients) < self._options.units:
                await asyncio.sleep(0.1)
        units = [unit for client in group.clients for unit in client.units if unit.fingerprint]
        self._result["undisturbed"][kind] = {
            "sessions": len(group.clients),
            "units": len(units),
            "listening": sum(unit.fingerprint.is_listen for unit in units if unit.fingerprint),
            "sound_s": sum(unit.sound_s for unit in units),
        }
        self._save()
        return [Undisturbed.of(client) for client in group.clients]

    async def _kill_worker(self, part: str) -> DeathOutcome:
        name = self._programs.workers[0]
        report.say(f"{part}: kill -9 of {name}")
        urls = self._urls(part)
        await self._programs.wait_ready()
        n_notices = len(self._programs.notices)
        async with self._group(urls) as group:
            await asyncio.sleep(BEFORE_S)
            at = self._programs.kill(name)
            await _wait_recovery(group, at)
            await asyncio.sleep(AFTER_S)
            hit = hit_by(group.clients, at)
        outcome = outcome_of(
            f"kill -9 of a worker ({part})", len(set(urls)), at, group.clients, self._undisturbed[part], hit
        )
        outcome.notices += self._programs.notices[n_notices:]
        return outcome

    async def _kill_gateway(self) -> DeathOutcome:
        """Kill the second gateway; its clients come back through the other one, behind one address for each."""
        report.say(f"gateway: kill -9 of {CLUSTER[1]}")
        ports = [self._programs.ports[name] for name in CLUSTER]
        await self._programs.wait_ready()
        n_notices = len(self._programs.notices)
        async with FaultyProxy(*ports) as first, FaultyProxy(*reversed(ports)) as second:
            addresses = [f"ws://127.0.0.1:{proxy.port}" for proxy in (first, second)]
            urls = [addresses[index % 2] for index in range(self._options.sessions[1])]
            async with self._group(urls) as group:
                await asyncio.sleep(BEFORE_S)
                at = self._programs.kill(CLUSTER[1])
                hit = {index for index in range(len(urls)) if index % 2}
                await _wait_recovery(group, at)
                await asyncio.sleep(AFTER_S)
        expected = self._undisturbed["cluster"]
        outcome = outcome_of("kill -9 of a gateway", len(CLUSTER), at, group.clients, expected, hit)
        outcome.notices += self._programs.notices[n_notices:]
        return outcome

    def _show(self, outcome: DeathOutcome) -> None:
        self._result["deaths"].append(outcome.to_json())
        self._save()
        print(lines(outcome.figures()), flush=True)


def _kind(part: str) -> str:
    """The undisturbed run that a part is compared with."""
    return "worker" if part == "worker" else "cluster"


async def _wait_recovery(group: LiveGroup, at: float) -> None:
    """Wait until each session has the result of a unit that was sent after a death, at most `MAX_RECOVERY_S`."""
    end = time.monotonic() + MAX_RECOVERY_S
    while time.monotonic() < end and not all(
        any(unit.fingerprint and unit.sent_at > at for unit in client.units) for client in group.clients
    ):
        await asyncio.sleep(0.05)


async def measure(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Run what was asked for. result: gets the figures; written after each step."""

    def save() -> None:
        if options.json is not None:
            report.write_json(options.json, result)

    with tempfile.TemporaryDirectory(prefix="deaths_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        model = _checkpoint(options, folder)
        result["steps_s"]["checkpoint"] = time.monotonic() - report.BEGAN
        report.say("starting workers and gateways")
        cache, logs = options.cache_dir or folder / "cache", options.logs or folder / "logs"
        layout = ProgramLayout(
            options.gpus, model, options.slots, options.context_rows, cache, logs.absolute(), START_S
        )
        left_s = options.budget_s - STOP_S - (time.monotonic() - report.BEGAN)
        async with asyncio.timeout(left_s if math.isfinite(left_s) else None):
            async with Programs(layout) as programs:
                result["start_s"] = programs.ready_s
                report.say(", ".join(f"{one} after {seconds:.1f} s" for one, seconds in programs.ready_s.items()))
                save()
                await Deaths(options, programs, result, save).run()
        result["steps_s"]["all"] = time.monotonic() - report.BEGAN
        save()


def _checkpoint(options: argparse.Namespace, temporary: Path) -> Path:
    """The checkpoint folder; that of `real` is written unless it exists."""
    if options.config == TINY:
        return ROOT / "assets" / "tiny"
    if options.config != REAL:
        return Path(options.config).absolute()
    folder: Path = (options.folder or temporary / REAL).absolute()
    if not folder.exists():
        report.say(f"writing {folder}")
        device = "cpu" if options.gpus is None else f"cuda:{options.gpus[-1]}"
        command = [sys.executable, "-m", "benchmarks.released_size", str(folder), "--device", device]
        subprocess.run(command, cwd=ROOT, check=True)
    return folder


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    device = torch.device("cpu" if options.gpus is None else "cuda")
    result: dict[str, Any] = {
        "command": ["python", "-m", "benchmarks.deaths", *arguments],
        "environment": {**report.environment(device), "load_average": os.getloadavg()[0]},
        "steps_s": {},
        "undisturbed": {},
        "deaths": [],
        "left_out": [],
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the processes end before this one
    try:
        asyncio.run(measure(options, result))
    except TimeoutError:
        print(f"ended after {options.budget_s:g} s", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
