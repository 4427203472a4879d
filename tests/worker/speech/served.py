"""A worker with the tiny speech model alone, in this process, and its sockets."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from websockets.sync.client import ClientConnection, connect

from worker.config.service import load_config
from worker.http.app import build_app
from worker.http.metrics import WorkerMetrics
from worker.http.socket import WorkerSockets
from worker.protocol.connection import begin, listen, live_server
from worker.service import Service
from worker.serving import worker_settings
from worker.status import State

PATIENCE_S = 60.0
N_SLOTS = 2
FRAME = 1920  # samples
Message = dict[str, Any]


class Talk:
    """A connection to `/ws/speak`."""

    def __init__(self, connection: ClientConnection):
        self._connection = connection

    def send(self, **message: Any) -> None:
        self._connection.send(json.dumps(message))

    def receive(self) -> Message:
        message: Message = json.loads(self._connection.recv(PATIENCE_S))
        return message

    def rest(self) -> tuple[np.ndarray, list[Message]]:
        """The sound of the messages up to the last one, and the messages."""
        messages: list[Message] = []
        while not messages or messages[-1]["type"] not in ("done", "error", "timeout"):
            messages.append(self.receive())
        return sound_of(messages), messages


class SpeechWorker:
    """The service, and a client of its routes."""

    def __init__(self, service: Service, port: int, client: httpx.Client):
        self.service, self.client, self.port = service, client, port

    @contextmanager
    def talk(self, **request: Any) -> Iterator[Talk]:
        """A connection with a request sent."""
        url = f"ws://127.0.0.1:{self.port}/ws/speak?session_id=test"
        with connect(url, max_size=None, proxy=None) as connection:
            talk = Talk(connection)
            talk.send(**{"type": "speak", "seed": 5, "text": "Hi.", **request})
            yield talk

    def speak(self, **request: Any) -> tuple[np.ndarray, list[Message]]:
        """The sound of a request, and all messages."""
        with self.talk(**request) as talk:
            return talk.rest()

    def refused(self, **request: Any) -> str:
        """The error of a request."""
        *_, last = self.speak(**request)[1]
        assert last["type"] == "error", f"expected an error, got {last}"
        return str(last["error"])

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, f"expected {what} within {PATIENCE_S} s"
            time.sleep(0.01)

    def wait_ready(self) -> None:
        states = (State.IDLE, State.BUSY, State.FAILED)
        self.wait_until(lambda: self.service.status.state in states, "a start that ends")
        assert self.service.is_ready, self.service.status.now

    def wait_free(self) -> None:
        self.wait_until(lambda: not self.health()["models"]["speech"]["slots"]["total"] - self.free, "free slots")

    @property
    def free(self) -> int:
        return int(self.health()["models"]["speech"]["slots"]["free"])

    def health(self) -> Message:
        health: Message = self.client.get("/health").json()
        return health


def sound_of(messages: list[Message]) -> np.ndarray:
    chunks = [base64.b64decode(one["audio_data"]) for one in messages if one["type"] == "chunk"]
    return np.frombuffer(b"".join(chunks), "<f4")


@contextmanager
def speech_worker(folder: Path, data: Path, **flags: object) -> Iterator[SpeechWorker]:
    """A worker of this checkpoint. data: folder of registered voices. flags: further settings by name."""
    given = {
        "model.omni": False,
        "model.speech_path": folder,
        "model.speech_sessions": N_SLOTS,
        "model.speech_context_rows": 256,
        "model.device": "cpu",
        "service.data_dir": data,
        **flags,
    }
    config, _ = load_config(None, flags=given, environ={})
    service, metrics = Service(worker_settings(config)), WorkerMetrics()
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    service.start()
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = live_server(build_app(service, metrics, WorkerSockets(service, metrics)))

    async def serve() -> None:
        serving = await begin(server, listening, "http")
        assert serving is not None, "expected a server that listens"
        await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_S) as client:
            worker = SpeechWorker(service, port, client)
            worker.wait_until(lambda: server.started, "a server that listens")
            worker.wait_ready()
            yield worker
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        service.shut_down()
        torch.set_num_threads(n_threads)
