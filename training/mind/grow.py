"""`python -m training.mind.grow --weights OUT --out DIR --after 1 3`: a trained language model with more layers.

Each new layer is a copy of the one before it whose output matrices are zero, so the model computes what it did before.
Training continues with `training.run_mind --initial DIR`; new layers begin without moments.
"""

import argparse
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

LAYER = re.compile(r"llm\.model\.layers\.(\d+)\.(.+)")
OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def grown(weights: dict[str, Tensor], after: Sequence[int]) -> dict[str, Tensor]:
    """Weights with a new layer after each of these layers. Raises: ValueError for a layer that is not there."""
    old = sorted({int(found[1]) for name in weights if (found := LAYER.fullmatch(name))})
    if unknown := set(after) - set(old):
        raise ValueError(f"layers {sorted(unknown)}: expected some of {old}")
    changed = {}
    for name, weight in weights.items():
        found = LAYER.fullmatch(name)
        if found is None:
            changed[name] = weight
            continue
        number, part = int(found[1]), found[2]
        place = number + sum(one < number for one in after)
        changed[f"llm.model.layers.{place}.{part}"] = weight
        if number in after:
            copied = torch.zeros_like(weight) if part in OUTPUTS else weight.clone()
            changed[f"llm.model.layers.{place + 1}.{part}"] = copied
    return changed


def moved(moments: dict[str, tuple[Tensor, Tensor]], after: Sequence[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Moments of Adam at the new places of their layers."""
    found = {}
    for name, moment in moments.items():
        layer = LAYER.fullmatch(name)
        number = 0 if layer is None else int(layer[1])
        place = number + sum(one < number for one in after)
        found[name if layer is None else f"llm.model.layers.{place}.{layer[2]}"] = moment
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[2].strip())
    parser.add_argument("--weights", type=Path, required=True, help="OUT of training.run_mind")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--after", type=int, nargs="+", required=True, help="layers that are followed by a new one")
    args = parser.parse_args(argv)
    if len(set(args.after)) < len(args.after):
        parser.error(f"--after: expected each layer once, got {args.after}")
    args.out.mkdir(parents=True, exist_ok=True)
    for file in args.weights.glob("speech_*.pt"):
        shutil.copy(file, args.out / file.name)
    torch.save(
        grown(torch.load(args.weights / "mind_weights.pt", weights_only=True), args.after),
        args.out / "mind_weights.pt",
    )
    if (file := args.weights / "mind_moments.pt").exists():
        stored = torch.load(file, weights_only=True)
        torch.save(stored | {"moments": moved(stored["moments"], args.after)}, args.out / file.name)


if __name__ == "__main__":
    main()
