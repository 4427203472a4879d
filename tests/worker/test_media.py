"""Media files as units: the contents of each second, refused files, and the end of all child processes."""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from models.errors import SettingsError
from worker import media
from worker.media import MediaError, MediaLimits, MediaUnit, read_units

RATE = 16_000
# A second each; far apart in every channel, so that lossy codecs do not matter.
COLOURS = ["red", "lime", "blue", "white"]
RGB = {"red": (255, 0, 0), "lime": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


def encode(path: Path, *arguments: str) -> Path:
    """A file encoded by ffmpeg."""
    command = [media.ffmpeg_program(), "-nostdin", "-loglevel", "error", *arguments, "-y", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return path


def slides(*seconds: float, size: str = "64x48", rate: int = 10) -> list[str]:
    """Input arguments: a sequence of colours with their durations."""
    inputs = [
        f"color={colour}:s={size}:r={rate}:d={d}[{i}]"
        for i, (colour, d) in enumerate(zip(COLOURS, seconds, strict=False))
    ]
    joined = "".join(f"[{i}]" for i in range(len(seconds))) + f"concat=n={len(seconds)}"
    return ["-f", "lavfi", "-i", ";".join([*inputs, joined])]


def tone(seconds: float, *, rate: int = 44_100) -> list[str]:
    """Input arguments: 440 Hz at 1/8 of full scale."""
    return ["-f", "lavfi", "-i", f"sine=f=440:r={rate}:d={seconds}"]


def colour(frame: Image.Image) -> str:
    """The nearest of the colours to a frame's centre."""
    pixel = frame.getpixel((frame.width // 2, frame.height // 2))
    return min(RGB, key=lambda name: sum(abs(a - b) for a, b in zip(RGB[name], pixel, strict=True)))


def colours(units: list[MediaUnit]) -> list[list[str]]:
    return [[colour(frame) for frame in unit.frames] for unit in units]


def n_samples(units: list[MediaUnit]) -> list[int]:
    return [unit.n_samples for unit in units]


def assert_tone(sound: np.ndarray, what: str) -> None:
    """Assert that 440 Hz dominates the spectrum."""
    power = np.abs(np.fft.rfft(sound * np.hanning(len(sound)))) ** 2
    loudest = power.argmax() * RATE / len(sound)
    assert abs(loudest - 440) < 5, f"{what}: expected 440 Hz, got {loudest:.0f}"
    level = np.sqrt(2 * np.mean(sound**2))
    assert abs(level - 1 / 8) < 0.02, f"{what}: expected a level of 0.125, got {level:.3f}"


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen]]:
    """All processes that a test starts. At its end no process, pipe or thread of them may remain."""
    processes: list[subprocess.Popen] = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    yield processes
    assert not running(processes), f"expected no process left, got {running(processes)}"
    pipes = [pipe for process in processes for pipe in (process.stdout, process.stderr) if pipe]
    assert all(pipe.closed for pipe in pipes), "expected all pipes closed"
    listeners = [thread for thread in threading.enumerate() if thread.name == "ffmpeg-stderr"]
    assert not listeners, f"expected no listener left, got {listeners}"


def running(processes: list[subprocess.Popen]) -> list[list[str]]:
    """Command lines of processes without an exit status: running ones and zombies."""
    return [list(process.args) for process in processes if process.returncode is None]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.6 s of colours and tone."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    return encode(path, *slides(1, 1, 1, 0.6), *tone(3.6), "-c:v", "libx264", "-c:a", "aac")


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


def test_closing_early_ends_the_processes(clip: Path, started: list[subprocess.Popen]) -> None:
    iterator = iter(read_units(clip))
    next(iterator)
    assert len(running(started)) == 2, f"expected two decoders at work, got {running(started)}"
    iterator.close()
    assert not running(started), "expected both gone"


def test_a_failing_consumer_ends_the_processes(clip: Path, started: list[subprocess.Popen]) -> None:
    with pytest.raises(KeyError):
        for _ in read_units(clip):
            raise KeyError
    assert not running(started), f"expected both decoders gone, got {running(started)}"


def test_abandoned_iteration_does_not_block_exit(clip: Path, root: Path) -> None:
    """The interpreter finalizes it when threads are stopped and may hold locks."""
    code = "import sys; from worker.media import read_units; kept = [iter(read_units(sys.argv[1]))]; next(kept[0])"
    command = [sys.executable, "-c", f"{code}; kept.append(kept); del kept", str(clip)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"expected exit status 0, got {done.returncode}:\n{done.stderr}"


def test_file_names_that_resemble_options_or_urls(tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-i.mp4", "http:x.mp4", "a b'%d;.mp4", "é.mp4"):
        Path(name).write_bytes(clip.read_bytes())
        assert len(list(read_units(name, max_units=1))) == 1, name


def test_playlists_do_not_reach_the_network(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/a.ts"
        (tmp_path / "a.m3u8").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{address}\n#EXT-X-ENDLIST\n")
        with pytest.raises(MediaError, match="expected media that ffmpeg decodes"):
            read_units(tmp_path / "a.m3u8")
        with pytest.raises(BlockingIOError):
            server.accept()


def fake_ffmpeg(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "ffmpeg"
    program.write_text(f"#!{sys.executable}\nimport sys\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_endless_decoder_is_read_lazily(tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are decoded on demand, and closing the iterator ends the decoder."""
    script = (
        "if 'framecrc' in sys.argv: sys.exit(print('#media_type 0: audio'))\n"
        "while True: sys.stdout.buffer.write(bytes(64000))"
    )
    fake_ffmpeg(tmp_path, script, monkeypatch)
    assert n_samples(list(read_units(clip, max_units=3))) == [RATE] * 3
    iterator = iter(read_units(clip))
    assert next(iterator).n_samples == RATE
    iterator.close()


def write_text(path: Path) -> Path:
    path.write_text("1\n00:00:00,000 --> 00:00:02,000\nhello\n")
    return path


def write_noise(path: Path) -> Path:
    path.write_bytes(np.random.default_rng(0).bytes(5_000))
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "none.mp4", "expected a media file, got no such file"),
        (lambda path: path, "expected a media file, got a folder"),
        (lambda path: write_text(path / "a.srt"), "expected sound or video, got neither"),
        (lambda path: write_noise(path / "a.mp4"), "expected media that ffmpeg decodes, got .*Invalid data found"),
        (lambda path: write_noise(path / "a"), "expected media that ffmpeg decodes, got .*Invalid data found"),
    ],
    ids=["missing", "folder", "subtitles", "noise", "noise without a name"],
)
def test_refuses_files_that_are_not_media(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(MediaError, match=message) as caught:
        read_units(make(tmp_path))
    assert str(tmp_path) in str(caught.value), f"expected the file's name, got {caught.value}"


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "webp"])
def test_refuses_still_pictures(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"x.{suffix}"
    Image.new("RGB", (64, 48)).save(file)
    with pytest.raises(MediaError) as error:
        read_units(file)
    assert str(error.value) == f"{file}: expected sound or video, got a still picture"


def test_header_without_samples(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(0, np.float32), RATE)
    with pytest.raises(MediaError, match="expected sound or video, got nothing decoded"):
        list(read_units(tmp_path / "a.wav"))


def test_prefers_the_systems_ffmpeg_and_reports_its_error(
    tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ffmpeg(tmp_path, "sys.exit('first\\nlast words\\n')", monkeypatch)
    with pytest.raises(MediaError, match="expected media that ffmpeg decodes, got last words"):
        read_units(clip)
    fake_ffmpeg(tmp_path, "sys.exit(3)", monkeypatch)
    with pytest.raises(MediaError, match="got exit status 3"):
        read_units(clip)


def test_reports_failure_while_decoding(tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that fails after 1.5 s, with more error output than a pipe holds."""
    script = (
        "if 'framecrc' in sys.argv: sys.exit(print('#media_type 0: audio'))\n"
        "sys.stdout.buffer.write(bytes(96000)); sys.stdout.flush()\n"
        "sys.exit('complaint\\n' * 100_000 + 'out of luck')"
    )
    fake_ffmpeg(tmp_path, script, monkeypatch)
    iterator = iter(read_units(clip))
    assert next(iterator).n_samples == RATE
    with pytest.raises(MediaError, match="got out of luck"):
        next(iterator)


def test_logs_decoding_errors_once(tmp_path: Path, clip: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = encode(tmp_path / "whole.mp4", "-i", str(clip), "-c", "copy", "-movflags", "+faststart")
    (tmp_path / "cut.mp4").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with caplog.at_level(logging.WARNING, "worker.media"):
        got = list(read_units(tmp_path / "cut.mp4", frames_per_second=0))
    assert 0 < len(got) < 4, f"expected what is there, got {len(got)} units"
    assert len(caplog.messages) == 1 and "cut.mp4: decoded with errors: " in caplog.text, caplog.messages


def test_without_any_ffmpeg(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise RuntimeError

    monkeypatch.setattr(media.shutil, "which", lambda _: None)
    monkeypatch.setattr(media.imageio_ffmpeg, "get_ffmpeg_exe", none)
    with pytest.raises(MediaError, match="ffmpeg: expected the program on the PATH, got none"):
        read_units(clip)


def test_falls_back_to_the_packaged_ffmpeg(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert len(list(read_units(clip, max_units=1))) == 1


@pytest.mark.parametrize(
    "odd", [{"frames_per_second": -1}, {"frames_per_second": 31}, {"frames_per_second": 0.5}, {"max_units": 0}]
)
def test_refuses_invalid_settings(clip: Path, odd: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=r"expected a whole number .*, got "):
        read_units(clip, **odd)


def test_files_of_clients_end_at_their_limits(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = read_units(clip, max_units=2, limits=MediaLimits("mov", 60.0))
    assert units.sound_s == pytest.approx(2.0, abs=0.1) and 2 <= units.video_s <= 2.5, units
    assert len(list(units)) == 2
    monkeypatch.setattr(media, "MAX_FRAME_PIXELS", 16)
    with pytest.raises(MediaError):
        list(read_units(clip, limits=MediaLimits("mov", 60.0)))
    with pytest.raises(MediaError):
        read_units(clip, limits=MediaLimits("wav", 60.0))


def test_decoding_of_a_client_s_file_has_a_limit_of_time(
    tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ffmpeg(tmp_path, "import time; time.sleep(600)", monkeypatch)
    with pytest.raises(MediaError, match=r"at most 0\.5 s of decoding, got a file that takes longer"):
        read_units(clip, limits=MediaLimits("mov", 0.5))
