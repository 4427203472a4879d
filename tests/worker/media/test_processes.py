"""The decoders of media files: which program runs, what it reports, and its end."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.media.files import RATE, encode, fake_ffmpeg, n_samples, running
from worker import media
from worker.media import MediaError, read_units


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
        "sys.exit('complaint\\n' * 10_000 + 'out of luck')"
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
