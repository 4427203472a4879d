"""The process of one part of the unit benchmark: `python -m benchmarks.duplex.child JOB.json`.

Imports libraries with the same garbage-collector settings as a worker; `benchmarks.duplex.job` runs the job.
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
