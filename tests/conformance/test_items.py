"""The table of conformance items and the tests agree."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
N_ITEMS, OPTIONAL = 46, 43


def test_each_item_has_a_test_that_the_table_names() -> None:
    found = {
        (path.stem.removeprefix("test_"), name)
        for path in FOLDER.glob("test_*.py")
        for name in re.findall(r"^def test_item_(\d\d_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    rows = re.findall(r"^\| (\d+) \|(.*)", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {(file, name, int(item)) for item, row in rows for file, name in re.findall(r"`(\w+)::(\w+)`", row)}
    assert named == {(file, name, int(name[:2])) for file, name in found}
    assert {item for _, _, item in named} == {*range(1, N_ITEMS + 1)} - {OPTIONAL}
