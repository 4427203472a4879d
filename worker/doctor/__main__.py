"""Checks whether the programs run on this machine, and prints a remedy for each problem: `python -m worker.doctor`.

Contains the list of checks and the command line; facts and remedies are in the modules of the checks. A check that
raises is reported as a finding.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036, older versions cannot parse the modules below
    print(f"problem  python  {sys.version_info[0]}.{sys.version_info[1]}\n         -> install Python 3.11 or newer")
    sys.exit(1)

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from worker.doctor import checks, checks_gpu
from worker.doctor.facts import UnknownFact
from worker.doctor.findings import Finding, as_json, is_healthy, note, problem, table
from worker.doctor.machine import Machine

CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "python": checks.python,
    "dependencies": checks.dependencies,
    "config": checks.config,
    "torch": checks_gpu.torch,
    "torch-libraries": checks_gpu.torch_libraries,
    "triton": checks_gpu.triton,
    "driver": checks_gpu.driver,
    "gpus": checks_gpu.gpus,
    "capability": checks_gpu.capability,
    "compile": checks_gpu.compiles,
    "tf32": checks_gpu.tf32,
    "kernels": checks_gpu.kernels,
    "kv-layout": checks_gpu.kv_layout,
    "decode-copy": checks_gpu.decode_copy,
    "attention": checks_gpu.attention,
    "weights": checks_gpu.weights,
    "allocator": checks_gpu.allocator,
    "gpu-memory": checks_gpu.gpu_memory,
    "memory": checks.memory,
    "compiler": checks.compiler,
    "ffmpeg": checks.ffmpeg,
    "ports": checks.ports,
    "files": checks.files,
    "cache": checks.cache,
    "data": checks.data,
    "model": checks.model,
    "checksums": checks.checksums,
    "tokenizer": checks.tokenizer,
    "vocoder": checks.vocoder,
    "conversion": checks.conversion,
    "speech": checks.speech,
    "warmup": checks.warmup,
    "voice": checks.voice,
    "environment": checks.environment,
}


def examine(machine: Machine, names: Iterable[str] = CHECKS) -> list[Finding]:
    """The findings of these checks, in their order."""
    return [_run(name, machine) for name in names]


def _run(name: str, machine: Machine) -> Finding:
    try:
        return CHECKS[name](machine)
    except UnknownFact as error:
        return note(name, f"not checked: {error}")
    except Exception as error:
        found = f"the check itself failed: {type(error).__name__}: {error}"
        return problem(name, found, "correct what the error names; the programs may fail for the same reason")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns: 0 without problems, 1 otherwise; argparse exits with 2 for unknown arguments."""
    parser = argparse.ArgumentParser(prog="python -m worker.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings (default: config.json at the root)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--only",
        action="append",
        choices=CHECKS,
        metavar="NAME",
        help=f"run this check only; repeatable: {', '.join(CHECKS)}",
    )
    args = parser.parse_args(argv)
    findings = examine(Machine(args.config, os.environ), args.only or CHECKS)
    print(as_json(findings) if args.json else table(findings))
    return 0 if is_healthy(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
