"""A gateway without a socket of its own, asked over HTTP in this process, and whoever waits or talks there."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from server.app import Gateway, build_app
from server.dispatch.workers import WorkerAddress
from server.registry.presets import NO_PRESETS, Presets
from server.serving import build_gateway
from worker.config.service import Config, default_config

IDLE = {"state": "IDLE", "worker_status": "idle", "gpu_id": 3, "slots": {"total": 2, "free": 2}}


def gateway_of(
    n_workers: int = 1, *, config: Config | None = None, presets: Presets = NO_PRESETS, **given: Any
) -> Gateway:
    """Workers that nobody has asked yet. given: lang."""
    addresses = [WorkerAddress("127.0.0.1", 9 + index) for index in range(n_workers)]
    asking = httpx.AsyncClient(trust_env=False)  # asks nobody
    return build_gateway(config or default_config(), addresses, asking, Path("/nonexistent"), presets=presets, **given)[
        0
    ]


@dataclass
class Asked:
    """A gateway and who asks it."""

    gateway: Gateway
    app: FastAPI
    http: httpx.AsyncClient

    async def get(self, path: str, status: int = 200) -> Any:
        return (await self.ask("GET", path, status)).json()

    async def put(self, path: str, body: Any, status: int = 200) -> Any:
        return (await self.ask("PUT", path, status, json=body)).json()

    async def ask(self, method: str, path: str, status: int = 200, **options: Any) -> httpx.Response:
        answer = await self.http.request(method, path, **options)
        assert answer.status_code == status, (
            f"{method} {path}: expected {status}, got {answer.status_code}: {answer.text[:300]}"
        )
        return answer


@asynccontextmanager
async def asked(gateway: Gateway) -> AsyncIterator[Asked]:
    app = build_app(gateway)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Asked(gateway, app, http)
