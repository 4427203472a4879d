"""`python -m benchmarks.gate`: what a unit does, counted, against committed bounds; `--times`: how long it takes.

    python -m benchmarks.gate                                    # counts of the embedded checkpoint, on the CPU
    python -m benchmarks.gate --write                            # makes the present counts the bounds
    python -m benchmarks.gate --times --device cuda              # ratios to a frozen kernel, against recorded ones
    python -m benchmarks.gate --times --device cuda --write      # records them for this GPU and model

Exit status: 0; 1 for a count or ratio above its bound; 3 for times that nothing was recorded for.
"""

import argparse
import platform
import sys
from pathlib import Path

import torch

from benchmarks.gate.bounds import falls, read_bounds, rises, write_bounds
from benchmarks.gate.counters import counted
from benchmarks.gate.times import FILE, ratios, read_ratios, slower, write_ratios
from benchmarks.gate.units import KINDS, TINY, driven

ROSE, UNKNOWN = 1, 3


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", action="store_true", help="measure times instead of counting")
    parser.add_argument("--write", action="store_true", help="make the result the bound")
    parser.add_argument("--device", default="cpu", help="of --times; default: %(default)s")
    parser.add_argument("--model-path", type=Path, default=TINY, metavar="DIR", help="of --times; default: assets/tiny")
    parser.add_argument("--units", type=int, default=50, metavar="N", help="of each kind, for --times")
    parser.add_argument("--file", type=Path, default=FILE, help="recorded times; default: times.json of this folder")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    return _times(options) if options.times else _counts(write=options.write)


def _counts(*, write: bool) -> int:
    with driven() as driver:
        counts = {kind: counted(driver, kind) for kind in KINDS}
    if write:
        write_bounds(counts)
        return 0
    bounds = read_bounds()
    for line in falls(counts, bounds):
        print(f"below its bound, which --write lowers: {line}")
    found = rises(counts, bounds)
    for line in found:
        print(line)
    return ROSE if found else 0


def _times(options: argparse.Namespace) -> int:
    is_gpu = options.device.startswith("cuda")
    with driven(model_path=options.model_path, device=options.device, compiles=is_gpu) as driver:
        found = ratios(driver, options.units)
    device = torch.cuda.get_device_name(options.device) if is_gpu else platform.processor() or platform.machine()
    where = f"{device}, {options.model_path.name}"
    for kind, ratio in found.items():
        print(f"{where}: {kind} unit {ratio:.2f} times the frozen kernel")
    if options.write:
        write_ratios(where, found, options.file)
        return 0
    recorded = read_ratios(where, options.file)
    if recorded is None:
        print(f"nothing is recorded for {where}; --write does it", file=sys.stderr)
        return UNKNOWN
    lines = slower(found, recorded)
    for line in lines:
        print(line)
    return ROSE if lines else 0


if __name__ == "__main__":
    sys.exit(main())
