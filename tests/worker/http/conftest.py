"""The worker that the tests of a process share, and the results of undisturbed sessions on it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.conformance.servers import Servers
from tests.scheduling import at_group_end
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.small_worker import N_SLOTS, small_worker, undisturbed_results
from worker.protocol.messages import Result

Undisturbed = Callable[..., list[Result]]


@pytest.fixture(scope="session")
def small_workers(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Callable[[], tuple[WorkerProcess, Undisturbed]]]:
    """A function that returns the worker and its results. It starts another one if a file left it stopped or in use."""
    with ExitStack() as stack:
        at_group_end(pytestconfig, stack.close)
        found = [(servers.worker, undisturbed_results(servers.worker))]

        def idle_worker() -> tuple[WorkerProcess, Undisturbed]:
            if not is_idle(found[-1][0]):
                stack.close()
                process = stack.enter_context(small_worker(tmp_path_factory.mktemp("worker")))
                found.append((process, undisturbed_results(process)))
            return found[-1]

        yield idle_worker


def is_idle(worker: WorkerProcess) -> bool:
    try:
        worker.wait_free(N_SLOTS)
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module")
def worker(small_workers: Callable[[], tuple[WorkerProcess, Undisturbed]]) -> WorkerProcess:
    return small_workers()[0]


@pytest.fixture
def all_slots_free(worker: WorkerProcess) -> Iterator[None]:
    """Check that the test leaves all slots free."""
    yield
    worker.wait_free(N_SLOTS)


@pytest.fixture(scope="module")
def alone(small_workers: Callable[[], tuple[WorkerProcess, Undisturbed]], worker: WorkerProcess) -> Undisturbed:
    return small_workers()[1]
