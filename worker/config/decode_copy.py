"""Whether settings rule out `model.decode_copy`, a copy of the language model's weights for decoding. Torch-free."""

from models.checkpoint.precision import Place
from worker.config.session import EngineConfig

COPIED: tuple[Place, ...] = ("llm", "down", "head")


def why_no_copy(config: EngineConfig, device_type: str) -> str | None:
    """Why a worker with these settings has no copy, whatever its memory; None if the settings allow one.

    device_type: `cuda` or `cpu`, of the device that the model is loaded on.
    """
    if device_type != "cuda":
        return "the model runs on a CPU"
    if not (config.compile.enabled_on(device_type) and config.compile.allows_kernels):
        return "service.compile does not let the project's kernels run the model"
    if all(config.precision.at(place) is not None for place in COPIED):
        return f"the language model's weights are quantised (model.weights is {config.weights})"
    return None
