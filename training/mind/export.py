"""`python -m training.mind.export --weights OUT --out DIR`: a checkpoint of what `training.run_mind` left in OUT."""

import argparse
from pathlib import Path

import torch

from models.checkpoint.config import parse_config
from models.omni import OmniModel
from models.random_weights import random_model
from training.mind.moments import AUXILIARY
from training.talker.checkpoint import write_checkpoint
from training.talker.sizes import talker_config

PARTS = ("mind", "speech")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[2].strip())
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint, without its vocoder")
    args = parser.parse_args(argv)
    model = random_model(parse_config(talker_config()), seed=0)
    print(", ".join(load_parts(model, args.weights)))
    write_checkpoint(args.out, model.state_dict())


def load_parts(model: OmniModel, folder: Path) -> list[str]:
    """Give a model the weights of all parts that are there. Returns: their names.

    Raises: FileNotFoundError without any. RuntimeError if the weights are of another size.
    """
    found = [part for part in PARTS if (folder / f"{part}_weights.pt").exists()]
    if not found:
        raise FileNotFoundError(f"{folder}: expected mind_weights.pt or speech_weights.pt, got neither")
    for part in found:
        weights = torch.load(folder / f"{part}_weights.pt", weights_only=True)
        model.load_state_dict(
            {name: one for name, one in weights.items() if not name.startswith(AUXILIARY)}, strict=False
        )
    return found


if __name__ == "__main__":
    main()
