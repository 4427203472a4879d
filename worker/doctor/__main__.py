"""Looks at this machine and says what keeps the programs from running: `python -m worker.doctor`.

Runs the checks and prints what they find; knows neither facts nor remedies. A check that fails is a finding.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036, older ones cannot even read the files below
    print(f"problem  python  {sys.version_info[0]}.{sys.version_info[1]}\n         -> install Python 3.11 or newer")
    sys.exit(1)

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from worker.doctor import checks, checks_gpu
from worker.doctor.facts import NotKnown
from worker.doctor.findings import Finding, as_json, is_healthy, note, problem, table
from worker.doctor.machine import Machine

CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "python": checks.python,
    "dependencies": checks.dependencies,
    "config": checks.config,
    "torch": checks_gpu.torch,
    "triton": checks_gpu.triton,
    "driver": checks_gpu.driver,
    "gpus": checks_gpu.gpus,
    "capability": checks_gpu.capability,
    "kernels": checks_gpu.kernels,
    "allocator": checks_gpu.allocator,
    "gpu-memory": checks_gpu.gpu_memory,
    "memory": checks.memory,
    "compiler": checks.compiler,
    "ffmpeg": checks.ffmpeg,
    "ports": checks.ports,
    "files": checks.files,
    "cache": checks.cache,
    "model": checks.model,
    "tokenizer": checks.tokenizer,
    "vocoder": checks.vocoder,
    "warmup": checks.warmup,
    "voice": checks.voice,
    "environment": checks.environment,
}


def examine(machine: Machine, names: Iterable[str] = CHECKS) -> list[Finding]:
    """What these checks find, in their order."""
    return [_run(name, machine) for name in names]


def _run(name: str, machine: Machine) -> Finding:
    try:
        return CHECKS[name](machine)
    except NotKnown as error:
        return note(name, f"not looked at: {error}")
    except Exception as error:
        found = f"the check itself failed: {type(error).__name__}: {error}"
        return problem(name, found, "look at what it names; the programs may fail there too")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns: 0 if nothing found is a problem, 1 otherwise; argparse leaves with 2 for arguments that do not exist."""
    parser = argparse.ArgumentParser(prog="python -m worker.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings (default: config.json at the root)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--only", action="append", choices=CHECKS, metavar="NAME", help=f"one of {', '.join(CHECKS)}")
    args = parser.parse_args(argv)
    findings = examine(Machine(args.config, os.environ), args.only or CHECKS)
    print(as_json(findings) if args.json else table(findings))
    return 0 if is_healthy(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
