"""The first line of a trace: what the session ran on."""

import hashlib
import platform
from itertools import chain

import numpy as np
import torch

from worker.assembly.parts import EngineParts
from worker.config.session import EngineConfig
from worker.trace.records import FORMAT, VERSION, Record
from worker.version import package_version

SAMPLED = 16  # values of each tensor that its fingerprint covers


def header_of(parts: EngineParts, config: EngineConfig) -> Record:
    """Format, model, device, versions, and the engine's settings without paths. Reads a little of all weights."""
    device = parts.model.device
    paths = {name for name in EngineConfig.model_fields if name.endswith("_path")}
    settings = config.model_dump(mode="json", exclude=paths)
    used = {"kv_layout": parts.kv_layout, "max_sessions": parts.n_slots, "decode_copy": parts.model.has_decode_copy}
    return {
        "format": FORMAT,
        "version": VERSION,
        "program": package_version("duologue"),
        "model": config.model_path.name,
        "weights": _fingerprint(parts),
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "engine": {**settings, "device": device.type, **used},
    }


def _fingerprint(parts: EngineParts) -> str:
    data = hashlib.sha256()
    modules = [parts.model, *([] if parts.vocoder is None else [parts.vocoder.regions.root])]
    for name, tensor in chain.from_iterable(module.named_parameters() for module in modules):
        data.update(f"{name}{tuple(tensor.shape)}".encode())
        data.update(tensor.detach().flatten()[:SAMPLED].float().cpu().numpy().tobytes())
    return data.hexdigest()[:16]
