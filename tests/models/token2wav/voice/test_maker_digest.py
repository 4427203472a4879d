"""The digest of the networks that prepare voices: covers content, and reads unchanged files once."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from models.errors import CheckpointError
from models.token2wav.load.parts import SPEAKER_ENCODER, SPEECH_TOKENIZER
from models.token2wav.voice import maker_digest as module
from models.token2wav.voice.maker_digest import MEMO, maker_digest

DICT_ENTRY = b'{"a": {"1": 1, "2": 2, "3": 3, "4": 4, "5": 5}}'
FILES = (SPEAKER_ENCODER, SPEECH_TOKENIZER)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_bytes(name.encode() * 100)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read for their digests, in order."""
    names: list[str] = []
    file_digest = hashlib.file_digest

    def record(file, kind):
        names.append(Path(file.name).name)
        return file_digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", record)
    return names


def test_reads_files_once(model: Path, cache: Path, read: list[str]) -> None:
    first = maker_digest(model, 80, cache)
    assert read == list(FILES)
    assert maker_digest(model, 80, cache) == first
    assert maker_digest(str(model / ".." / "model"), 80, str(cache)) == first
    assert read == list(FILES), "expected no file to be read again"


def test_digest_depends_on_content_and_recipe(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {maker_digest(model, 80, cache), maker_digest(model, 20, cache)}
    for name in FILES:
        (model / name).write_bytes(b"other content")
        digests.add(maker_digest(model, 80, cache))
    monkeypatch.setattr(module, "RECIPE", module.RECIPE + 1)
    digests.add(maker_digest(model, 80, cache))
    assert len(digests) == 5, f"expected five digests that differ, got {digests}"


def test_a_copy_has_the_same_digest(model: Path, cache: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    assert maker_digest(copy, 80, cache) == maker_digest(model, 80, tmp_path / "other cache")
    assert len(json.loads((cache / MEMO).read_text())) == 2


def test_swapped_files_differ(model: Path, cache: Path) -> None:
    before = maker_digest(model, 80, cache)
    one, other = (model / name for name in FILES)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    assert maker_digest(model, 80, cache) != before


def test_detects_changed_content_with_equal_size_and_mtime(model: Path, cache: Path) -> None:
    before = maker_digest(model, 80, cache)
    path = model / SPEAKER_ENCODER
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert maker_digest(model, 80, cache) != before


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"3", b'{"a": 1}', b'{"a": [1]}', DICT_ENTRY, b"\xff\xfe", b"[" * 100_000, "cut"]
)
def test_rebuilds_a_damaged_memo(model: Path, cache: Path, read: list[str], content: bytes | str) -> None:
    expected = maker_digest(model, 80, cache)
    whole = (cache / MEMO).read_bytes()
    (cache / MEMO).write_bytes(whole[:-20] if content == "cut" else content)
    assert maker_digest(model, 80, cache) == expected
    assert read == [*FILES, *FILES]
    assert json.loads((cache / MEMO).read_bytes()) == json.loads(whole)


def test_does_not_store_the_digest_of_a_file_that_changes_meanwhile(model: Path, cache: Path, monkeypatch) -> None:
    file_digest = hashlib.file_digest

    def change(file, kind):
        digest = file_digest(file, kind)
        with open(file.name, "ab") as written:
            written.write(b"more")
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", change)
        before = maker_digest(model, 80, cache)
    assert not (cache / MEMO).exists()
    assert maker_digest(model, 80, cache) != before


def test_the_memo_is_bounded(model: Path, cache: Path, monkeypatch, read: list[str]) -> None:
    monkeypatch.setattr(module, "_MAX_ENTRIES", 3)
    maker_digest(model, 80, cache)
    other = shutil.copytree(model, model.parent / "copy")
    maker_digest(other, 80, cache)
    memo = json.loads((cache / MEMO).read_bytes())
    assert list(memo)[-2:] == [str(other / name) for name in FILES] and len(memo) == 3


def test_works_without_a_usable_folder(model: Path, cache: Path, read: list[str]) -> None:
    cache.write_text("a file")
    assert maker_digest(model, 80, cache) == maker_digest(model, 80, cache)
    assert read == [*FILES, *FILES]
    assert cache.read_text() == "a file"


def test_refuses_missing_files(model: Path, cache: Path) -> None:
    (model / SPEECH_TOKENIZER).unlink()
    with pytest.raises(CheckpointError, match=f"{SPEECH_TOKENIZER}: expected a readable file, got No such file"):
        maker_digest(model, 80, cache)


def test_refuses_circular_links(model: Path, cache: Path) -> None:
    (model / SPEECH_TOKENIZER).unlink()
    (model / SPEECH_TOKENIZER).symlink_to(SPEECH_TOKENIZER)
    with pytest.raises(CheckpointError, match=f"{SPEECH_TOKENIZER}: expected a readable file, got Too many levels"):
        maker_digest(model, 80, cache)


def test_works_with_a_circular_memo_link(model: Path, cache: Path, read: list[str]) -> None:
    cache.mkdir()
    (cache / MEMO).symlink_to(MEMO)
    assert maker_digest(model, 80, cache) == maker_digest(model, 80, cache)
    assert read == [*FILES, *FILES]
