"""A gateway without a socket, called over HTTP through ASGI in this process."""

import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.identity import SCOPE_KEY, Identity
from server.app import Gateway, build_app
from server.dispatch.workers import WorkerAddress
from server.serving import ServeOptions, build_gateway
from worker.config.service import Config, default_config

_DATA = tempfile.TemporaryDirectory(prefix="duologue-")  # removed when the process ends
IDLE = {"state": "IDLE", "worker_status": "idle", "gpu_id": 3, "slots": {"total": 2, "free": 2}}


def with_data_dir(config: Config, folder: Path) -> Config:
    """The settings with another `service.data_dir`."""
    return config.model_copy(update={"service": config.service.model_copy(update={"data_dir": folder})})


def with_own_data_dir(config: Config) -> Config:
    """The settings with an empty folder in place of the default `service.data_dir`."""
    if config.service.data_dir != default_config().service.data_dir:
        return config
    return with_data_dir(config, Path(_DATA.name) / secrets.token_hex(4))


def gateway_of(n_workers: int = 1, *, config: Config | None = None, **options: Any) -> Gateway:
    """A gateway whose workers are not polled. options: of `ServeOptions`."""
    addresses = [WorkerAddress("127.0.0.1", 9 + index) for index in range(n_workers)]
    http = httpx.AsyncClient(trust_env=False, verify=False)  # sends no request; loads no CA certificates
    config = with_own_data_dir(config or default_config())
    return build_gateway(config, http, ServeOptions(addresses, Path("/nonexistent"), **options))[0]


@dataclass
class AsgiClient:
    """An HTTP client of an application. raw: the client without checks."""

    app: FastAPI
    raw: httpx.AsyncClient

    async def get(self, path: str, status: int = 200) -> Any:
        return (await self.request("GET", path, status)).json()

    async def put(self, path: str, body: Any, status: int = 200) -> Any:
        return (await self.request("PUT", path, status, json=body)).json()

    async def request(self, method: str, path: str, status: int = 200, **options: Any) -> httpx.Response:
        """Send a request, whose response must have this status."""
        response = await self.raw.request(method, path, **options)
        assert response.status_code == status, (
            f"{method} {path}: expected {status}, got {response.status_code}: {response.text[:300]}"
        )
        return response


class OpenIdentity:
    """ASGI middleware for applications without the access guard: every request comes from this machine."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, SCOPE_KEY: Identity(address="127.0.0.1")}, receive, send)


@asynccontextmanager
async def asgi_client(target: Gateway | FastAPI) -> AsyncIterator[AsgiClient]:
    app = build_app(target) if isinstance(target, Gateway) else target
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as raw:
        yield AsgiClient(app, raw)
