"""Compressed golden tensors that keep every bit.

Neighbouring floats have similar signs and exponents, while their low bytes look random. All tensors with the same item
size are therefore concatenated and split into byte planes: plane 0 has the first byte of every number, plane 1 the
second, and so on. A zip archive compresses each plane separately. Its `index.json` lists names, dtypes and shapes.

Random bits do not compress. Tensors whose seed is known are therefore stored as `drawn` describes: the index has their
`entry`, and the archive the corrections of all of them, one byte a value. `sha256` of their values shows that a machine
computes what was stored.
"""

import hashlib
import json
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.parity.drawn import ESCAPE, Drawn, corrected, corrections, outputs_of

SUFFIX = ".packed"
INDEX = "index.json"
CORRECTIONS, ESCAPED = "corrections", "escaped"  # of drawn tensors, in the order of the index
NO_DATE = (1980, 1, 1, 0, 0, 0)  # equal tensors give equal files


def save_packed(
    tensors: dict[str, Tensor],
    path: Path,
    metadata: dict[str, str] | None = None,
    drawn: Mapping[str, Drawn] | None = None,
) -> None:
    """Write tensors and the metadata of their original file. drawn: where float32 tensors come from."""
    drawn = drawn or {}
    small, escaped, digest = _corrections(tensors, drawn)
    by_size: dict[int, list[np.ndarray]] = defaultdict(list)
    entries = []
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        size = plain.element_size()
        if name not in drawn:
            by_size[size].append(plain.flatten().view(torch.uint8).numpy().reshape(-1, size))
        entries.append([name, str(plain.dtype).removeprefix("torch."), list(plain.shape)])
    with zipfile.ZipFile(path, "w") as archive:
        about = {"tensors": entries, "metadata": metadata or {}}
        if drawn:
            about |= {"drawn": {name: drawn[name].entry() for name in sorted(drawn)}, "sha256": digest}
            _write(archive, CORRECTIONS, small)
            _write(archive, ESCAPED, escaped)
        _write(archive, INDEX, json.dumps(about).encode())
        for size, parts in sorted(by_size.items()):
            joined = np.concatenate(parts)
            for plane in range(size):
                _write(archive, f"{size}.{plane}", joined[:, plane].tobytes())


def load_packed(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file made by `save_packed`. Raises: ValueError if drawn values are not those stored."""
    with zipfile.ZipFile(path) as archive:
        index = json.loads(archive.read(INDEX))
        drawn = {name: Drawn(**entry) for name, entry in index.get("drawn", {}).items()}
        sizes = sorted({_dtype(kind).itemsize for name, kind, _ in index["tensors"] if name not in drawn})
        drawn_values = _drawn_values(archive, drawn)
        numbers = {size: _numbers(archive, size) for size in sizes}
    if drawn and (got := _digest(drawn_values)) != index["sha256"]:
        raise ValueError(f"{path}: expected drawn values with the digest {index['sha256']}, got {got}")
    tensors, ends = {}, dict.fromkeys(sizes, 0)
    for name, kind, shape in index["tensors"]:
        if name in drawn:
            tensors[name] = torch.from_numpy(drawn_values[name]).view(shape)
            continue
        dtype = _dtype(kind)
        start = ends[dtype.itemsize]
        end = ends[dtype.itemsize] = start + int(np.prod(shape))
        flat = torch.from_numpy(numbers[dtype.itemsize][start:end].copy())
        tensors[name] = flat.flatten().view(dtype).view(shape)
    return tensors, index["metadata"]


def _corrections(tensors: dict[str, Tensor], drawn: Mapping[str, Drawn]) -> tuple[bytes, bytes, str]:
    """Corrections and escaped values of all drawn tensors in the order of their names, and the digest of the values."""
    small, escaped, found = [], [], {}
    outputs = _outputs(drawn)
    for name in sorted(drawn):
        values = tensors[name].detach().cpu().contiguous().flatten().numpy()
        codes, rest = corrections(values, drawn[name].values(outputs[drawn[name].seed]))
        small.append(codes.tobytes())
        escaped.append(rest.tobytes())
        found[name] = values
    return b"".join(small), b"".join(escaped), _digest(found)


def _digest(values: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(values[name].tobytes())
    return digest.hexdigest()


def _drawn_values(archive: zipfile.ZipFile, drawn: Mapping[str, Drawn]) -> dict[str, np.ndarray]:
    """[n] float32 of each drawn tensor."""
    if not drawn:
        return {}
    small = np.frombuffer(archive.read(CORRECTIONS), np.uint8)
    escaped = np.frombuffer(archive.read(ESCAPED), np.float32)
    outputs, values = _outputs(drawn), {}
    for name in sorted(drawn):
        predicted = drawn[name].values(outputs[drawn[name].seed])
        n, n_escaped = len(predicted), int((small[: len(predicted)] == ESCAPE).sum())
        values[name] = corrected(predicted, small[:n], escaped[:n_escaped])
        small, escaped = small[n:], escaped[n_escaped:]
    return values


def _outputs(drawn: Mapping[str, Drawn]) -> dict[int, np.ndarray]:
    """The outputs of each seed that are needed."""
    ends: dict[int, int] = defaultdict(int)
    for one in drawn.values():
        ends[one.seed] = max(ends[one.seed], one.end)
    return {seed: outputs_of(seed, end) for seed, end in ends.items()}


def _write(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    member = zipfile.ZipInfo(name, NO_DATE)
    # Compression makes incompressible data larger.
    is_compressible = len(zlib.compress(data)) < len(data)
    member.compress_type = zipfile.ZIP_LZMA if is_compressible else zipfile.ZIP_STORED
    archive.writestr(member, data)


def _numbers(archive: zipfile.ZipFile, size: int) -> np.ndarray:
    """[n, size] bytes of all elements of one item size."""
    planes = [np.frombuffer(archive.read(f"{size}.{plane}"), np.uint8) for plane in range(size)]
    return np.stack(planes, axis=1)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
