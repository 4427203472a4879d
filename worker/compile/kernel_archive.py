"""The kernels of a folder as one file that another folder can be filled from.

torch's portable artifact holds what torch.compile has made. Kernels of our own are made by Triton, which keeps each
with a list of its files by their full paths: where they are put anew, the lists are written anew.

Knows Triton's folder and torch's artifact. Does not know for whom an archive is, nor whether it is whole.
"""

import json
import sys
import zipfile
import zlib
from io import BytesIO
from pathlib import Path, PurePosixPath

import torch

from models.atomic_file import write_atomically

TRITON = "triton"  # folder of the cache in which its kernels lie, by device
TORCH = "torch"  # entry that holds torch's own
LIST = "__grp__"  # what the name of a kernel's list begins with
LISTED = "child_paths"


def pack(folder: Path, names: list[str]) -> bytes | None:
    """All that torch has compiled in this process, and Triton's kernels among the files of these names, relative to
    the folder. None if there is neither.
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
    """Put into the folder what it does not have, and hand torch its own. Returns: whether torch took that.

    Raises: ValueError for what `pack` has not made; nothing was put anywhere then.
    """
    try:
        archive = zipfile.ZipFile(BytesIO(data))
        contents = {name: archive.read(name) for name in archive.namelist()}
        torchs = contents.pop(TORCH, None)
        if strange := [name for name in contents if not _is_kernels(name)]:
            raise ValueError(f"files below {TRITON}/ only, got {strange[0]}")
        lists = {name: _list_in((folder / name).parent, contents[name]) for name in contents if _is_list(name)}
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"expected an archive of kernels: {error}") from error
    # Lists last: a kernel whose list is there counts as there.
    for name, content in {**{name: contents[name] for name in contents if name not in lists}, **lists}.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    return torchs is None or _load_into_torch(torchs)


def _write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Without the time, so that the same files are the same bytes whenever they are packed."""
    archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, compresslevel=1)


def _list_in(folder: Path, content: bytes) -> bytes:
    """A list with its files in this folder."""
    told = json.loads(content)
    return json.dumps({**told, LISTED: {name: str(folder / name) for name in told[LISTED]}}).encode()


def _is_list(name: str) -> bool:
    return PurePosixPath(name).name.startswith(LIST)


def _is_kernels(name: str) -> bool:
    path = PurePosixPath(name)
    return path.parts[:1] == (TRITON,) and ".." not in path.parts


def _saved_by_torch() -> bytes | None:
    if "torch._inductor" not in sys.modules:  # nothing was compiled, and asking would import the compiler
        return None
    saved = torch.compiler.save_cache_artifacts()
    return None if saved is None else saved[0]


def _load_into_torch(data: bytes) -> bool:
    # Loading the compiler makes the kinds of artifacts known that torch may find.
    from torch._functorch._aot_autograd import autograd_cache  # noqa: F401
    from torch._inductor import codecache  # noqa: F401

    return torch.compiler.load_cache_artifacts(data) is not None
