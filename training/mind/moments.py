"""State of a training in few bytes: weights in half precision, second moments of Adam on a scale of 8 bits.

First moments are left out; they are an average over ten steps. A second moment is within 6 % of its value, so a step is
within 3 %. `python -m training.mind.moments A B --shares 0.4 0.6 --out DIR` averages the weights of states of one mind.
"""

import argparse
import math
import shutil
from collections.abc import Sequence
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


def average_weights(folders: Sequence[Path], shares: Sequence[float], out: Path) -> None:
    """Write the mean of the weights of states of one mind to a new folder, and the moments of the last.

    Weights whose name begins with one of AUXILIARY may be missing in some states; then they are the mean of the others.

    Raises: ValueError for shares that are not as many, not positive, or whose sum is not one; for an `out` that is one
        of the folders; for weights of another model.
    """
    if len(shares) != len(folders) or min(shares) <= 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise ValueError(f"shares: expected {len(folders)} above zero with a sum of one, got {list(shares)}")
    if out.resolve() in [folder.resolve() for folder in folders]:
        raise ValueError(f"out: expected another folder than those of the states, got {out}")
    states = [torch.load(folder / "mind_weights.pt", weights_only=True) for folder in folders]
    shapes = [{key: tuple(weight.shape) for key, weight in state.items()} for state in states]
    mean = {}
    for key in dict.fromkeys(key for state in states for key in state):
        found = [number for number, state in enumerate(states) if key in state]
        is_whole = len(found) == len(states) or key.startswith(AUXILIARY)
        if not is_whole or len({shapes[number][key] for number in found}) > 1:
            raise ValueError(f"{key}: expected weights of one model, got {[one.get(key) for one in shapes]}")
        total = sum(shares[number] for number in found)
        mean[key] = sum(shares[number] / total * states[number][key].float() for number in found).half()
    out.mkdir(parents=True, exist_ok=True)
    torch.save(mean, out / "mind_weights.pt")
    if (moments := folders[-1] / "mind_moments.pt").exists():
        shutil.copy(moments, out / "mind_moments.pt")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Average the weights of states of one mind.")
    parser.add_argument("states", type=Path, nargs="+", help="OUT of calls of training.run_mind, the newest last")
    parser.add_argument("--shares", type=float, nargs="+", required=True, help="of the mean; their sum is one")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    average_weights(args.states, args.shares, args.out)


if __name__ == "__main__":
    main()
