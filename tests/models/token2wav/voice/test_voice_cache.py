"""Prepared voices on disk: read back bit-identically, verified, and never the cause of an error."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from models.errors import AudioError, SettingsError
from models.token2wav.voice.voice import Voice
from models.token2wav.voice.voice_cache import SUFFIX, VoiceCache
from tests.models.compare import assert_same
from tests.models.test_atomic_file import disk_with_room_for
from tests.models.token2wav.prompt.prompt_sounds import prompt

RATE = 16_000
SOUND = prompt(0.6, channels=2)


class Maker:
    """Prepares a voice that is unique to the sound, and counts its calls."""

    def __init__(self, n_speech_tokens: int = 13):
        self.n_speech_tokens, self.n_made = n_speech_tokens, 0

    def __call__(self, wave: torch.Tensor, rate: int) -> Voice:
        assert wave.dtype == torch.float32 and wave.ndim == 2
        self.n_made += 1
        generator = torch.Generator().manual_seed(int(wave.double().abs().sum() * 1e6) + rate)
        speech_tokens = torch.randint(0, 6561, (self.n_speech_tokens,), generator=generator)
        return Voice(
            speech_tokens,
            torch.randn(2 * self.n_speech_tokens, 20, generator=generator),
            torch.randn(24, generator=generator),
        )


def assert_same_voice(got: Voice, expected: Voice) -> None:
    for name in ("speech_tokens", "mel", "speaker"):
        assert_same(getattr(got, name), getattr(expected, name), name)


def voice_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def stored(folder: Path, sound: np.ndarray = SOUND) -> tuple[Voice, Path]:
    """A voice and its file, just stored."""
    before = set(voice_files(folder))
    voice = VoiceCache(folder, "digest").get_or_make(sound, RATE, Maker())
    [path] = set(voice_files(folder)) - before
    return voice, path


def read_again(folder: Path, sound: np.ndarray = SOUND) -> tuple[Voice, bool]:
    """The voice in another process, and whether that process prepared it."""
    make, cache = Maker(), VoiceCache(folder, "digest")
    voice = cache.get_or_make(sound, RATE, make)
    assert cache.problem is None
    return voice, make.n_made == 1


def test_prepares_a_voice_once(tmp_path: Path) -> None:
    expected, path = stored(tmp_path / "new" / "folder")
    got, made = read_again(tmp_path / "new" / "folder")
    assert not made and voice_files(path.parent) == [path]
    assert_same_voice(got, expected)
    assert got.digest == expected.digest


def test_key_depends_on_samples_rate_and_maker(tmp_path: Path) -> None:
    nudged = SOUND.copy()
    nudged[1, -1] += 1e-6
    requests = [
        ("digest", SOUND, RATE),
        ("other", SOUND, RATE),
        ("digest", SOUND, RATE // 2),
        ("digest", nudged, RATE),
        ("digest", SOUND[::-1], RATE),
        ("digest", SOUND[:1], RATE),
        ("digest", SOUND.reshape(1, -1), RATE),
    ]
    make = Maker()
    for digest, sound, rate in requests * 2:
        VoiceCache(tmp_path, digest).get_or_make(sound, rate, make)
    assert make.n_made == len(voice_files(tmp_path)) == len(requests)


def test_key_does_not_depend_on_the_form_of_the_sound(tmp_path: Path) -> None:
    make, cache = Maker(), VoiceCache(tmp_path, "digest")
    for sound in (SOUND, SOUND.astype(np.float64), np.asfortranarray(SOUND), torch.from_numpy(SOUND)):
        cache.get_or_make(sound, RATE, make)
    for sound in (SOUND[:1], SOUND[0]):
        cache.get_or_make(sound, np.int64(RATE), make)
    assert make.n_made == 2


@given(data=st.data())
def test_replaces_damaged_files(tmp_path_factory, data) -> None:
    folder = tmp_path_factory.mktemp("cache")
    expected, path = stored(folder)
    content = path.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "flip", "longer", "noise", "header"]))
    position = data.draw(st.integers(0, (400 if kind == "header" else len(content)) - 1))
    if kind == "cut":
        damaged = content[:position]
    elif kind == "longer":
        damaged = content + bytes(1 + position)
    elif kind == "noise":
        damaged = np.random.default_rng(position).bytes(position)
    else:
        changed = content[position] ^ (1 << data.draw(st.integers(0, 7)))
        damaged = content[:position] + bytes([changed]) + content[position + 1 :]
    path.write_bytes(damaged)
    got, made = read_again(folder)
    assert_same_voice(got, expected)
    # A change in the padding of the header has no effect.
    assert made or kind in {"flip", "header"}
    if made:
        assert path.read_bytes() == content
        assert not read_again(folder)[1]


def test_rejects_a_voice_under_another_name(tmp_path: Path) -> None:
    _, path = stored(tmp_path)
    expected, other = stored(tmp_path, prompt(0.7))
    other.write_bytes(path.read_bytes())
    got, made = read_again(tmp_path, prompt(0.7))
    assert made
    assert_same_voice(got, expected)


@pytest.mark.parametrize("change", ["value", "type", "missing", "more", "seal"])
def test_rejects_valid_files_of_other_content(tmp_path: Path, change: str) -> None:
    expected, path = stored(tmp_path)
    tensors = load_file(path)
    if change == "value":
        tensors["mel"][3, 5] += 1e-6
    elif change == "type":
        tensors["mel"] = tensors["mel"].double()
    elif change == "missing":
        del tensors["speaker"]
    elif change == "more":
        tensors["more"] = torch.zeros(1)
    else:
        del tensors["seal"]
    save_file(tensors, path)
    got, made = read_again(tmp_path)
    assert made
    assert_same_voice(got, expected)


def test_reports_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    expected, path = stored(tmp_path)
    path.unlink()
    path.mkdir()
    make, cache = Maker(), VoiceCache(tmp_path, "digest")
    for n_made in (1, 2):
        assert_same_voice(cache.get_or_make(SOUND, RATE, make), expected)
        assert make.n_made == n_made
        assert cache.problem == f"{tmp_path}: something other than a regular file"


def test_reports_a_missing_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    make, cache = Maker(), VoiceCache(tmp_path / "file" / "cache", "digest")
    assert cache.problem is None
    for n_made in (1, 2):
        cache.get_or_make(SOUND, RATE, make)
        assert make.n_made == n_made
        assert cache.problem == f"{tmp_path}/file/cache: Not a directory"


def test_reports_a_full_disk(tmp_path: Path) -> None:
    make, cache = Maker(), VoiceCache(tmp_path, "digest")
    with disk_with_room_for(1000):
        first = cache.get_or_make(SOUND, RATE, make)
        assert cache.problem == f"{tmp_path}: File too large"
    assert list(tmp_path.iterdir()) == []
    assert_same_voice(cache.get_or_make(SOUND, RATE, make), first)
    assert cache.problem is None and make.n_made == 2 and len(voice_files(tmp_path)) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_reports_a_read_only_folder(tmp_path: Path) -> None:
    expected, _ = stored(tmp_path)
    tmp_path.chmod(0o500)
    try:
        assert_same_voice(read_again(tmp_path)[0], expected)
        cache = VoiceCache(tmp_path, "digest")
        cache.get_or_make(prompt(0.7), RATE, Maker())
        assert cache.problem == f"{tmp_path}: Permission denied"
    finally:
        tmp_path.chmod(0o700)


def test_reads_a_voice_whose_time_cannot_be_updated(tmp_path: Path, monkeypatch) -> None:
    expected, _ = stored(tmp_path)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    got, made = read_again(tmp_path)
    assert not made
    assert_same_voice(got, expected)


def test_propagates_errors_of_make(tmp_path: Path) -> None:
    cache = VoiceCache(tmp_path / "cache", "digest")

    def fail(wave: torch.Tensor, rate: int) -> Voice:
        raise AudioError("prompt sound", expected="speech", got="a dog")

    with pytest.raises(AudioError, match="a dog"):
        cache.get_or_make(SOUND, RATE, fail)
    with pytest.raises(AudioError, match="duration"):
        cache.get_or_make(SOUND[:, :99], RATE, fail)
    assert not (tmp_path / "cache").exists()


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_removes_the_least_recently_used_voices(tmp_path: Path) -> None:
    sounds = [prompt(0.6, seed=seed) for seed in range(5)]
    paths = []
    for number, sound in enumerate(sounds[:4]):
        _, path = stored(tmp_path, sound)
        paths.append(path)
        age(path, 1000 - 100 * number)
    size = paths[0].stat().st_size
    assert not read_again(tmp_path, sounds[0])[1]  # the oldest voice is used again
    cache = VoiceCache(tmp_path, "digest", max_bytes=3 * size)
    cache.get_or_make(sounds[4], RATE, Maker())
    assert cache.problem is None
    got = set(voice_files(tmp_path))
    assert len(got) == 3 and got > {paths[0], paths[3]}, f"expected the first, the fourth and the new one, got {got}"


def test_keeps_the_new_voice_at_any_clock_time(tmp_path: Path) -> None:
    _, old = stored(tmp_path)
    age(old, -1000)
    VoiceCache(tmp_path, "digest", max_bytes=old.stat().st_size).get_or_make(prompt(0.7), RATE, Maker())
    [left] = voice_files(tmp_path)
    assert left != old


def test_removes_voices_only(tmp_path: Path) -> None:
    _, old = stored(tmp_path)
    (tmp_path / f"mine{SUFFIX}").write_bytes(bytes(10_000))
    (tmp_path / "weights.json").write_bytes(bytes(10_000))
    (tmp_path / ".notes.tmp").write_bytes(b"")
    pending, abandoned = (tmp_path / f".{old.name}.{number:016x}.tmp" for number in range(2))
    for path in (pending, abandoned):
        path.write_bytes(b"half a voice")
    for path in tmp_path.iterdir():
        age(path, 600 if path == pending else 7200)
    cache = VoiceCache(tmp_path, "digest", max_bytes=old.stat().st_size + 10)
    cache.get_or_make(prompt(0.7), RATE, Maker())
    assert cache.problem is None
    [new] = set(voice_files(tmp_path)) - {tmp_path / f"mine{SUFFIX}"}
    assert new != old
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {new.name, f"mine{SUFFIX}", "weights.json", ".notes.tmp", pending.name}


def test_does_not_store_a_voice_larger_than_the_limit(tmp_path: Path) -> None:
    _, path = stored(tmp_path)
    size = path.stat().st_size
    cache = VoiceCache(tmp_path, "digest", max_bytes=size - 1)
    cache.get_or_make(prompt(0.7), RATE, Maker())
    assert cache.problem == f"the voice has {size} bytes, the limit of the cache is {size - 1}"
    assert voice_files(tmp_path) == [path]
    with pytest.raises(SettingsError, match="voice cache: max_bytes: expected at least 1, got 0"):
        VoiceCache(tmp_path, "digest", max_bytes=0)


def test_many_writers_in_a_small_folder(tmp_path: Path) -> None:
    sounds = [prompt(0.6, seed=seed) for seed in range(6)]
    expected = [Maker()(torch.from_numpy(sound), RATE) for sound in sounds]
    _, path = stored(tmp_path, sounds[0])
    max_bytes = 3 * path.stat().st_size
    problems: list[object] = []

    def work(number: int) -> None:
        order = np.random.default_rng(number).integers(0, len(sounds), 40)
        cache = VoiceCache(tmp_path, "digest", max_bytes=max_bytes)
        for which in order:
            try:
                assert_same_voice(cache.get_or_make(sounds[which], RATE, Maker()), expected[which])
            except BaseException as error:
                problems.append(error)
            if cache.problem:
                problems.append(cache.problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    VoiceCache(tmp_path, "digest", max_bytes=max_bytes).get_or_make(prompt(0.8), RATE, Maker())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= max_bytes
