"""Which plugins a process of the tests loads, and tests to skip without a GPU.

With `-n`, one process distributes the tests and runs none. It imports neither torch nor the servers: the processes that
run tests start after it, so its imports would delay them.
"""

import gc
import os
import sys
from importlib.util import find_spec

import pytest

from tests.programs.ending import end_without_clearing

gc.disable()  # imports make no garbage; `tests.scheduling` enables it
# NumPy reads it when it is imported. Its threads wait for their next product without pause, also in child processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
RUNS_TESTS = ("tests.process_settings", "tests.conformance.servers")


def is_started_by_xdist() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def distributes(arguments: list[str]) -> bool:
    """Whether the command line makes this process distribute tests: xdist starts those that run them without one."""
    return not is_started_by_xdist() and any(one.startswith(("-n", "--numprocesses")) for one in arguments)


if is_started_by_xdist():  # which ignores the exit status
    end_without_clearing()
pytest_plugins = ("tests.scheduling", *(() if distributes(sys.argv) else RUNS_TESTS))

# Tests marked `alone` measure real time. On a machine that others share, a pause of the whole machine fails them.
MAX_RERUNS = 2


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no":  # also with `-n 0`, which distributes nothing
        for name in RUNS_TESTS:
            config.pluginmanager.import_plugin(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.flaky(reruns=MAX_RERUNS))
        if item.get_closest_marker("cluster") and find_spec("ray") is None:
            item.add_marker(pytest.mark.skip(reason="needs the extra `cluster`"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
