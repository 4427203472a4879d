"""Atomic writes: complete or not at all, and only to regular files."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from models.atomic_file import follow_links, write_atomically
from models.token2wav.voice.voice import Voice
from models.token2wav.voice.voice_cache import SUFFIX, VoiceCache
from tests.models.token2wav.prompt.prompt_sounds import prompt


@contextmanager
def disk_with_room_for(n_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes."""
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


def test_permissions_equal_those_of_a_new_file(tmp_path: Path) -> None:
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
        with pytest.raises(FileExistsError, match="something other than a regular file"):
            write_atomically(tmp_path / name, b"data")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(FileNotFoundError, match="no such folder"):
        write_atomically(tmp_path / "absent/file", b"data")


def test_refuses_loops_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", tmp_path / "a" / "file"):
        with pytest.raises(OSError) as caught:
            write_atomically(path, b"data")
        assert caught.value.errno == errno.ELOOP and caught.value.strerror == os.strerror(errno.ELOOP)
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_symlink()) == ["a", "b"]


def test_refuses_loops_of_links_that_resolve_does_not_detect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").symlink_to("a")
    monkeypatch.setattr(Path, "resolve", Path.absolute)  # as in newer versions of Python for such links
    with pytest.raises(OSError) as caught:
        follow_links(tmp_path / "a")
    assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize("name", ["n" * 250, "n" * 255, "\N{GREEK SMALL LETTER PI}" * 127, "n" + "\N{EURO SIGN}" * 84])
def test_names_of_the_maximum_length_are_written(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[str] = []
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: pending.append(path.name) or write(path, data))
    write_atomically(tmp_path / name, b"data")
    assert [entry.name for entry in tmp_path.iterdir()] == [name] and (tmp_path / name).read_bytes() == b"data"
    assert len(os.fsencode(pending[0])) < 128, f"expected a short name, got {pending}"


def test_temporary_files_of_voices_are_removed_by_their_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends during a write leaves a temporary file; the cache of voices removes it later."""
    monkeypatch.setattr(Path, "replace", lambda path, target: None)
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
    write_atomically(tmp_path / f"{'0' * 64}{SUFFIX}", b"part of a voice")
    monkeypatch.undo()
    [abandoned] = tmp_path.iterdir()
    os.utime(abandoned, (0, 0))
    cache = VoiceCache(tmp_path, "digest")
    cache.get_or_make(
        prompt(0.6),
        16_000,
        lambda wave, rate: Voice(torch.zeros(3, dtype=torch.int64), torch.zeros(6, 20), torch.zeros(24)),
    )
    assert cache.problem is None and not abandoned.exists()
