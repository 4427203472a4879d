"""A gateway with one worker of the embedded checkpoint, started once for all conformance tests of a test process."""

from collections.abc import Iterator

import pytest

from tests.conformance.servers import Servers
from tests.e2e.serving import gateway
from tests.worker.http.small_worker import small_worker


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("conformance")
    flags = ("--gpu-id", "0", "--worker-index", "0")  # as the test scripts of the public implementation start it
    with small_worker(folder, *flags) as worker, gateway(folder, [worker.port]) as program:
        yield Servers(program.port, worker)
