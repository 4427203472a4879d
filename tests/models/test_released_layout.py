"""The module tree at the released size has exactly the tensors of the released checkpoint."""

import math
import re
from pathlib import Path

from models.checkpoint.config import load_config
from models.load import expected_tensors


def released_tensors(file: Path) -> dict[str, tuple[int, ...]]:
    tensors = {}
    for line in file.read_text().splitlines():
        if line.startswith("#"):
            continue
        name, shape = line.split("\t")
        sizes = tuple(int(size) for size in shape.split("x"))
        span = re.search(r"\{(\d+)\.\.(\d+)\}", name)
        numbers = range(int(span[1]), int(span[2]) + 1) if span else [None]
        for number in numbers:
            tensors[name if number is None else name.replace(span[0], str(number))] = sizes
    return tensors


def test_names_and_shapes_equal_the_released_checkpoint(root: Path) -> None:
    got = expected_tensors(load_config(root / "tests/data/released_config.json"))
    expected = released_tensors(root / "tests/data/released_state_dict.tsv")
    assert len(expected) == 1414
    missing, surplus = expected.keys() - got.keys(), got.keys() - expected.keys()
    assert not missing, f"expected {sorted(missing)}, got none of them"
    assert not surplus, f"expected none, got {sorted(surplus)}"
    different = {name: (expected[name], got[name]) for name in expected if expected[name] != got[name]}
    assert not different, f"expected and got shapes: {different}"
    assert sum(math.prod(shape) for shape in got.values()) == 9_371_787_666
