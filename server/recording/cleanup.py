"""`python -m server.recording.cleanup`: removes old recordings and traces by hand, with the gateway running or not.

Exit status: 0; 1 if a recording could not be removed; 2 for invalid arguments.
"""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from server.recording.retention import BYTES_PER_GB, RetentionLimits, clean_up, clean_up_traces
from server.recording.store import RecordingStore
from worker.config.service import TRACE_FOLDER


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m server.recording.cleanup", description="Removes old recordings.")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--retention-days", type=float, default=30, metavar="N", help="-1: no limit; default: %(default)s"
    )
    parser.add_argument("--max-gb", type=float, default=50, metavar="N", help="-1: no limit; default: %(default)s")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    store = RecordingStore(args.data_dir / "sessions")
    try:
        limits, now = RetentionLimits(args.retention_days, args.max_gb), datetime.now(UTC)
        removed = clean_up(store, limits, now)
        n_traces = clean_up_traces(args.data_dir / TRACE_FOLDER, limits, now)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"removed {removed.n_expired} recordings by age and {removed.n_for_space} by size, ", end="")
    print(f"{removed.n_bytes / BYTES_PER_GB:.3f} GB, and {n_traces} traces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
