"""The processes that hold the connections of calls: their start, the link to each, whether they answer, and their end.

aiortc is written in Python: what it does for a packet would delay the event loop that relays units.
"""

import asyncio
import importlib.util
import logging
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from typing import Protocol

from server.doors.errors import ApiError
from server.metrics import GatewayMetrics
from server.peers.frames import FrameKind, LinkFrame, read_frame, write_frame
from worker.config.service import ROOT
from worker.config.webrtc import WebRtcConfig

LOG = logging.getLogger(__name__)
ANSWER_S = 15.0  # for the answer to an offer, candidates of STUN and TURN servers included
START_S = 30.0
STOP_S = 5.0
PING_S = 2.0  # between two pings
# Pings without an answer, until a process is ended. Counted rather than timed: a gateway that did not run meanwhile
# has not read the answers.
MAX_UNANSWERED, MAX_UNANSWERED_AT_START = 5, 30
RETRY_S = 10
NEEDED = "aiortc"
EXTRA = f"WebRTC calls: expected the package {NEEDED}, got none; install the extra `webrtc` on the server"


class PeerListener(Protocol):
    """A call, for the link to its process."""

    def on_frame(self, frame: LinkFrame) -> None:
        """The process sends something."""

    def on_lost(self) -> None:
        """The process has ended, and the connection with it."""


class PeerProcess:
    """One process, started with its first call and again after its end. config: settings of calls."""

    def __init__(self, config: WebRtcConfig, metrics: GatewayMetrics):
        self._config, self._metrics = config, metrics
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._n_unanswered = 0  # pings
        self._calls: dict[int, PeerListener] = {}
        self._last = 0

    @property
    def n_calls(self) -> int:
        return len(self._calls)

    @property
    def pid(self) -> int | None:
        """Of the running process; None if none runs."""
        return None if self._process is None else self._process.pid

    @property
    def is_silent(self) -> bool:
        """Whether the process runs but does not answer now."""
        return self._n_unanswered > 1

    async def start(self) -> None:
        """Start the process, if it does not run. The start goes on if this call is cancelled."""
        if self._starting is not None or self._writer is None:
            self._starting = self._starting or asyncio.create_task(self._start(), name="peer-start")
            await asyncio.shield(self._starting)

    async def _start(self) -> None:
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "server.peers.main", str(theirs.fileno())]
                # A session of its own: the terminal's interrupt is for the gateway, which drains its calls.
                self._process = await asyncio.to_thread(
                    subprocess.Popen,
                    command,
                    cwd=ROOT,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            write_frame(self._writer, FrameKind.SETTINGS, 0, self._config.model_dump_json().encode())
            self._reading = asyncio.create_task(self._read(reader, self._writer), name="peer-link")
            self._watching = asyncio.create_task(self._watch(self._process, self._writer), name="peer-watch")
            LOG.info("process %d holds connections of calls", self._process.pid)
        finally:
            self._starting = None

    def add(self, call: PeerListener) -> int:
        """Count a call as one of this process. Returns: its number."""
        self._last += 1
        self._calls[self._last] = call
        return self._last

    def remove(self, number: int) -> None:
        """The call is over."""
        if self._calls.pop(number, None) is not None:
            self.send(FrameKind.CLOSE, number)

    def send(self, kind: FrameKind, number: int, *parts: bytes) -> None:
        """Send a frame of a call."""
        if self._writer is not None and not write_frame(self._writer, kind, number, *parts):
            LOG.warning("a process of calls does not read: a frame is dropped")

    async def stop(self) -> None:
        """End the process; it ends with its link."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        process, writer = self._process, self._writer
        if writer is not None:
            writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if process is not None:
            await asyncio.to_thread(_reap, process)
        self._lost()

    async def _watch(self, process: "subprocess.Popen[bytes]", writer: asyncio.StreamWriter) -> None:
        """End the process once it answers nothing, which ends the link."""
        self._n_unanswered, limit = 0, MAX_UNANSWERED_AT_START
        while self._n_unanswered < limit:
            self._n_unanswered += 1
            write_frame(writer, FrameKind.PING, 0)
            await asyncio.sleep(PING_S)
            if not self._n_unanswered:
                limit = MAX_UNANSWERED
        LOG.error("process %d answers nothing, and is ended", process.pid)
        process.kill()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                frame = await read_frame(reader)
                self._n_unanswered = 0
                call = self._calls.get(frame.call)
                if call is not None:
                    self._pass_on(frame, call)
        writer.close()
        process = self._process
        if process is not None:
            await asyncio.to_thread(_reap, process)
            LOG.error(
                "process %d has ended with status %s, and %d calls with it",
                process.pid,
                process.returncode,
                self.n_calls,
            )
            self._metrics.record_call_process_lost()
        self._lost()

    def _pass_on(self, frame: LinkFrame, call: PeerListener) -> None:
        """Give a frame to its call; an error ends that call alone."""
        try:
            call.on_frame(frame)
        except Exception:
            LOG.exception("a call of process %s fails at %s", self.pid, frame.kind.name)
            call.on_lost()

    def _lost(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._process = self._writer = self._reading = self._watching = None
        self._n_unanswered = 0
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.on_lost()


class PeerProcesses:
    """All processes of a gateway."""

    def __init__(self, config: WebRtcConfig, metrics: GatewayMetrics):
        self._config = config
        self.all = [PeerProcess(config, metrics) for _ in range(config.processes)]

    def check(self) -> None:
        """Raises: ApiError if this gateway accepts no calls."""
        if not self._config.enabled:
            raise ApiError(404, "WebRTC calls: expected service.webrtc.enabled, got false")
        if not _is_installed(NEEDED):
            raise ApiError(501, EXTRA, type="server_error", code="not_implemented")

    async def start(self) -> None:
        """Start all processes, if the settings say so."""
        if self._config.preload and self._config.enabled and _is_installed(NEEDED):
            for process in self.all:
                await process.start()

    async def stop(self) -> None:
        """End all processes."""
        await asyncio.gather(*(process.stop() for process in self.all))

    def choose(self) -> PeerProcess:
        """The process with the fewest calls of those that answer. Raises: ApiError if all have as many as they may."""
        process = min(self.all, key=lambda one: (one.is_silent, one.n_calls))
        if process.n_calls >= self._config.max_calls:
            message = f"calls: expected at most {self._config.max_calls * len(self.all)} at once, got one more"
            raise ApiError(503, message, headers={"retry-after": str(RETRY_S)})
        return process


@cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _reap(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the process has ended, and end it if it does not."""
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
