"""`python -m benchmarks.turns.worker`: a worker whose decisions are scripted, for measurements with random weights.

Takes the arguments of `worker.main` and those of the script. Everything but the choice of text tokens is the worker's
own: a session named by `script.PREFIX` runs prefills, the sampler, speech and vocoder as any other.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from worker import main as worker_main

if TYPE_CHECKING:
    from worker.loop.observer import Observer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns.worker", description=__doc__.partition("\n")[0])
    parser.add_argument("--silence-ms", type=int, default=200, help="silence at a unit's end that is answered")
    parser.add_argument("--answer-units", type=int, default=2, help="seconds of an answer")
    options, rest = parser.parse_known_args()

    def observer() -> "Observer":
        from benchmarks.turns.script import SilenceScript  # imports torch

        return SilenceScript(silence_ms=options.silence_ms, answer_units=options.answer_units)

    return worker_main.main(rest, observer)


if __name__ == "__main__":
    sys.exit(main())
