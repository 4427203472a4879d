"""A worker process: start, /health polling, real-time conversations, stop."""

import asyncio
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import websockets

from worker.media import read_units
from worker.protocol.messages import AudioChunk, Prepare, Prepared, Result, Spec, Stop, Stopped, read_server, write

ROOT = Path(__file__).resolve().parents[2]
LISTENING = re.compile(r"listening on \w+://([0-9.]+):([0-9]+)")
EVERY_S = 0.02  # interval of /health polls
MAX_FRAME = 64 * 2**20


class WorkerProcess:
    """`with WorkerProcess(arguments, cache) as worker:` starts a worker and waits until it is ready.

    states: in the order that /health reported them. polls: ms of each /health request, by state. start_s: from process
    launch to ready. health: the last response.
    """

    def __init__(self, arguments: Sequence[str], cache_dir: Path, log: Path):
        self._command = [sys.executable, "-m", "worker.main", "--port", "0", *arguments]
        self._environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache_dir)}
        self._log_path = log
        self.states: list[str] = []
        self.polls: dict[str, list[float]] = defaultdict(list)
        self.health: dict[str, Any] = {}
        self.start_s = 0.0
        self._is_over = threading.Event()

    def __enter__(self) -> "WorkerProcess":
        start = time.perf_counter()
        self._log = self._log_path.open("w")
        self._process = subprocess.Popen(self._command, cwd=ROOT, env=self._environment, stderr=self._log)
        try:
            self.host, self.port = self._address()
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
            while self.health.get("state") != "IDLE":
                self._check()
                time.sleep(EVERY_S)
        except BaseException:
            self._process.kill()
            raise
        self.start_s = time.perf_counter() - start
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._process.send_signal(signal.SIGTERM)
        try:
            self.exit_status = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.exit_status = self._process.wait()
        self._log.close()

    def _check(self) -> None:
        if self._process.poll() is not None:
            last = self._log_path.read_text().strip().splitlines()[-1:]
            raise RuntimeError(f"worker: expected it to start, got exit status {self._process.returncode}: {last}")

    def _address(self) -> tuple[str, int]:
        while (found := LISTENING.search(self._log_path.read_text())) is None:
            self._check()
            time.sleep(EVERY_S)
        return found[1], int(found[2])

    def _watch(self) -> None:
        while not self._is_over.is_set():
            start = time.perf_counter()
            try:
                health = self.ask("GET", "/health")
            except (OSError, http.client.HTTPException):
                return  # the worker is stopping
            self.polls[health["state"]].append(1e3 * (time.perf_counter() - start))
            if self.states[-1:] != [health["state"]]:
                self.states.append(health["state"])
            self.health = health
            time.sleep(EVERY_S)

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """One request on a new connection. Returns: its body."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


@dataclass
class ClientRun:
    """Measurements of one client. replies_ms: from sending a chunk to its result. Results without their sound."""

    replies_ms: list[float] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)


@dataclass(frozen=True)
class ClientScript:
    """Input of clients: seconds of sound and encoded pictures, repeated. spec: encoding of sound."""

    sounds: list[np.ndarray]
    pictures: list[bytes]
    n_units: int
    spec: Spec
    config: dict[str, Any]

    @classmethod
    def of(cls, video: Path, n_units: int, spec: Spec, config: dict[str, Any]) -> "ClientScript":
        """The units of a media file."""
        sounds, pictures = [], []
        for unit in read_units(video):
            jpeg = io.BytesIO()
            if unit.frames:
                unit.frames[0].save(jpeg, "JPEG", quality=70)
                sounds.append(unit.sound)
                pictures.append(jpeg.getvalue())
        return cls(sounds, pictures, n_units, spec, config)

    def chunk(self, number: int) -> str | bytes:
        """The encoded message of a unit."""
        index = number % len(self.sounds)
        return write(AudioChunk(audio_base64=self.sounds[index], frame_base64_list=[self.pictures[index]]), self.spec)


def converse(worker: WorkerProcess, script: ClientScript, n_sessions: int) -> list[ClientRun]:
    """Run concurrent clients. Each sends a unit every second, with its own phase."""
    return asyncio.run(_converse(f"ws://{worker.host}:{worker.port}/ws/duplex", script, n_sessions))


async def _converse(url: str, script: ClientScript, n_sessions: int) -> list[ClientRun]:
    together = asyncio.Barrier(n_sessions)
    return await asyncio.gather(*(_run_client(url, script, k, n_sessions, together) for k in range(n_sessions)))


async def _run_client(
    url: str, script: ClientScript, number: int, n_sessions: int, together: asyncio.Barrier
) -> ClientRun:
    run, sent = ClientRun(), []
    async with websockets.connect(f"{url}?session_id=bench_{number}", max_size=MAX_FRAME, compression=None) as socket:

        async def receive(kind: type) -> Any:
            message = read_server(await socket.recv(), script.spec)
            if not isinstance(message, kind):
                raise RuntimeError(f"client {number}: expected {kind.__name__}, got {message}")
            return message

        await socket.send(write(Prepare(config={**script.config, "seed": number}, spec=script.spec)))
        await receive(Prepared)
        await together.wait()
        loop = asyncio.get_running_loop()
        begin = loop.time() + number / n_sessions

        async def send() -> None:
            for unit in range(script.n_units):
                chunk = script.chunk(unit + 3 * number)
                await asyncio.sleep(begin + unit - loop.time())
                sent.append(loop.time())
                await socket.send(chunk)

        sending = asyncio.create_task(send())
        for unit in range(script.n_units):
            result = await receive(Result)
            run.replies_ms.append(1e3 * (loop.time() - sent[unit]))
            run.results.append(result.model_copy(update={"audio_data": None}))
        await sending
        await socket.send(write(Stop()))
        await receive(Stopped)
    return run
