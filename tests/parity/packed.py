"""Compressed golden tensors that keep every bit.

Neighbouring floats have similar signs and exponents, while their low bytes look random. All tensors with the same item
size are therefore concatenated and split into byte planes: plane 0 has the first byte of every number, plane 1 the
second, and so on. A zip archive compresses each plane separately. Its `index.json` lists names, dtypes and shapes.
"""

import json
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SUFFIX = ".packed"
INDEX = "index.json"
NO_DATE = (1980, 1, 1, 0, 0, 0)  # equal tensors give equal files


def save_packed(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors and the metadata of their original file."""
    by_size: dict[int, list[np.ndarray]] = defaultdict(list)
    entries = []
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        size = plain.element_size()
        by_size[size].append(plain.flatten().view(torch.uint8).numpy().reshape(-1, size))
        entries.append([name, str(plain.dtype).removeprefix("torch."), list(plain.shape)])
    with zipfile.ZipFile(path, "w") as archive:
        _write(archive, INDEX, json.dumps({"tensors": entries, "metadata": metadata or {}}).encode())
        for size, parts in sorted(by_size.items()):
            joined = np.concatenate(parts)
            for plane in range(size):
                _write(archive, f"{size}.{plane}", joined[:, plane].tobytes())


def load_packed(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file made by `save_packed`."""
    with zipfile.ZipFile(path) as archive:
        index = json.loads(archive.read(INDEX))
        sizes = sorted({_dtype(name).itemsize for _, name, _ in index["tensors"]})
        numbers = {size: _numbers(archive, size) for size in sizes}
    tensors, ends = {}, dict.fromkeys(sizes, 0)
    for name, kind, shape in index["tensors"]:
        dtype = _dtype(kind)
        start = ends[dtype.itemsize]
        end = ends[dtype.itemsize] = start + int(np.prod(shape))
        flat = torch.from_numpy(numbers[dtype.itemsize][start:end].copy())
        tensors[name] = flat.flatten().view(dtype).view(shape)
    return tensors, index["metadata"]


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
