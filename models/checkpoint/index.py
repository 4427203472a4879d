"""The index of a checkpoint folder: which file has a tensor, and the kind of quantised matrices. Torch-free."""

import json
from functools import cache
from pathlib import Path
from typing import get_args

from models.checkpoint.checksums import INDEX
from models.checkpoint.precision import Kind
from models.errors import CheckpointError

FORMAT, VERSION = "int8", 1
DECLARATION: dict[str, object] = {"format": FORMAT, "version": VERSION}  # of files that have int8 matrices only
DECLARED_AS = "quantization"  # key of the declaration in an index's metadata and in a `.pt` file
_KINDS: tuple[Kind, ...] = get_args(Kind)


def read_index(folder: Path) -> tuple[dict[str, str], Kind | None]:
    """Map of tensor -> shard of a folder's index, and the declared kind of matrices; None for no declaration.

    Raises: CheckpointError for an index that is missing or unreadable, or that declares an unknown format.
    """
    file = folder / INDEX
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        weight_map: dict[str, str] = index["weight_map"]
        metadata = index.get("metadata")
        if not isinstance(metadata, dict | None):
            raise TypeError(f"metadata {metadata!r}")
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise TypeError("a shard name that is not a string")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "JSON with weight_map {tensor: shard}, and an object as metadata if there is any"
        raise CheckpointError(str(file), expected=expected, got=f"{type(error).__name__}: {error}") from None
    if metadata is None or DECLARED_AS not in metadata:
        return weight_map, None
    return weight_map, checked_declaration(metadata[DECLARED_AS], str(file))


def declared_kind(folder: Path) -> Kind | None:
    """The kind of weights that `models.quantize` has made of a folder's; None if it has not, or is not readable."""
    try:
        return read_index(folder)[1]
    except CheckpointError:
        return None


@cache
def converted_to(folder: Path) -> Kind | None:
    """As `declared_kind`. The first answer stays: a process that serves a folder reads its index once."""
    return declared_kind(folder)


def declaration(kind: Kind) -> dict[str, object]:
    """What the index of a folder with matrices of this kind declares. A folder of any kind may have int8 matrices."""
    return {"format": kind, "version": VERSION}


def checked_declaration(declared: object, where: str) -> Kind:
    """The declared kind. Raises: CheckpointError unless this program reads the declared format."""
    for kind in _KINDS:
        if declared == declaration(kind):
            return kind
    expected = f"{DECLARATION}, or format {' or '.join(kind for kind in _KINDS if kind != FORMAT)}"
    raise CheckpointError(f"{where}: {DECLARED_AS}", expected=expected, got=declared)
