"""`python -m tests.traces DIR [DIR ...]`: replays recorded sessions on the engine; exits 1 on any difference.

Every trace runs alone and all of them in one engine; then the folder's recorded parts. One line per trace, one more
for each check that failed.
"""

import argparse
import sys
import time
from collections.abc import Iterator

import torch

from tests.traces.folder import TraceError, TraceFolder
from tests.traces.run import Outcome, run_alone, run_cases, run_together
from tests.traces.stage import RecordedModel


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.traces", description=__doc__)
    parser.add_argument("dirs", nargs="+", metavar="DIR", help="folder with a checkpoint, inputs and traces")
    parser.add_argument("--trace", metavar="NAME", help="only this trace, alone; no recorded parts")
    parser.add_argument("--alone", action="store_true", help="leave out the run of all traces in one engine")
    parser.add_argument("--device", default="cpu", help="where the engine runs")
    options = parser.parse_args(arguments)
    n_failed = 0
    for path in options.dirs:
        try:
            for outcome in _outcomes(TraceFolder(path), options):
                n_failed += _show(path, outcome)
        except TraceError as error:
            print(f"{path}: {error}")
            n_failed += 1
    print(f"{n_failed} checks failed" if n_failed else "everything agrees")
    return int(n_failed > 0)


def _outcomes(folder: TraceFolder, options: argparse.Namespace) -> Iterator[Outcome]:
    cast = RecordedModel.of(folder, options.device)
    if options.trace:
        folder.trace(options.trace)
        yield from run_alone(cast, [options.trace])
        return
    yield from run_alone(cast, folder.names)
    if not options.alone:
        yield from run_together(cast, folder.names)
    yield run_cases(cast)


def _show(path: str, outcome: Outcome) -> int:
    checks, misses = outcome.report.checks, outcome.report.misses
    print(f"{path}: {outcome.name} ({outcome.how}): {len(checks)} checks, {len(misses)} failed", flush=True)
    for miss in misses:
        print(f"  MISS {miss.case:<32} {miss.name:<28} {miss.detail}")
    return len(misses)


if __name__ == "__main__":
    torch.set_num_threads(1)
    started = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(code)
