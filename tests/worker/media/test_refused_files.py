"""Media files and settings that are refused, and the limits of files of clients."""

import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from models.errors import SettingsError
from tests.worker.media.files import RATE, fake_ffmpeg
from worker import media
from worker.media import MediaError, MediaLimits, read_units


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
