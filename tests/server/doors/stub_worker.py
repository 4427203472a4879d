"""A worker whose turns follow a script, and the gateway in front of it."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection

from tests.server.live_gateway import RunningGateway, running_gateway, scripted_worker, wait_until

RATE = 24_000
TEXT = "Hello there."
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(2 * RATE) / RATE)).astype(np.float32)  # two seconds of 440 Hz
USAGE = {"input_tokens": 30, "input_image_tokens": 0, "input_audio_tokens": 12, "text_tokens": 4, "speech_tokens": 50}
PREFILLED = {"type": "prefill_done", "input_tokens": 30}
DONE = {"type": "done", "text": TEXT, "generated_tokens": 4, "input_tokens": 30, "stopped": "stop", "usage": USAGE}
Step = dict[str, Any] | Callable[[ServerConnection], Awaitable[None]]


def chunk(text: str | None = None, pcm: np.ndarray | None = None) -> dict[str, Any]:
    """A message with a part of an answer."""
    sound = {} if pcm is None else {"audio_data": base64.b64encode(pcm.astype("<f4").tobytes()).decode()}
    return {"type": "chunk", **({} if text is None else {"text_delta": text}), **sound}


SPOKEN: list[Step] = [PREFILLED, chunk("Hello"), chunk(" there.", TONE[:RATE]), chunk(None, TONE[RATE:]), DONE]


@dataclass
class StubWorker:
    """What the worker has received, and what it answers.

    Attributes:
        steps: messages to send, or coroutines to run, for each request in turn; the last one again.
        requests: paths and requests.
        n_open: connections that are open.
    """

    steps: list[list[Step]]
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    n_open: int = 0

    async def serve(self, connection: ServerConnection) -> None:
        self.n_open += 1
        try:
            assert connection.request is not None
            self.requests.append((connection.request.path.partition("?")[0], json.loads(await connection.recv())))
            for step in self.steps[min(len(self.requests), len(self.steps)) - 1]:
                if isinstance(step, dict):
                    await connection.send(json.dumps(step))
                else:
                    await step(connection)
            await connection.close(1000, "done")
        finally:
            self.n_open -= 1


async def forever(connection: ServerConnection) -> None:
    """Wait until the gateway has gone."""
    await connection.wait_closed()


@asynccontextmanager
async def stub_gateway(
    *steps: list[Step], slots: int = 2, **options: Any
) -> AsyncIterator[tuple[RunningGateway, StubWorker]]:
    """A gateway and its worker, which answers with these steps. options: of `running_gateway`."""
    worker = StubWorker(list(steps))
    async with scripted_worker(worker.serve, slots) as port, running_gateway(port, **options) as gateway:
        await wait_until(lambda: gateway.gateway.dispatcher.workers.n_ready, "a worker")
        yield gateway, worker


async def until_idle(gateway: RunningGateway, worker: StubWorker, seconds: float) -> None:
    """Wait until neither gateway nor worker has a turn."""
    dispatcher = gateway.gateway.dispatcher
    await wait_until(lambda: not (worker.n_open or dispatcher.workers.leases), "a free slot", seconds)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(scenario())
