"""Labels in the address of each door: the worker that they name, and refusals."""

import asyncio
from typing import Any

import numpy as np
import pytest
import websockets

from benchmarks.serve.fake_worker import FakeWorker
from models.checkpoint.embedded import DEFAULT
from server.doors.core.sound_formats import encoded
from tests.server.live_gateway import RunningGateway, running_gateway, wait_until

MODEL = f"model={DEFAULT.name}"
WAV = encoded(np.zeros(16_000, np.float32), "wav")
SOCKETS = (
    f"/v1/realtime?{MODEL}&",
    "/v1/live/sessions?",
    f"/v1/duplex?{MODEL}&",
    f"/v1/realtime?duplex=1&{MODEL}&",
    "/v1/realtime?mode=audio&",
)
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"json": {"model": DEFAULT.name, "messages": [{"role": "user", "content": "Hi"}]}},
    "/v1/audio/speech": {"json": {"model": DEFAULT.name, "input": "Hi", "voice": "alloy"}},
    "/v1/audio/conversions": {"data": {"model": DEFAULT.name, "voice": "alloy"}, "files": {"file": WAV}},
    "/api/chat": {"json": {"messages": [{"role": "user", "content": "Hi"}]}},
}


class LabelledWorker(FakeWorker):
    """A worker with the label `precision:` and this name."""

    def __init__(self, precision: str):
        super().__init__(slots=8)
        self.precision = precision

    def health(self) -> dict[str, Any]:
        return {**super().health(), "model": {"path": "/weights/tiny", "precision_label": self.precision}}


async def statuses_of(gateway: RunningGateway, path: str, labels: str) -> tuple[int, str]:
    """Status and body of a refusal at a socket's path."""
    with pytest.raises(websockets.InvalidStatus) as refused:
        await websockets.connect(f"ws://127.0.0.1:{gateway.port}{path}labels={labels}")
    return refused.value.response.status_code, refused.value.response.body.decode()


def test_each_door_passes_labels_on() -> None:
    async def scenario() -> None:
        async with (
            LabelledWorker("fp8") as fp8,
            LabelledWorker("bf16") as bf16,
            running_gateway(fp8, bf16) as gateway,
        ):
            workers = gateway.gateway.dispatcher.workers
            await wait_until(lambda: workers.n_ready == 2, "two workers")
            missing, many = "precision:int3", ",".join(map(str, range(9)))
            for path, request in REQUESTS.items():
                for labels, expected in ((missing, {503}), (many, {400, 422})):
                    response = await gateway.http.post(f"{path}?labels={labels}", **request)
                    assert response.status_code in expected, f"{path}: {response.status_code} {response.text}"
                    assert "labels: expected" in response.text, f"{path}: {response.text}"
            for path in SOCKETS:
                for labels, expected in ((missing, {503}), (many, {400})):
                    status, text = await statuses_of(gateway, path, labels)
                    assert status in expected and "labels: expected" in text, f"{path}: {status} {text}"
            status, text = await statuses_of(gateway, "/v1/audio/speech/stream?", many)
            assert status == 400 and "labels: expected" in text
            opened = []
            for index, path in enumerate(SOCKETS):
                url = f"ws://127.0.0.1:{gateway.port}{path}labels=precision:bf16"
                opened.append(await websockets.connect(url))
                await wait_until(lambda n=index + 1: len(workers.all[1].leases) == n, f"a lease of {path}")
            assert not workers.all[0].leases
            for socket in opened:
                await socket.close()

    asyncio.run(scenario())
