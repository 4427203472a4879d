"""Dimensions of the talker: a model of the released architecture, small enough for units in real time on two cores.

Depth costs more time than width on a CPU, and the tables of speech tokens (two of 6562 rows) cost more bytes than the
layers between them. Run `python -m training.talker.sizes` for the table of sizes.
"""

from collections import Counter
from math import prod
from typing import Any

from assets.released_layout import Sizes, Stack, config_json
from models.checkpoint.config import parse_config
from models.load import expected_tensors
from training.talker.tokenizer import talker_lexicon

TALKER = Sizes(
    llm=Stack(width=256, inner=768, n_layers=6, heads=4),
    kv_heads=2,
    head_dim=64,
    vision=Stack(width=128, inner=384, n_layers=4, heads=4),
    audio=Stack(width=192, inner=768, n_layers=4, heads=4),
    speech=Stack(width=160, inner=448, n_layers=3, heads=4),
    n_text_tokens=1536,
    image_side=448,  # 32 x 32 patches, one row of the position table each
)
# Bytes of the stored checkpoint, in int8, and of the parts above in bfloat16.
MAX_BYTES = 28_000_000
PART_BYTES = 25_500_000
BYTES_PER_WEIGHT = 2
TABLES = ("embed_tokens", "embed_positions", "position_embedding", "emb_text", "emb_code", "head_code", "lm_head")


def talker_config() -> dict[str, Any]:
    """`config.json` of the talker. Weights are stored in bfloat16."""
    return config_json(talker_lexicon().ids, TALKER, dtype="bfloat16") | {"talker": True}


def part_weights() -> dict[str, Counter[str]]:
    """Weights of each part: in tables (embeddings, positions, output heads) and in layers."""
    counts: dict[str, Counter[str]] = {}
    for name, shape in expected_tensors(parse_config(talker_config())).items():
        part = name.split(".")[0]
        kind = "tables" if any(table in name for table in TABLES) else "layers"
        counts.setdefault(part, Counter())[kind] += prod(shape)
    return counts


def size_table() -> str:
    """Weights and bytes of each part, as Markdown."""
    counts = part_weights()
    lines = ["| part | layers | tables | MB in bfloat16 |", "|---|---|---|---|"]
    for part, kinds in [*counts.items(), ("sum", sum(counts.values(), Counter()))]:
        mega = BYTES_PER_WEIGHT * kinds.total() / 1e6
        lines.append(f"| {part} | {kinds['layers']:,} | {kinds['tables']:,} | {mega:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(size_table())
