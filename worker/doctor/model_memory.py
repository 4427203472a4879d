"""Memory that the models of the settings need at least: weights, the slots of a speech model, one session.

The planner counts the models beside the omni model by `other_models`, too.
"""

from typing import TYPE_CHECKING

from models.checkpoint.precision import Precision
from worker.doctor.checkpoint_facts import file_bytes
from worker.doctor.facts import ModelFacts
from worker.doctor.machine import Machine

if TYPE_CHECKING:
    from worker.config.session import EngineConfig


def model_bytes(machine: Machine, precision: Precision | None = None) -> int:
    """Bytes of all models. precision: of the omni model's weights; None: the worker's."""
    others = other_models(machine.config.engine(), machine.speech, on_gpu=machine.on_gpu)
    return omni_bytes(machine, precision) + sum(others.values())


def omni_bytes(machine: Machine, precision: Precision | None = None) -> int:
    """Bytes of the omni model's weights and of one session's context; 0 if it is not served."""
    if not machine.config.model.omni:
        return 0
    rows = machine.model.row_values * machine.config.duplex.context_rows
    width = _width(machine.config.model.dtype, on_gpu=machine.on_gpu)
    weights = machine.model.weight_bytes(width, precision or machine.config.model.precision)
    return weights + width * rows


def without_copy(machine: Machine) -> str | None:
    """Why a worker has no copy for decoding, as `why_no_copy` returns it."""
    from worker.config.decode_copy import why_no_copy  # here, because it imports packages that may be missing

    return why_no_copy(machine.config.engine(), "cuda" if machine.on_gpu else "cpu")


def decode_copy_bytes(machine: Machine) -> int:
    """Bytes of the copy that decode steps read, if the settings ask for it: by default a worker has it if it fits."""
    model = machine.config.model
    if not (model.omni and model.decode_copy is True) or without_copy(machine) is not None:
        return 0
    from worker.config.decode_copy import COPIED

    values = sum(machine.model.place_values.get(one, 0) for one in COPIED if model.precision.at(one) is None)
    return values * 12 // 8


def other_models(config: "EngineConfig", speech: ModelFacts | None, *, on_gpu: bool) -> dict[str, int]:
    """Bytes of the models that are served beside the omni model or without it, by name; none of 0 bytes.

    The speech model counts with all its slots, which a worker allocates at its start. Of S3Gen it is the least: its
    file has float32 numbers, and a part of its networks keeps them.

    Args:
        speech: facts of `config.speech_path`; None without one.
        on_gpu: the models are on a GPU.
    """
    width = _width(config.dtype, on_gpu=on_gpu)
    found = {}
    if speech is not None:
        rows = config.speech_slots("cuda" if on_gpu else "cpu") * config.speech_rows
        found["the speech model with its slots"] = width * (speech.n_values + rows * speech.row_values)
    if config.s3gen_path is not None:
        found["voice conversion"] = (file_bytes(config.s3gen_path) or 0) * width // 4
    return {name: n_bytes for name, n_bytes in found.items() if n_bytes}


def _width(dtype: str, *, on_gpu: bool) -> int:
    """Bytes of a number that is not quantised."""
    return {"float32": 4, "bfloat16": 2, "auto": 2 if on_gpu else 4}[dtype]
