"""The command line of a module that packs files for a machine without them."""

import argparse
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path


def pack(what: str, name: str, collect: Callable[[Path], None]) -> None:
    """Parse `--out FILE` and write that archive.

    Args:
        what: for the help text.
        name: of the archive's one folder.
        collect: fills the folder, which does not exist yet.
    """
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / name
        collect(root)
        with tarfile.open(out, "w:xz", preset=9) as archive:
            archive.add(root, arcname=name)
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")
