"""Whether a checkpoint folder's weight files are complete, read from their headers alone. Torch-free.

Contains the safetensors format and its index; loading checks which tensors the model needs.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from models.checkpoint.checksums import ALL, INDEX, check_files, listed_files
from models.checkpoint.index import declared_kind, read_index
from models.checkpoint.precision import Place, place_of
from models.errors import CheckpointError, ModelError
from worker.doctor.facts import ModelFacts, UnknownFact

SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20
PUBLIC_METHOD = ("quantization_config", "quant_method")
COMPANIONS = (".scale", ".zeros", ".scales", ".qzeros", ".g_idx")  # of quantised values; not numbers of the model


def checkpoint_facts(folder: Path) -> ModelFacts:
    """Sizes from the folder's headers, and the problems of its files. Raises: UnknownFact without dependencies."""
    try:
        from models.checkpoint.config import load_config
        from models.checkpoint.public_layout import public_layout
    except ImportError as error:
        raise UnknownFact(f"reading checkpoints needs a package that is not installed: {error}") from None
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        return ModelFacts(problems=(f"{folder}: expected a checkpoint folder, got {got}",))
    problems: list[str] = []
    row_values, has_side_lane = 0, False
    try:
        config = load_config(folder)
        has_side_lane = config.side_lane is not None
        row_values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        public_layout(folder)
    except (ModelError, OSError) as error:
        problems.append(str(error))
    weights = weight_facts(folder)
    return replace(
        weights,
        stored=_declared(folder),
        row_values=row_values,
        problems=(*problems, *weights.problems),
        has_side_lane=has_side_lane,
    )


def weight_facts(folder: Path) -> ModelFacts:
    """Sizes of the weight files in a folder, from their headers, and what is missing."""
    problems: list[str] = []
    shards, index = _shards(folder, problems)
    n_bytes = n_values = 0
    places: Counter[Place] = Counter()
    for shard in sorted(shards):
        try:
            values = _shard(folder / shard)
            n_bytes += (folder / shard).stat().st_size
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{shard}: {error.strerror if isinstance(error, OSError) else error}")
            continue
        n_values += sum(n for n, _ in values.values())
        for n, place in values.values():
            if place is not None:
                places[place] += n
        if missing := sorted(name for name, file in index.items() if file == shard and name not in values):
            found = f"expected {len(missing)} tensors that the index names, such as {missing[0]}, got none"
            problems.append(f"{shard}: {found}")
    return ModelFacts(
        n_files=len(shards),
        n_bytes=n_bytes,
        n_values=n_values,
        place_values=places,
        problems=tuple(problems),
    )


def compared_files(folder: Path, patterns: Sequence[str] = ALL) -> tuple[int, str]:
    """Compare the files of a checkpoint with the checksums of its index; reads all of them.

    Args:
        patterns: as in `check_files`.
    Returns: how many have checksums, and how they differ; 0 for an index without any, which is an error if it declares
        quantised matrices.
    """
    try:
        listed = listed_files(folder)
    except CheckpointError as error:
        return 0, str(error) if declared_kind(folder) else ""
    try:
        return check_files(folder, patterns), ""
    except CheckpointError as error:
        return len(listed), str(error)


def _declared(folder: Path) -> str:
    """Kind of quantised matrices that the index or `config.json` declares; empty for none."""
    for file, path in ((INDEX, ("metadata", "quantization", "format")), ("config.json", PUBLIC_METHOD)):
        try:
            value = json.loads((folder / file).read_text(encoding="utf-8"))
            for key in path:
                value = value[key]
            return str(value)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""


def _shards(folder: Path, problems: list[str]) -> tuple[set[str], dict[str, str]]:
    """Names of the weight files, and the index's map of tensor -> file."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            problems.append(f"{folder}: expected {INDEX} or {SINGLE}, got neither")
            return set(), {}
        return {SINGLE}, {}
    try:
        index, _ = read_index(folder)
    except CheckpointError as error:
        problems.append(str(error))
        return set(), {}
    return set(index.values()), index


def _shard(file: Path) -> dict[str, tuple[int, Place | None]]:
    """Tensor names of a safetensors file, how many numbers each stands for, and where it is if it can be quantised.

    Raises: ValueError if the file's length differs from its header's; OSError.
    """
    with file.open("rb") as opened:
        start = opened.read(8)
        n_header = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < n_header < MAX_HEADER_BYTES:
            raise ValueError("expected a safetensors header, got none")
        header = json.loads(opened.read(n_header))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    expected = 8 + n_header + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if (got := file.stat().st_size) != expected:
        raise ValueError(f"expected {expected} bytes according to its header, got {got}")
    values = {}
    for name, entry in tensors.items():
        shape = entry["shape"]
        # Stored numbers of four bits: two in a byte, or eight in a word of AWQ and GPTQ.
        packed = {"U8": 2, "I32": 8}.get(entry["dtype"], 1)
        place = place_of(name.replace(".qweight", ".weight"), (*shape[:-1], packed * shape[-1]) if shape else ())
        n = math.prod(shape) * packed
        values[name] = (0 if name.endswith(COMPANIONS) else n, place)
    return values


def file_bytes(path: Path) -> int | None:
    """Size of a file; None if there is none, or no permission to read it."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:  # deleted meanwhile, or no permission
        return None
