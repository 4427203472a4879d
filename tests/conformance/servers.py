"""pytest plugin: a gateway and a worker of the embedded checkpoint, which all tests of a group of files share.

With a client of their WebSockets that knows JSON only.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.e2e.serving import gateway
from tests.scheduling import at_group_end
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.small_worker import small_worker

ANSWER_S = 60.0  # far above any answer: exceeding it means a hang


class WireClient:
    """One WebSocket, as an unmodified client sees it: JSON objects in text frames."""

    def __init__(self, connection: ClientConnection):
        self.connection = connection

    def send(self, **message: Any) -> None:
        self.connection.send(json.dumps(message))

    def receive(self, timeout: float = ANSWER_S) -> dict[str, Any]:
        """The next message. Raises: TimeoutError; EOFError if the connection is over."""
        try:
            data = self.connection.recv(timeout)
        except ConnectionClosed as error:
            raise EOFError(f"the connection is over: {error}") from None
        assert isinstance(data, str), f"expected a text frame, got {len(data)} bytes"
        return json.loads(data)

    def until(self, kind: str, timeout: float = ANSWER_S) -> list[dict[str, Any]]:
        """All messages up to the first one of this type."""
        ends, messages = time.monotonic() + timeout, []
        while not messages or messages[-1]["type"] != kind:
            messages.append(self.receive(max(ends - time.monotonic(), 0.0)))
        return messages

    def silence(self, seconds: float) -> None:
        """Check that no message arrives for this long."""
        try:
            message = self.receive(seconds)
        except TimeoutError:
            return
        raise AssertionError(f"expected no message, got {message}")

    def close_code(self) -> int | None:
        """Wait until the server closes. Returns: the close code."""
        try:
            message = self.receive()
        except EOFError:
            return self.connection.close_code
        raise AssertionError(f"expected the end, got {message}")


@dataclass(frozen=True)
class Servers:
    """A gateway and its worker. gateway: its port."""

    gateway: int
    worker: WorkerProcess

    @contextmanager
    def open(self, path: str) -> Iterator[WireClient]:
        """A client of the gateway. path: for example /ws/duplex/d1."""
        with connect(f"ws://127.0.0.1:{self.gateway}{path}", max_size=None, proxy=None) as connection:
            yield WireClient(connection)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Servers]:
    """Both processes, started by the first test that needs them. Tests leave all slots free and all apps enabled."""
    folder = tmp_path_factory.mktemp("servers")
    flags = ("--gpu-id", "0", "--worker-index", "0")  # as the test scripts of the public implementation start it
    with ExitStack() as stack:
        at_group_end(pytestconfig, stack.close)
        worker = stack.enter_context(small_worker(folder, *flags))
        program = stack.enter_context(gateway(folder, [worker.port]))
        yield Servers(program.port, worker)
