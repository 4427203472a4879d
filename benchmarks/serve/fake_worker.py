"""A worker without a model, with slots, states, /health and conversations, and almost no CPU cost.

For gateway benchmarks, and for tests that need a worker which crashes, freezes or loads on command.

    async with FakeWorker(slots=2) as worker:
        ...  # ws://127.0.0.1:{worker.port}/ws/duplex?session_id=me

`python -m benchmarks.serve.fake_worker --port 22400 --slots 32` runs one until SIGTERM.
`fake_replies` contains the conversations.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import re
import signal
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import psutil
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from benchmarks.serve.fake_replies import FakeConversation, UnitScript
from worker import log
from worker.admission.session_capacity import SessionCapacity
from worker.config.compile import CompileConfig
from worker.loop.results import UnitLoad
from worker.protocol.messages import PROTOCOL_VERSION
from worker.status import WIRE_NAMES, State
from worker.version import VERSION

LOG = logging.getLogger("benchmarks.serve.fake_worker")
WAIT_FOR_SLOT_S, POLL_S = 5.0, 0.02
CLOSE_S = 1.0
MAX_FRAME = 160 * 2**20
RESTART = 1012
READY = (State.IDLE, State.BUSY)
STARTING = (State.LOADING, State.COMPILING, State.WARMING_UP, State.UNLOADED)
ODD = re.compile(r"[^A-Za-z0-9_-]")


class FakeWorker:
    """`async with FakeWorker()` starts a server and waits until it listens.

    port: its port. total_requests: units answered. n_late: those of them whose simulated time was above a second.
    n_rebuilt: units that another worker has answered before. dies_rebuilding: number of one at which it crashes.
    memory_share: of its memory in /health.
    unit_s: simulated seconds of a unit among n sessions, which nothing waits for; None: units count with no time.
    think_s, n_listen, n_speak, speaks, script, pause_timeout: reply settings, which may change at any time.
    """

    def __init__(
        self,
        slots: int = 2,
        think_s: float = 0.0,
        port: int = 0,
        n_listen: int = 3,
        n_speak: int = 4,
        speaks: bool = True,
        *,
        host: str = "127.0.0.1",
        gpu_id: int = 0,
        pause_timeout: float = 60.0,
        script: UnitScript | None = None,
        capacity: SessionCapacity | None = None,
        unit_s: Callable[[int], float] | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        """think_s: duration of a unit. port: 0 chooses a free one. n_listen, n_speak: units of a cycle.
        speaks: replies have sound; otherwise only text. pause_timeout: s, for a pause without a timeout. tls: for wss.
        script: decides for each unit, in place of the cycle.
        capacity: how many sessions are admitted; None: as many as there are slots.
        """
        assert n_listen >= 0 and n_speak >= 0 and n_listen + n_speak > 0, (
            "FakeWorker: expected at least one unit per cycle"
        )
        self.slots, self.think_s, self.port = slots, think_s, port
        self.n_listen, self.n_speak, self.speaks, self.pause_timeout = n_listen, n_speak, speaks, pause_timeout
        self.host, self.gpu_id, self.script, self._tls = host, gpu_id, script, tls
        self.capacity, self.unit_s = capacity or SessionCapacity(slots, None), unit_s
        self.total_requests, self.n_rebuilt, self.n_late, self._spent_ms = 0, 0, 0, 0.0
        self.dies_rebuilding: int | None = None
        self.memory_share = 0.1
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.connections: set[_Connection] = set()
        self._conversations: list[FakeConversation] = []
        self._state, self._since = State.IDLE, time.monotonic()
        self._server: Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await serve(
            self._converse,
            self.host,
            self.port,
            process_request=self._receive,
            create_connection=lambda *args, **options: _Connection(self, *args, **options),
            ssl=self._tls,
            compression=None,
            max_size=MAX_FRAME,
            ping_interval=None,
            open_timeout=None,  # a frozen worker keeps its clients waiting
            close_timeout=CLOSE_S,
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.thaw()
        self._server.close(code=RESTART, reason="the worker is shutting down")
        await self._server.wait_closed()

    # --- state ---------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Assign a name of `worker.status.State`. IDLE and BUSY follow the number of sessions."""
        if self._state in READY:
            return State.BUSY if self._conversations else State.IDLE
        return self._state

    @state.setter
    def state(self, name: str) -> None:
        self._state, self._since = State(name), time.monotonic()

    @property
    def is_ready(self) -> bool:
        return self._state in READY

    @property
    def sessions(self) -> dict[str, int]:
        """Session -> number of units, for open sockets. A session is removed before its client receives the close."""
        return {conversation.name: conversation.units for conversation in self._conversations}

    @property
    def is_thinking(self) -> bool:
        """Whether a unit runs."""
        return any(conversation.is_thinking for conversation in self._conversations)

    def count(self, ms: float) -> None:
        """Count an answered unit."""
        self.total_requests += 1
        self._spent_ms += ms
        if self.unit_s is not None:
            n = len(self._conversations)
            seconds = self.unit_s(n)
            self.n_late += seconds > 1
            self.capacity.record(UnitLoad(seconds, n), spoke=True)

    # --- faults --------------------------------------------------------------------------------

    def crash(self) -> None:
        """Abort every connection without a close frame, and stop listening."""
        self._server.server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        self._conversations.clear()
        self.thawed.set()  # waiting tasks then find their connection aborted

    def freeze(self) -> None:
        """Keep connections open and accept new ones, but read and answer nothing."""
        self.thawed.clear()
        for connection in self.connections:
            connection.transport.pause_reading()

    def thaw(self) -> None:
        """Continue, with everything received since `freeze`."""
        self.thawed.set()
        for connection in list(self.connections):
            connection.thaw()

    # --- requests ------------------------------------------------------------------------------

    async def _receive(self, connection: "_Connection", request: Request) -> Response | None:
        """Answer an HTTP request, or None to continue the handshake."""
        url = urlsplit(request.path)
        match url.path:
            case "/health":
                return _json(200, self.health())
            case "/livez":
                failed = self.state is State.FAILED
                return _json(503 if failed else 200, {"alive": not failed, "error": self._error})
            case "/readyz":
                body = {"ready": self.is_ready, "state": self.state, "free_slots": self._n_free}
                return _json(200 if self.is_ready else 503, body)
            case "/ws/duplex":
                if "upgrade" not in request.headers.get("Connection", "").lower():
                    return _json(404, {"detail": "Not Found"})
                [name] = parse_qs(url.query).get("session_id", ["duplex"])[:1]
                return await self._admit(connection, ODD.sub("_", name)[:128])
        return _json(404, {"detail": "Not Found"})

    async def _admit(self, connection: "_Connection", name: str) -> Response | None:
        until = time.monotonic() + WAIT_FOR_SLOT_S
        while self.is_ready and not self._n_free and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
        await self.thawed.wait()
        if not self.is_ready or not self._n_free or connection not in self.connections:
            return _json(403, {"detail": "Forbidden"})
        conversation = FakeConversation(self, name, connection, lambda: self._free(conversation))
        self._conversations.append(conversation)
        connection.conversation = conversation
        return None

    def _free(self, conversation: FakeConversation) -> None:
        with suppress(ValueError):  # the slot was released before
            self._conversations.remove(conversation)

    def forget(self, connection: "_Connection") -> None:
        """Remove a closed connection."""
        self.connections.discard(connection)
        if connection.conversation is not None:
            self._free(connection.conversation)

    async def _converse(self, connection: "_Connection") -> None:
        try:
            await connection.conversation.run()
        except* ConnectionClosed:
            LOG.debug("session %s: client disconnected", connection.conversation.name)

    @property
    def _n_free(self) -> int:
        return max(0, self.capacity.capacity - len(self._conversations))

    @property
    def _error(self) -> str | None:
        return "set to FAILED" if self.state is State.FAILED else None

    def health(self) -> dict[str, Any]:
        """The body of /health, with every key of a worker's."""
        state, paused = self.state, sum(conversation.paused for conversation in self._conversations)
        worker_status = WIRE_NAMES[state]
        if self._conversations and paused == len(self._conversations) and state is State.BUSY:
            worker_status = "duplex_paused"
        # One row per unit, since there is no context.
        rows = [conversation.units for conversation in self._conversations]
        compile_config = CompileConfig()
        return {
            "status": "error" if state is State.FAILED else "initializing" if state in STARTING else "healthy",
            "worker_status": worker_status,
            "gpu_id": self.gpu_id,
            "model_loaded": self.is_ready,
            "current_session_id": self._conversations[0].name if self._conversations else None,
            "total_requests": self.total_requests,
            "avg_inference_time_ms": round(self._spent_ms / self.total_requests, 1) if self.total_requests else 0.0,
            "early_units": {"speculations": 0, "committed": 0, "wasted_ms": 0.0, "default": "off"},
            "early_pictures": {"encoded": 0, "used": 0, "fed": 0, "spent_ms": 0.0},
            "kv_cache_length": max(rows, default=0),
            "state": state.value,
            "error": self._error,
            "progress": {"what": "", "done": 0, "total": 0, "seconds": round(time.monotonic() - self._since, 1)},
            "start_seconds": {},
            "slots": {"total": self.capacity.capacity, "free": self._n_free, "paused": paused},
            "admission": self.capacity.report(len(self._conversations)).body(),
            "sessions": [
                {
                    "session_id": conversation.name,
                    "units": conversation.units,
                    "paused": conversation.paused,
                    "kv_rows": conversation.units,
                }
                for conversation in self._conversations
            ],
            "models": {
                "omni": True,
                "speech": None,
                "speech_path": None,
                "speech_error": None,
                "conversion": None,
                "conversion_path": None,
                "conversion_error": None,
            },
            "model": {
                "path": "null",
                "random_weights": False,
                "dtype": None,
                "precision": None,
                "precision_label": None,
                "converted_to": None,
                "speaks": self.speaks,
                "side_lane": False,
                "weights": None,
            },
            "device": {"type": "cpu", "name": platform.processor() or platform.machine(), "asked": "cpu"},
            "kv": {"used": sum(rows), "total": 0, "layout": None},
            "memory": {"resident": psutil.Process().memory_info().rss},
            "memory_share": self.memory_share,
            "allocator": None,
            "compile": {
                "enabled": False,
                "mode": compile_config.mode,
                "dynamic": compile_config.dynamic,
                "cuda_graphs": compile_config.cuda_graphs,
                "toggles": {},
                "notes": [],
                "targets": {},
                "regions": {},
                "counts": {},
                "after_warm_up": {},
                "cache": None,
            },
            "versions": {
                "duologue": VERSION,
                "protocol": PROTOCOL_VERSION,
                "python": platform.python_version(),
                "torch": None,
                "triton": None,
                "cuda": None,
                "driver": None,
            },
        }


class _Connection(ServerConnection):
    """A client's connection that can be frozen: data already read is kept for later."""

    def __init__(self, worker: FakeWorker, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._worker = worker
        self._kept: list[bytes] = []
        self.conversation: FakeConversation | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._worker.connections.add(self)
        if not self._worker.thawed.is_set():
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self._worker.thawed.is_set():
            super().data_received(data)
        else:  # websockets resumes reading itself
            self._kept.append(data)

    def thaw(self) -> None:
        kept, self._kept = self._kept, []
        for data in kept:
            super().data_received(data)
        self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.forget(self)
        super().connection_lost(exc)


def _json(status: int, body: dict[str, Any]) -> Response:
    data = json.dumps(body).encode()
    headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(data)), "Connection": "close"})
    return Response(status, HTTPStatus(status).phrase, headers, data)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.fake_worker", description="A worker without a model."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    parser.add_argument("--port", type=int, default=22_400, metavar="N", help="0: any; default: %(default)s")
    parser.add_argument("--slots", type=int, default=2, metavar="N", help="sessions at once; default: %(default)s")
    parser.add_argument("--think-ms", type=float, default=0.0, metavar="N", help="duration of a unit; default: 0")
    parser.add_argument(
        "--listen", type=int, default=3, metavar="N", help="listening units of a cycle; default: %(default)s"
    )
    parser.add_argument(
        "--speak", type=int, default=4, metavar="N", help="speaking units after them; default: %(default)s"
    )
    parser.add_argument("--no-voice", action="store_true", help="reply with text only")
    parser.add_argument("--gpu-id", type=int, default=0, metavar="N", help="GPU number in /health")
    parser.add_argument("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR")
    return parser


async def _run(options: argparse.Namespace) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with FakeWorker(
        options.slots,
        options.think_ms / 1000,
        options.port,
        options.listen,
        options.speak,
        not options.no_voice,
        host=options.host,
        gpu_id=options.gpu_id,
    ) as worker:
        LOG.info("listening on %s:%d", worker.host, worker.port)
        await stop.wait()


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    log.set_up(log.level_of(options.log_level, os.environ))
    asyncio.run(_run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
