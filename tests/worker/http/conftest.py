"""A small worker process for each file, and the results of undisturbed sessions on it."""

from collections.abc import Callable, Iterator

import pytest

from tests.worker.http.processes import WorkerProcess
from tests.worker.http.small_worker import N_SLOTS, small_worker, undisturbed_results
from worker.protocol.messages import Result


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with small_worker(tmp_path_factory.mktemp("worker")) as process:
        yield process


@pytest.fixture
def all_slots_free(worker: WorkerProcess) -> Iterator[None]:
    """Check that the test leaves all slots free."""
    yield
    worker.wait_free(N_SLOTS)


@pytest.fixture(scope="module")
def alone(worker: WorkerProcess) -> Callable[..., list[Result]]:
    return undisturbed_results(worker)
