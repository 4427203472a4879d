"""Requests to a gateway for the sounds of its registries."""

import base64
from pathlib import Path
from typing import Any

import numpy as np

from tests.server.routes.asgi_gateway import asgi_client, gateway_of
from worker.config.service import Config, default_config


def samples_of(data: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data, validate=True), "<f4")


def config_with(voice: Path | None) -> Config:
    config = default_config()
    return config.model_copy(update={"audio": config.audio.model_copy(update={"ref_audio_path": voice})})


async def fetch(path: str, status: int = 200, **options: Any) -> Any:
    async with asgi_client(gateway_of(**options)) as http:
        return await http.get(path, status)
