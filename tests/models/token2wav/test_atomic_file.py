"""Files appear whole or not at all, and only where a file may be."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from models.token2wav.atomic_file import write_atomically


@contextmanager
def disk_with_room_for(n_bytes: int) -> Iterator[None]:
    """Until the end, no file of this process grows beyond `n_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for data in (b"first", b"second, longer", b""):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"old")
    with disk_with_room_for(1000), pytest.raises(OSError, match="File too large"):
        write_atomically(path, b"n" * 5000)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "a", b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far/file")
    write_atomically(tmp_path / "link", b"data")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "far/file").read_bytes() == b"data"


def test_devices_and_folders_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    for name in ("null", "folder"):
        with pytest.raises(FileExistsError, match="something that is no plain file"):
            write_atomically(tmp_path / name, b"data")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(FileNotFoundError, match="no such folder"):
        write_atomically(tmp_path / "absent/file", b"data")
