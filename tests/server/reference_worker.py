"""A worker with the routes and messages of the public implementation's workers, and few fields in each.

Its health has no `state` and no `slots`. Its handlers return without a close frame.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse

from tests.server.live_gateway import wait_until
from worker.protocol.connection import listen

MAX_FRAME = 160 * 2**20


@dataclass
class ReferenceWorker:
    """Attributes: go: answers wait for it. received: messages and bodies. cancelled: answers whose client went away."""

    port: int = 0
    status: str = "idle"
    chat_status: int = 200
    go: asyncio.Event = field(default_factory=asyncio.Event)
    received: list[Any] = field(default_factory=list)
    cancelled: int = 0


@asynccontextmanager
async def reference_worker() -> AsyncIterator[ReferenceWorker]:
    """A worker that listens on a free port and answers at once, until `go` is cleared."""
    worker = ReferenceWorker()
    worker.go.set()
    config = uvicorn.Config(
        _app(worker), log_config=None, lifespan="off", ws="websockets-sansio", ws_max_size=MAX_FRAME
    )
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0) as bound:
        worker.port = bound.getsockname()[1]
        serving = asyncio.create_task(server.serve([bound]))
        await wait_until(lambda: server.started or serving.done(), "the worker to start")
        try:
            yield worker
        finally:
            server.should_exit = server.force_exit = True
            await serving


async def _until_go(worker: ReferenceWorker, socket: WebSocket) -> bool:
    """Wait for `go`. Returns: False if the client leaves first."""
    waiting, reading = asyncio.create_task(worker.go.wait()), asyncio.create_task(socket.receive())
    await asyncio.wait((waiting, reading), return_when=asyncio.FIRST_COMPLETED)
    for task in (waiting, reading):
        task.cancel()
    return worker.go.is_set()


def _app(worker: ReferenceWorker) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "healthy", "worker_status": worker.status, "gpu_id": 0, "model_loaded": True}

    @app.post("/chat")
    async def chat(request: Request) -> Any:
        worker.received.append(await request.json())
        waiting, leaving = asyncio.create_task(worker.go.wait()), asyncio.create_task(request.receive())
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            worker.cancelled += 1
        leaving.cancel()
        if worker.chat_status != 200:
            return JSONResponse({"detail": "refused by the worker"}, worker.chat_status)
        return {"text": "hello", "success": True, "audio_data": None}

    @app.post("/streaming/stop")
    async def stop(request: Request) -> dict[str, Any]:
        worker.received.append(await request.json())
        return {"success": True, "message": "stopping"}

    @app.websocket("/ws/chat")
    async def ws_chat(socket: WebSocket) -> None:
        await socket.accept()
        try:
            worker.received.append(json.loads(await socket.receive_text()))
            await socket.send_json({"type": "prefill_done", "input_tokens": 3})
            if not await _until_go(worker, socket):
                worker.cancelled += 1
                return
            await socket.send_json({"type": "chunk", "text_delta": "hello"})
            await socket.send_json({"type": "done", "text": "hello", "generated_tokens": 1, "input_tokens": 3})
        except WebSocketDisconnect:
            worker.cancelled += 1

    @app.websocket("/ws/streaming")
    async def streaming(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                message = json.loads(await socket.receive_text())
                worker.received.append(message)
                if message["type"] == "prefill":
                    worker.status = "busy_streaming"
                    n = len(message["messages"])
                    answer = {"prompt_length": 10 * n, "message_count": n, "cached_tokens": 0, "input_tokens": 10 * n}
                    await socket.send_json({"type": "prefill_done", **answer})
                elif message["type"] == "generate":
                    if not await _until_go(worker, socket):
                        raise WebSocketDisconnect
                    for i in range(2):
                        await socket.send_json({"type": "chunk", "text_delta": f"part {i} ", "audio_data": None})
                    await socket.send_json({"type": "done", "elapsed_ms": 1, "stopped": False})
                    worker.status = "idle"
        except WebSocketDisconnect:
            worker.status = "idle"

    @app.websocket("/ws/duplex")
    async def duplex(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                message = json.loads(await socket.receive_text())
                worker.received.append(message)
                if message["type"] == "prepare":
                    worker.status = "duplex_active"
                    await socket.send_json({"type": "prepared", "prompt_length": 50})
                elif message["type"] == "audio_chunk":
                    few = {"is_listen": True, "text": "", "audio_base64": None, "end_of_turn": False}
                    await socket.send_json({"type": "result", **few, "wall_clock_ms": 50, "kv_cache_length": 100})
                elif message["type"] == "stop":
                    await socket.send_json({"type": "stopped"})
                    return
        except WebSocketDisconnect:
            pass
        finally:
            worker.status = "idle"

    return app
