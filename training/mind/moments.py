"""State of a training in few bytes: weights in half precision, second moments of Adam on a scale of 8 bits.

First moments are left out; they are an average over ten steps. A second moment is within 6 % of its value, so a step is
within 3 %.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OCTAVES = 40.0  # below the largest second moment of a tensor; smaller ones are raised to that
LEVELS = 255
AUXILIARY = ("phones.", "sights.", "words.", "watching.")  # what helps training and is not exported


def pack_moments(second: Tensor) -> tuple[Tensor, Tensor]:
    """Second moments as levels (uint8, of the same shape) and the binary logarithm of the largest."""
    top = second.max().clamp_min(1e-38).log2()
    levels = (second.clamp_min(1e-38).log2() - top) / OCTAVES * LEVELS + LEVELS
    return levels.round().clamp(0, LEVELS).to(torch.uint8), top


def unpack_moments(levels: Tensor, top: Tensor) -> Tensor:
    """Second moments of `pack_moments`."""
    return torch.exp2((levels.float() - LEVELS) / LEVELS * OCTAVES + top)


def save_small(
    folder: Path, name: str, weights: dict[str, Tensor], optimizer: torch.optim.Optimizer, counters: dict[str, float]
) -> None:
    """Write NAME_weights.pt and NAME_moments.pt to a folder; the second has the counters.

    Args:
        weights: trained weights, all of the optimizer.
    """
    half = {key: weight.detach().to("cpu", torch.float16) for key, weight in weights.items()}
    moments = {}
    for key, weight in weights.items():
        if (state := optimizer.state.get(weight)) is not None:
            levels, top = pack_moments(state["exp_avg_sq"])
            moments[key] = (levels.cpu(), top.cpu())
    for kind, content in (("weights", half), ("moments", {"moments": moments, "counters": counters})):
        file = folder / f"{name}_{kind}.pt"
        partial = file.with_suffix(".part")
        torch.save(content, partial)
        partial.replace(file)


def load_weights(folder: Path, name: str, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Restore the weights of `save_small` without the moments.

    Weights whose name begins with one of AUXILIARY may be missing on either side; those of the model stay as they are.

    Returns: the content of the other file; without it, no moments and counters of zero.
    Raises: ValueError for weights of another model.
    """
    half = torch.load(folder / f"{name}_weights.pt", weights_only=True)
    file = folder / f"{name}_moments.pt"
    nothing: dict[str, Any] = {"moments": {}, "counters": {"step": 0, "seconds": 0.0, "drawn": 0}}
    wrong = sorted(key for key in half.keys() ^ weights.keys() if not key.startswith(AUXILIARY))
    if wrong:
        raise ValueError(f"{folder}: expected the weights of this model, got others for {wrong[:5]}")
    with torch.no_grad():
        for key in half.keys() & weights.keys():
            weights[key].copy_(half[key])
    stored: dict[str, Any] = torch.load(file, weights_only=True) if file.exists() else nothing
    return stored


def load_small(
    folder: Path, name: str, weights: dict[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    """Restore what `save_small` wrote; without the moments, which a finished part does not need, the weights alone.

    Weights whose name begins with one of AUXILIARY may be missing and stay as they are.

    Returns: the counters; `step` is one of them. Raises: ValueError for weights of another model.
    """
    stored = load_weights(folder, name, weights)
    counters: dict[str, float] = stored["counters"]
    for key, weight in weights.items():
        if key in stored["moments"]:
            levels, top = stored["moments"][key]
            second = unpack_moments(levels, top).to(weight.device, weight.dtype)
            step = torch.tensor(float(counters["step"]), device=weight.device if weight.is_cuda else "cpu")
            optimizer.state[weight] = {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": second}
    return counters
