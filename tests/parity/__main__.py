"""`python -m tests.parity DIR [DIR ...]`: every stage on golden directories; exits 1 on any miss."""

import argparse
import sys

from tests.parity.run import run_parity


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("dirs", nargs="+", metavar="DIR", help="folder of *.safetensors with what describes them")
    parser.add_argument("--stage", help="only stages whose name starts with this")
    args = parser.parse_args()
    failed = False
    for path in args.dirs:
        report, stages = run_parity(path, only=args.stage)
        print(f"{path}: stages {', '.join(stages) or 'none'}")
        print(report)
        failed |= bool(report.misses) or not report.checks
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
