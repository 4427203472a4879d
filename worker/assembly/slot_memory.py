"""How much of a GPU's memory slots and a copy for decoding may take, by the bytes of one slot. Allocates nothing."""

import math
from collections.abc import Mapping

from torch import nn

from models.checkpoint.precision import UNQUANTIZED, Precision
from models.kernels.bf12 import bf12_bytes
from models.omni import OmniModel
from worker.config.session import EngineConfig

MAX_SESSIONS = 64
FREE_SHARE = 0.1  # of a GPU's memory that the default number of slots leaves free
WORK_BYTES = 4 * 10**9  # CUDA graphs, activations, libraries and prepared prompts, whatever the number of slots
CONTEXT_BYTES = 13 * 10**8  # of these, the CUDA context with its kernels, as on an H200
WORK_SLOT_BYTES = 2 * 10**8  # of these, for each slot: 0.13 GB on an H200 at released size, and the keys of a prompt
MEMORY_SHARE = 0.85  # of the memory that the weights leave: most that slots may take, whatever is left free


def slots_in(free_bytes: int, total_bytes: int, slot_bytes: int, model_bytes: int) -> int:
    """Slots that a worker allocates by default on a GPU; 0 if not even one fits.

    A single slot may take the share that others leave free.

    Args:
        free_bytes: that are free after the weights are loaded.
        total_bytes: memory of the GPU.
        slot_bytes: of one slot.
        model_bytes: of the omni model's weights.
    """
    room = free_bytes - int(FREE_SHARE * total_bytes) - WORK_BYTES - slot_bytes  # a scratch slot, too
    n_slots = max(room // (slot_bytes + WORK_SLOT_BYTES), 0)
    return min(max(n_slots, min(most_slots_in(free_bytes, slot_bytes, model_bytes), 1)), MAX_SESSIONS)


def most_slots_in(free_bytes: int, slot_bytes: int, model_bytes: int) -> int:
    """Slots that fit with their work if nothing else is left free; arguments as for `slots_in`."""
    by_work = (free_bytes - _least_work_bytes(model_bytes)) // (slot_bytes + WORK_SLOT_BYTES)
    return max(0, min(int(free_bytes * MEMORY_SHARE) // slot_bytes, by_work))


def one_session_bytes(slot_bytes: int, model_bytes: int) -> int:
    """Least bytes beside the weights for one session: its slot and its work; arguments as for `slots_in`."""
    by_work = _least_work_bytes(model_bytes) + slot_bytes + WORK_SLOT_BYTES
    return max(by_work, math.ceil(slot_bytes / MEMORY_SHARE))


def _least_work_bytes(model_bytes: int) -> int:
    """Of all slots together. Graphs and activations of a small model take no more than its weights."""
    return min(WORK_BYTES, CONTEXT_BYTES + model_bytes)


def weight_bytes(module: nn.Module) -> int:
    """Of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def has_room_for_copy(free_bytes: int, copy_bytes: int, slot: Mapping[str, int], config: EngineConfig) -> bool:
    """Whether the slots of a worker fit beside a copy for decoding; one that the settings ask for always has room.

    Args:
        free_bytes: that are free after the weights are loaded.
        slot: bytes of one slot by part.
    """
    if config.decode_copy != "auto" or config.max_sessions is None:
        return True
    one, n_slots = sum(slot.values()), config.max_sessions
    return free_bytes - copy_bytes >= WORK_BYTES + (n_slots + 1) * one + n_slots * WORK_SLOT_BYTES


def decode_copy_bytes(model: OmniModel, precision: Precision = UNQUANTIZED) -> int:
    """Of a copy for decoding. precision: of weights that are not loaded; those that are quantised have no copy."""
    named = ((name, tuple(one.shape)) for name, one in model.llm.named_parameters(prefix="llm"))
    copied = (
        shape
        for name, shape in named
        if name.endswith("proj.weight") or name == "llm.lm_head.weight"
        if precision.kind_of(name, shape) is None
    )
    return sum(bf12_bytes(*shape) for shape in copied)
