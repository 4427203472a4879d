"""Builds `assets/tiny`: a complete checkpoint in the released layout with random weights, small enough to commit.

Run `python -m assets.build_tiny` from the root. The result depends only on this file, its corpus and the module tree,
not on the machine: values are made of integer bit streams and exact float operations.
"""

import argparse
from pathlib import Path

from assets.byte_bpe import train
from assets.released_layout import Lexicon, Sizes, Stack, config_json, random_weights, write_text_files, write_weights

HERE = Path(__file__).parent
N_TRAINED_TOKENS = 638
SIZES = Sizes(
    llm=Stack(width=128, inner=192, n_layers=2, heads=4),
    kv_heads=2,
    head_dim=32,
    vision=Stack(width=32, inner=64, n_layers=2, heads=2),
    audio=Stack(width=64, inner=256, n_layers=2, heads=2),
    speech=Stack(width=32, inner=64, n_layers=2, heads=2),
    n_text_tokens=768,
)


def build(out: Path) -> None:
    """Write the checkpoint folder; files of an earlier build are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("*.safetensors"):
        stale.unlink()
    lexicon = Lexicon.of(train((HERE / "tiny_corpus.txt").read_text(encoding="utf-8"), N_TRAINED_TOKENS))
    config = config_json(lexicon.ids, SIZES)
    write_text_files(out, lexicon, config)
    write_weights(out, random_weights(config, lexicon))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "tiny")
    build(parser.parse_args().out)
