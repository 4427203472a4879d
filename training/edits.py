"""Edits between two sequences. Torch-free."""

from collections.abc import Sequence


def edit_distance(got: Sequence[object], expected: Sequence[object]) -> int:
    """Insertions, deletions and substitutions between two sequences."""
    row = list(range(len(expected) + 1))
    for i, left in enumerate(got, start=1):
        before, row[0] = row[0], i
        for j, right in enumerate(expected, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1]
