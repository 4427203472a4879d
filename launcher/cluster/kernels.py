"""Portable archives of compiled kernels, of which a cluster's nodes get those that they lack before a worker starts.

`precompile.py` and each worker write one for their device, model and settings (docs/compile.md). Its name is a key of
all of these, so a worker finds its own, and checks its digest.
"""

from collections.abc import Mapping
from pathlib import Path

from models.atomic_file import write_atomically
from models.errors import SettingsError

MANIFESTS, SUFFIX = "manifests", ".artifact"  # as in worker/compile/cache.py


def read_archives(cache_dir: Path) -> dict[str, bytes]:
    """The archives in a cache folder, by file name. Raises: SettingsError if there is none."""
    found = {path.name: path.read_bytes() for path in sorted((cache_dir / MANIFESTS).glob(f"*{SUFFIX}"))}
    if not found:
        expected = f"archives of kernels in {cache_dir / MANIFESTS} (precompile.py writes them)"
        raise SettingsError("--push-kernels", expected=expected, got="none")
    return found


def write_missing(archives: Mapping[str, bytes], cache_dir: Path) -> int:
    """Write the archives that a node's cache folder lacks. Returns: how many. Raises: OSError."""
    folder, n_written = cache_dir / MANIFESTS, 0
    for name, content in archives.items():
        if not (path := folder / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
            n_written += 1
    return n_written
