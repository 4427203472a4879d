"""Gateway and worker processes for browser tests."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.programs.start import start

# Flags of a fake worker that listens for a second and then speaks for eight.
TALKATIVE = ("--slots", "4", "--listen", "1", "--speak", "8")
START_S = 120.0
POLL_S = 0.02


class ServerProcess:
    """`python -m command...` in the root folder, until `kill`. port: port that it listens on."""

    def __init__(self, *command: str, port: int = 0):
        """port: 0 reads it from the log."""
        self.process = start(command[0], command[1:])
        self.port = port
        self.lines: list[str] = []
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, name="program-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "listening on " in line:
                self.port = int(line.rstrip().rpartition(":")[2])
                self._listens.set()
        self._listens.set()  # the process has ended

    def wait_line(self, text: str, timeout: float = START_S) -> None:
        """Wait for a log line that contains this text."""
        until = time.monotonic() + timeout
        while not any(text in line for line in self.lines):
            assert self.process.poll() is None and time.monotonic() < until, f"expected {text!r}, got:\n{self.log}"
            time.sleep(POLL_S)

    def wait_listening(self, timeout: float = START_S) -> int:
        assert self._listens.wait(timeout) and self.port, f"expected a program that listens, got:\n{self.log}"
        return self.port

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()


class CutProxy:
    """A TCP proxy in front of a port of this machine, on a thread, whose connections can be cut. port: its own."""

    def __init__(self, target: int):
        self.port, self._target = 0, target
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cut-proxy", daemon=True)
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self.port = starting.result(START_S).sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there_writer}
        await asyncio.gather(self._pass(reader, there_writer), self._pass(there_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()
        self._writers.discard(writer)

    def cut(self) -> None:
        """Abort all connections, without a close frame or a FIN."""

        async def abort() -> None:
            for writer in list(self._writers):
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(abort(), self._loop).result(START_S)

    def close(self) -> None:
        """Stop, with all connections."""

        async def end() -> None:
            serving = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

        self.cut()
        asyncio.run_coroutine_threadsafe(end(), self._loop).result(START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def fake_worker(*flags: str) -> Iterator[ServerProcess]:
    """A worker without a model. flags: of `benchmarks.serve.fake_worker`."""
    program = ServerProcess("benchmarks.serve.fake_worker", "--port", "0", *flags)
    try:
        program.wait_listening()
        yield program
    finally:
        program.kill()


@contextmanager
def gateway(
    folder: Path, workers: Sequence[int], *flags: str, config: dict | None = None, port: int | None = None
) -> Iterator[ServerProcess]:
    """A gateway in front of workers on these ports, which are all ready.

    Args:
        folder: for the settings file and data.
        workers: their ports.
        flags: of the gateway.
        config: contents of the settings file.
        port: None selects a free one.
    """
    path = folder / "gateway.json"
    given = config or {}
    service = {"data_dir": str(folder / "data"), **given.get("service", {})}
    path.write_text(json.dumps({**given, "service": service}), encoding="utf-8")
    addresses = ",".join(f"127.0.0.1:{port}" for port in workers)
    program = ServerProcess(
        *("server.main", "--config", str(path), "--http", "--port", str(port or free_port()), "--workers", addresses),
        *flags,
    )
    try:
        program.wait_listening()
        for index in range(len(workers)):
            program.wait_line(f"worker_{index} (127.0.0.1:{workers[index]}) is ready")
        yield program
    finally:
        program.kill()


@contextmanager
def gateway_with_fake_worker(
    folder: Path, *flags: str, config: dict | None = None, queue: int = 100
) -> Iterator[ServerProcess]:
    """A gateway in front of one fake worker. flags: of the fake worker. queue: maximum number of waiting clients."""
    with ExitStack() as stack:
        worker = stack.enter_context(fake_worker(*flags))
        yield stack.enter_context(gateway(folder, [worker.port], "--max-queue-size", str(queue), config=config))
