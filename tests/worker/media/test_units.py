"""Media files as units: the contents of each second."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.worker.media.files import (
    RATE,
    assert_tone,
    colours,
    encode,
    n_samples,
    slides,
    tone,
)
from worker.media import read_units


@pytest.mark.parametrize(("name", "codecs"), [("a.mp4", ["libx264", "aac"]), ("a.mkv", ["ffv1", "pcm_s16le"])])
def test_decodes_sound_and_video(tmp_path: Path, name: str, codecs: list[str]) -> None:
    video, audio = codecs
    file = encode(tmp_path / name, *slides(1, 1, 1, 0.6), *tone(3.6), "-c:v", video, "-c:a", audio)
    units = read_units(file)
    assert (units.has_sound, units.has_video) == (True, True)
    got = list(units)
    assert n_samples(got)[:3] == [RATE] * 3
    # An encoder may fill up its last block.
    assert 9_600 <= n_samples(got)[3] < 9_600 + 800, f"expected 0.6 s, got {n_samples(got)[3]} samples"
    assert colours(got) == [["red"], ["lime"], ["blue"], ["white"]]
    for unit in got:
        assert unit.sound.shape == (RATE,) and unit.sound.dtype == np.float32, (unit.sound.shape, unit.sound.dtype)
        assert_tone(unit.sound[: min(unit.n_samples, RATE - 6_400)], name)
        assert not unit.sound[unit.n_samples :].any(), "expected silence after the end"
        assert [(frame.mode, frame.size) for frame in unit.frames] == [("RGB", (64, 48))]


def test_wav_comes_through_unchanged(tmp_path: Path) -> None:
    """A 16 kHz mono file keeps its samples exactly."""
    sound = np.random.default_rng(0).normal(0, 0.2, 40_000).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", sound, RATE, subtype="FLOAT")
    units = read_units(tmp_path / "a.wav")
    assert (units.has_sound, units.has_video) == (True, False)
    got = list(units)
    assert n_samples(got) == [RATE, RATE, 8_000] and colours(got) == [[], [], []]
    whole = np.concatenate([unit.sound[: unit.n_samples] for unit in got])
    assert np.array_equal(whole, sound), f"expected the same samples, got max diff {np.abs(whole - sound).max()}"
    got[0].sound[:] = 0  # a unit is writable


@pytest.mark.parametrize(("left", "right"), [(0.5, 0.0), (0.9, 0.9), (0.5, -0.5)])
def test_channels_become_their_mean(tmp_path: Path, left: float, right: float) -> None:
    soundfile.write(tmp_path / "a.wav", np.tile([left, right], (RATE, 1)), RATE, subtype="FLOAT")
    (unit,) = read_units(tmp_path / "a.wav")
    off = np.abs(unit.sound - (left + right) / 2).max()
    assert off < 1e-3, f"expected the mean of {left} and {right}, got {unit.sound[:3]}"


def test_video_without_sound(tmp_path: Path) -> None:
    units = read_units(encode(tmp_path / "a.mkv", *slides(1, 1), "-c:v", "ffv1"))
    assert (units.has_sound, units.has_video) == (False, True)
    got = list(units)
    assert n_samples(got) == [0, 0] and colours(got) == [["red"], ["lime"]]
    assert all(unit.sound.shape == (RATE,) and not unit.sound.any() for unit in got), "expected silence"


def test_length_is_that_of_the_longer_stream(tmp_path: Path) -> None:
    file = encode(tmp_path / "a.mkv", *slides(1, 1, 1), *tone(1.5), "-c:v", "ffv1", "-c:a", "flac")
    got = list(read_units(file))
    assert n_samples(got) == [RATE, 8_000, 0] and colours(got) == [["red"], ["lime"], ["blue"]]
    file = encode(tmp_path / "b.mkv", *slides(1), *tone(2.5), "-c:v", "ffv1", "-c:a", "flac")
    got = list(read_units(file))
    assert n_samples(got) == [RATE, RATE, 8_000] and colours(got) == [["red"], [], []]


def test_streams_that_start_late_stay_in_time(tmp_path: Path) -> None:
    late = ["-itsoffset", "1.5"]
    file = encode(tmp_path / "a.mkv", *slides(1, 1, 1), *late, *tone(1), "-c:v", "ffv1", "-c:a", "pcm_s16le")
    got = list(read_units(file))
    assert n_samples(got) == [RATE, RATE, 8_000] and colours(got) == [["red"], ["lime"], ["blue"]]
    before = np.abs(np.concatenate([got[0].sound, got[1].sound[:7_900]])).max()
    assert before < 1e-3, f"expected silence until 1.5 s, got a level of {before}"
    assert_tone(got[1].sound[8_000:], "second half of the second")
    file = encode(tmp_path / "b.mkv", *late, *slides(1.5, 1), *tone(4), "-c:v", "ffv1", "-c:a", "pcm_s16le")
    got = list(read_units(file))
    assert n_samples(got) == [RATE] * 4
    assert colours(got) == [["red"], ["red"], ["red"], ["lime"]], "expected the first picture until the next"


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, [[], [], []]),
        (2, [["red", "red"], ["lime", "lime"], ["blue"]]),
        (4, [["red"] * 4, ["lime"] * 4, ["blue"] * 2]),
    ],
)
def test_frames_per_second(tmp_path: Path, n: int, expected: list[list[str]]) -> None:
    file = encode(tmp_path / "a.mkv", *slides(1, 1, 0.5, rate=20), *tone(2.5), "-c:v", "ffv1", "-c:a", "flac")
    units = read_units(file, frames_per_second=n)
    assert units.has_video == (n > 0)
    assert colours(list(units)) == expected


def test_frames_come_from_the_middle_of_their_time(tmp_path: Path) -> None:
    """Red until 0.4 s, lime until 0.6 s, then blue: one picture per second shows the middle of it."""
    file = encode(tmp_path / "a.mkv", *slides(0.4, 0.2, 0.4, rate=20), "-c:v", "ffv1")
    assert colours(list(read_units(file))) == [["lime"]]


def test_frames_keep_the_first_frames_size(tmp_path: Path) -> None:
    red, green = ["color=red:s=64x48:r=10:d=1"], ["color=lime:s=96x32:r=10:d=1"]
    for name, source in (("a.ts", red), ("b.ts", green)):
        encode(tmp_path / name, "-f", "lavfi", "-i", *source, "-c:v", "mpeg2video", "-q:v", "2")
    (tmp_path / "both.ts").write_bytes((tmp_path / "a.ts").read_bytes() + (tmp_path / "b.ts").read_bytes())
    got = list(read_units(tmp_path / "both.ts"))
    assert {frame.size for unit in got for frame in unit.frames} == {(64, 48)}
    assert [seen for unit in colours(got) for seen in unit][:: len(got) - 1] == ["red", "lime"], colours(got)


@pytest.mark.parametrize(
    ("n", "expected"), [(1, [1]), (1_599, [1_599]), (16_000, [RATE]), (17_599, [RATE]), (17_600, [RATE, 1_600])]
)
def test_codec_padding_is_not_a_unit(tmp_path: Path, n: int, expected: list[int]) -> None:
    """A rest of less than 0.1 s is dropped, unless the file has no other sound."""
    soundfile.write(tmp_path / "a.wav", np.full(n, 0.1, np.float32), RATE, subtype="FLOAT")
    assert n_samples(list(read_units(tmp_path / "a.wav"))) == expected


def test_cover_picture_is_no_video(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "cover.png")
    cover = ["-i", str(tmp_path / "cover.png"), "-map", "0:a", "-map", "1:v", "-disposition:v", "attached_pic"]
    units = read_units(encode(tmp_path / "a.mp3", *tone(1), *cover, "-c:a", "libmp3lame", "-c:v", "copy"))
    assert (units.has_sound, units.has_video) == (True, False)


def test_max_units_ends_early(clip: Path) -> None:
    assert colours(list(read_units(clip, max_units=2))) == [["red"], ["lime"]]
    assert len(list(read_units(clip, max_units=9))) == 4


def test_every_iteration_decodes_again(clip: Path) -> None:
    units = read_units(clip)
    assert colours(list(units)) == colours(list(units)) != []
