"""Packs the kernels of a folder into one file, and unpacks it into another folder.

torch's portable artifact has the output of torch.compile. The project's own kernels are built by Triton, which stores
each with a list of the full paths of its files, so that unpacking rewrites the lists.

Contains Triton's folder layout and torch's artifact; `cache` checks the digest and the owner of an archive.
"""

import json
import sys
import zipfile
import zlib
from io import BytesIO
from pathlib import Path, PurePosixPath

import torch

from models.atomic_file import write_atomically

TRITON = "triton"  # subfolder of the cache with Triton's kernels, by device
TORCH = "torch"  # entry with torch's artifact
LIST = "__grp__"  # prefix of a kernel's list file
LISTED = "child_paths"


def pack(folder: Path, names: list[str]) -> bytes | None:
    """An archive of everything that torch compiled in this process and of Triton's kernels; None without either.

    Args:
        names: files relative to the folder; those outside Triton's subfolder are ignored.
    """
    torchs = _saved_by_torch()
    kernels = [name for name in names if PurePosixPath(name).parts[0] == TRITON]
    if torchs is None and not kernels:
        return None
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        if torchs is not None:
            _write(archive, TORCH, torchs)
        for name in kernels:
            _write(archive, name, (folder / name).read_bytes())
    return file.getvalue()


def unpack(data: bytes, folder: Path) -> bool:
    """Write missing kernels to the folder, and load torch's artifact. Returns: whether torch accepted the artifact.

    Raises: ValueError for data that is not from `pack`; nothing has been written then.
    """
    try:
        archive = zipfile.ZipFile(BytesIO(data))
        contents = {name: archive.read(name) for name in archive.namelist()}
        torchs = contents.pop(TORCH, None)
        if foreign := [name for name in contents if not _is_kernels(name)]:
            raise ValueError(f"files below {TRITON}/ only, got {foreign[0]}")
        lists = {name: _list_in((folder / name).parent, contents[name]) for name in contents if _is_list(name)}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"expected an archive of kernels: {error}") from error
    # Lists last: Triton takes a kernel whose list exists for complete.
    for name, content in {**{name: contents[name] for name in contents if name not in lists}, **lists}.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    return torchs is None or _load_into_torch(torchs)


def _write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Add a file without its time, so that equal files give equal archives."""
    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, compresslevel=1)


def _list_in(folder: Path, content: bytes) -> bytes:
    """A kernel's list with its paths changed to this folder."""
    entry = json.loads(content)
    return json.dumps({**entry, LISTED: {name: str(folder / name) for name in entry[LISTED]}}).encode()


def _is_list(name: str) -> bool:
    return PurePosixPath(name).name.startswith(LIST)


def _is_kernels(name: str) -> bool:
    path = PurePosixPath(name)
    return path.parts[:1] == (TRITON,) and ".." not in path.parts


def _saved_by_torch() -> bytes | None:
    if "torch._inductor" not in sys.modules:  # nothing was compiled, and the call would import the compiler
        return None
    saved = torch.compiler.save_cache_artifacts()
    return None if saved is None else saved[0]


def _load_into_torch(data: bytes) -> bool:
    # These imports register the artifact types that torch can load.
    from torch._functorch._aot_autograd import autograd_cache  # noqa: F401
    from torch._inductor import codecache  # noqa: F401

    return torch.compiler.load_cache_artifacts(data) is not None
