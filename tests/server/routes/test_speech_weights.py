"""The route of the speech network's weights."""

import asyncio

import numpy as np
import pytest

from models.errors import CheckpointError
from server.routes import speech_weights
from server.routes.speech_weights import ARRAYS, PATH, packed_weights
from tests.server.routes.asgi_gateway import asgi_client, gateway_of


def test_weights_are_served_as_float32_and_cached() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of()) as client:
            response = await client.request("GET", PATH)
            assert response.headers["cache-control"] == "max-age=86400"
            values = np.frombuffer(response.content, "<f4")
            assert len(values) == sum(int(np.prod(shape)) for shape in ARRAYS.values())
            assert np.isfinite(values).all() and values.std() > 0

    asyncio.run(scenario())


def test_another_network_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speech_weights.ARRAYS, "model.decoder.rnn.bias_ih", (511,))
    packed_weights.cache_clear()
    with pytest.raises(CheckpointError, match="511"):
        packed_weights()
    packed_weights.cache_clear()
