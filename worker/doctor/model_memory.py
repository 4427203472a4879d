"""Memory that the models of the settings need at least: weights, the slots of a speech model, one session."""

from models.checkpoint.precision import Place, Precision
from worker.doctor.checkpoint_facts import file_bytes
from worker.doctor.machine import Machine


def model_bytes(machine: Machine, precision: Precision | None = None) -> int:
    """Bytes of all models. precision: of the omni model's weights; None: the worker's."""
    return omni_bytes(machine, precision) + speech_bytes(machine) + s3gen_bytes(machine)


def omni_bytes(machine: Machine, precision: Precision | None = None) -> int:
    """Bytes of the omni model's weights and of one session's context; 0 if it is not served."""
    if not machine.config.model.omni:
        return 0
    rows = machine.model.row_values * machine.config.duplex.context_rows
    weights = machine.model.weight_bytes(_width(machine), precision or machine.config.model.precision)
    return weights + _width(machine) * rows


def decode_copy_bytes(machine: Machine) -> int:
    """Bytes of the copy that decode steps read, if the settings ask for it: by default a worker has it if it fits."""
    config = machine.config
    by_kernels = machine.on_gpu and machine.compiles and config.compile.allows_kernels
    if not (config.model.omni and config.model.decode_copy is True and by_kernels):
        return 0
    places: tuple[Place, ...] = ("llm", "down", "head")
    values = sum(machine.model.place_values.get(one, 0) for one in places if config.model.precision.at(one) is None)
    return values * 12 // 8


def speech_bytes(machine: Machine) -> int:
    """Bytes of the speech model's weights and of all its slots, which a worker allocates at its start."""
    if (facts := machine.speech) is None:
        return 0
    engine = machine.config.engine()
    rows = engine.speech_slots("cuda" if machine.on_gpu else "cpu") * engine.speech_rows
    return _width(machine) * (facts.n_values + rows * facts.row_values)


def s3gen_bytes(machine: Machine) -> int:
    """Least bytes of S3Gen, whose file has float32 numbers: part of its networks keep them. 0 without a file."""
    path = machine.config.model.s3gen_path
    return 0 if path is None else (file_bytes(path) or 0) * _width(machine) // 4


def _width(machine: Machine) -> int:
    """Bytes of a number that is not quantised."""
    return {"float32": 4, "bfloat16": 2, "auto": 2 if machine.on_gpu else 4}[machine.config.model.dtype]
