"""What faults cost live sessions: `python -m benchmarks.chaos`.

Starts the launcher with a gateway and two workers, runs conversations in real time and causes each fault in turn.
docs/reliability.md explains the tables.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.figures import FaultRow, cells
from benchmarks.chaos.run import References, run_fault, run_kills
from benchmarks.chaos.system import System
from benchmarks.chaos.tables import fault_table, kill_table, on_screen, replace_part

NAMES = tuple(fault.name for fault in FAULTS)
DEFAULT_TIMES = 50


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=("faults", "kill", "all"), default="all", help="default: all")
    parser.add_argument("--faults", type=_names, default=NAMES, metavar="A,B", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--times", type=int, default=DEFAULT_TIMES, help="kills of `kill`; default: %(default)s")
    parser.add_argument("--model-path", type=Path, default=Path("assets/tiny"), metavar="DIR", help="checkpoint folder")
    parser.add_argument("--json", type=Path, help="result file, rewritten after each fault and each group of kills")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="page whose tables are replaced")
    parser.add_argument("--condition", default="", help="a sentence about the machine, for the tables")
    options = parser.parse_args(arguments)
    if options.times < 1:
        parser.error(f"--times: expected 1 or more, got {options.times}")
    return options


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    return names


async def measure(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Run what was asked for. result: gets the figures; written after each fault and each group of kills."""
    with tempfile.TemporaryDirectory(prefix="chaos_", ignore_cleanup_errors=True) as folder:
        async with System(Path(folder), "--model-path", str(options.model_path)) as system:
            references = References(system)
            if options.part in ("faults", "all"):
                for number, fault in enumerate(one for one in FAULTS if one.name in options.faults):
                    report.say(fault.what)
                    row = await run_fault(system, fault, references, number)
                    result["faults"].append(row.to_json())
                    _show_row(row)
                    _save(options, result, cells(row))
            if options.part in ("kill", "all"):
                report.say(f"kill -9 of a worker, {options.times} times")
                async for figures in run_kills(system, options.times, references):
                    result["kill"] = figures
                    report.say(f"{figures['kills']} of {options.times} kills")
                    _save(options, result)
                print(on_screen(kill_table(result["kill"])), flush=True)


def _show_row(row: FaultRow) -> None:
    print(" | ".join(cells(row)), flush=True)


def _save(options: argparse.Namespace, result: dict[str, Any], row: Sequence[str] | None = None) -> None:
    if row is not None:
        result["table"].append(list(row))
    if options.json is not None:
        report.write_json(options.json, result)
    if options.markdown is not None:
        write_markdown(options.markdown, result)


def write_markdown(path: Path, result: dict[str, Any]) -> None:
    """Replace the tables of a file by those of this run."""
    if result["table"]:
        replace_part(path, "faults", fault_table(result))
    if result["kill"]:
        replace_part(path, "kill", kill_table(result["kill"], result))


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    result: dict[str, Any] = {
        "command": ["python", "-m", "benchmarks.chaos", *arguments],
        "condition": options.condition,
        "environment": {**report.environment(torch.device("cpu")), "load_average": os.getloadavg()[0]},
        "faults": [],
        "table": [],
        "kill": None,
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the processes of the system end before this one
    try:
        asyncio.run(measure(options, result))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
