"""Writes checkpoints of the talker in the released layout.

`python -m training.talker.checkpoint --out DIR` writes one with random weights, for measurements before any training.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from assets.released_layout import random_weights, write_text_files, write_weights
from models.checkpoint.config import parse_config
from models.load import expected_tensors
from training.talker.sizes import talker_config
from training.talker.tokenizer import talker_lexicon

SHARD_BYTES = 32_000_000


def write_checkpoint(out: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the talker with these weights, in bfloat16; files of an earlier one are replaced.

    `assets/token2wav` of the folder is not touched.

    Raises: ValueError unless names and shapes are those of the configuration.
    """
    config = talker_config()
    expected = expected_tensors(parse_config(config))
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if got != expected:
        wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
        raise ValueError(f"tensors: expected the {len(expected)} of the configuration, got others for {wrong[:5]}")
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("*.safetensors"):
        stale.unlink()
    write_text_files(out, talker_lexicon(), config)
    ordered = {name: tensors[name].detach().cpu().to(torch.bfloat16).contiguous() for name in expected}
    write_weights(out, ordered, SHARD_BYTES)


def write_random(out: Path) -> None:
    """Write a talker whose weights are random."""
    write_checkpoint(out, random_weights(talker_config(), talker_lexicon()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    write_random(parser.parse_args().out)
