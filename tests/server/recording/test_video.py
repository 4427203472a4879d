"""The video where ffmpeg is missing, fails, or has no libass."""

from pathlib import Path

import av
import numpy as np
import pytest

from server.recording.files import create_folder, read_json
from server.recording.render import replay_video
from server.recording.render.folder import begin_completion
from server.recording.timeline import FILE_NAME, RecordSource, TimelineFile
from tests.server.recording.recorded import result, tone
from tests.server.recording.test_duplex import picture
from worker.media import MediaError
from worker.protocol.messages import AudioChunk, Prepare, write
from worker.protocol.wire import Sound

META = {"session_id": "x", "app_type": "omni_duplex", "created_at": "2026-05-01T10:00:00+00:00"}


def completed(folder: Path, *pictures: bytes) -> dict[str, object]:
    """Complete a recording with these pictures in this process. Returns: `recording.json`."""
    create_folder(folder, META)
    with TimelineFile(folder / FILE_NAME, create=True) as timeline:
        timeline.append(RecordSource.CLIENT, 0.0, write(Prepare()))
        for number, one in enumerate(pictures, 1):
            chunk = AudioChunk(audio_base64=Sound(tone(440, 1, 16_000)), frame_base64_list=[one])
            timeline.append(RecordSource.CLIENT, 1000.0 * number, write(chunk))
            timeline.append(RecordSource.WORKER, 1000.0 * number, write(result(number, text="Hello ")))
    completion = begin_completion(folder)
    assert completion is not None
    completion.finish()
    content = read_json(folder / "recording.json")
    assert content is not None and not (folder / FILE_NAME).exists()
    return content


def test_missing_ffmpeg_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise MediaError("ffmpeg", expected="the program on the PATH", got="none")

    monkeypatch.setattr(replay_video, "ffmpeg_program", none)
    content = completed(tmp_path / "x", picture("red"))
    assert content["merged_replay_video"] is None
    assert content["notes"] == ["no video was made: ffmpeg: expected the program on the PATH, got none"]
    assert (tmp_path / "x" / "merged_replay.wav").stat().st_size > 64_000


def test_pictures_that_cannot_be_decoded_are_noted(tmp_path: Path) -> None:
    postscript = (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"  # PIL would start a program
    )
    content = completed(tmp_path / "x", b"\xff\xd8 no picture", b"neither", postscript)
    assert content["merged_replay_video"] is None and "at least one that can be decoded" in str(content["notes"])


def test_without_libass_the_subtitles_are_a_track_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_video, "_has_libass", lambda program: False)
    folder = tmp_path / "it's a folder"
    content = completed(folder, picture("blue", (321, 241)), picture("blue", (64, 48), "PNG"))
    assert content["merged_replay_video"] == "merged_replay.mp4", content["notes"]
    with av.open(str(folder / "merged_replay.mp4")) as video:
        assert [stream.type for stream in video.streams] == ["video", "audio", "subtitle"]
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert frames[0].shape == (240, 320, 3) and not np.any(frames[2].min(axis=2) > 180)
    with av.open(str(folder / "merged_replay.mp4")) as video:
        texts = b"".join(bytes(packet) for packet in video.demux(video.streams.subtitles[0]))
    assert b"Hello Hello" in texts, "expected the words to accumulate within a turn"


def test_a_failing_ffmpeg_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_video, "FPS", "no number")
    content = completed(tmp_path / "x", picture("red"))
    assert content["merged_replay_video"] is None and "no video was made: ffmpeg" in str(content["notes"])
    assert not list((tmp_path / "x").glob(".video-*")), "expected no scratch folder"
