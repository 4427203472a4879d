"""The route of the speech network's weights, which the page's voice detector runs."""

import asyncio
import functools
import importlib.metadata

import numpy as np
from fastapi import APIRouter, HTTPException
from fastapi.responses import Response

from models.errors import CheckpointError
from models.token2wav.load.onnx_container import read_onnx
from server.routes.bodies import Problem

PATH = "/api/vad/weights"
# The package's file of which all weights are plain initializers; `worker.vad_network` runs the same network.
_MODEL_FILE = "silero_vad/data/silero_vad_16k_op15.onnx"
_CACHED = {"Cache-Control": "max-age=86400"}
# The arrays in the order of the response, and their shapes.
ARRAYS = {
    "model.stft.forward_basis_buffer": (258, 1, 256),
    **{
        f"model.encoder.{index}.reparam_conv.{part}": shape
        for index, (outputs, inputs) in enumerate(((128, 129), (64, 128), (64, 64), (128, 64)))
        for part, shape in (("weight", (outputs, inputs, 3)), ("bias", (outputs,)))
    },
    "model.decoder.rnn.weight_ih": (512, 128),
    "model.decoder.rnn.weight_hh": (512, 128),
    "model.decoder.rnn.bias_ih": (512,),
    "model.decoder.rnn.bias_hh": (512,),
    "model.decoder.decoder.2.weight": (1, 128, 1),
    "model.decoder.decoder.2.bias": (1,),
}


def speech_weights_routes() -> APIRouter:
    router = APIRouter()

    @router.get(
        PATH,
        response_class=Response,
        responses={
            200: {"content": {"application/octet-stream": {}}, "description": "float32, little endian"},
            404: {"model": Problem, "description": "the package's file is missing or has another network"},
        },
    )
    async def speech_weights() -> Response:
        try:
            weights = await asyncio.to_thread(packed_weights)
        except (CheckpointError, importlib.metadata.PackageNotFoundError) as error:
            raise HTTPException(404, f"No speech network: {error}") from None
        return Response(weights, media_type="application/octet-stream", headers=_CACHED)

    return router


@functools.cache
def packed_weights() -> bytes:
    """The arrays one after the other, float32. Raises: CheckpointError, PackageNotFoundError."""
    path = str(importlib.metadata.distribution("silero-vad").locate_file(_MODEL_FILE))
    found = read_onnx(path).initializers
    parts = []
    for name, shape in ARRAYS.items():
        array = found.get(name)
        if array is None or array.shape != shape:
            got = "nothing" if array is None else array.shape
            raise CheckpointError(path, expected=f"{name} {shape}", got=got)
        parts.append(np.ascontiguousarray(array, "<f4").tobytes())
    return b"".join(parts)
