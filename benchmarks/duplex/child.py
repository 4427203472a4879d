"""The process of one part of the unit benchmark: `python -m benchmarks.duplex.child JOB.json`.

Loads libraries as a worker's process does; `duplex_job` does the rest. Started by `benchmarks.duplex`.
"""

import gc


def main() -> None:
    gc.disable()  # as in `worker.main`
    from benchmarks.duplex.job import main as run
    from worker.start.memory import freeze_heap

    gc.enable()
    freeze_heap()
    run()


if __name__ == "__main__":
    main()
