"""Complete duplex recordings: their entries, sounds, pictures and video."""

import io
import wave
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from server.recording.files import read_json
from tests.server.recording.recorded import Conversation, list_of, recordings_in, result, tone, wait_done
from worker.protocol.adjust_messages import Adjust, Adjusted
from worker.protocol.messages import ClientDiagnostic, Error, Pause, Paused, Resume, Resumed, Spec, VideoFrame
from worker.protocol.text_messages import InsertText, TextInserted

USER_HZ, MODEL_HZ = 440.0, 1000.0
USER = tone(USER_HZ, 1, 16_000)
MODEL = tone(MODEL_HZ, 1, 24_000)


def picture(color: str, size: tuple[int, int] = (64, 48), kind: str = "JPEG") -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, kind)
    return data.getvalue()


def samples(path: Path) -> tuple[int, np.ndarray]:
    """The rate and the samples, [channels, n]."""
    with wave.open(str(path)) as file:
        steps = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
        return file.getframerate(), steps.reshape(-1, file.getnchannels()).T


def loudness_at(sound: np.ndarray, hertz: float, rate: int = 16_000) -> float:
    """Amplitude of one frequency."""
    turns = np.exp(-2j * np.pi * hertz * np.arange(len(sound)) / rate)
    return float(2 * abs(np.mean(sound * turns)))


@pytest.mark.parametrize("form", ["base64", "pcm16", "float32"])
def test_recording_has_every_unit_with_its_sounds(tmp_path: Path, form: str) -> None:
    with recordings_in(tmp_path) as recordings:
        recording = recordings.start("omni_duplex", "omni_x", worker_id=3)
        assert recording is not None
        spec = Spec(sound_in=form, sound_out=form, partial_results=True)
        talk = Conversation(recording, spec, system_prompt="Be kind.", config={"temperature": 0.5})
        talk.chunk(USER, picture("red"))
        talk.worker(result(1))
        talk.chunk(USER, picture("lime"))
        talk.chunk(USER)  # a burst: two chunks before their results
        talk.part(2, 1, MODEL[:12_000], "Hel")
        talk.part(2, 2, MODEL[12_000:])
        talk.worker(result(2, text="Hello", n_parts=2))
        talk.worker(result(3, text=" there.", sound=MODEL, ends=True))
        talk.chunk(USER)
        talk.worker(result(4))
        recording.end()
        content = wait_done(recordings, recording.recording_id)
        folder = recordings.store.folder_of(recording.recording_id)
    assert content["mode"] == "duplex" and content["worker_id"] == 3
    assert content["config"]["system_prompt"] == "Be kind." and content["config"]["temperature"] == 0.5
    chunks = content["chunks"]
    assert [chunk["result"]["mode"] for chunk in chunks] == ["LISTEN", "SPEAK", "SPEAK", "LISTEN"]
    assert [chunk["index"] for chunk in chunks] == [0, 1, 2, 3]
    assert [chunk["user_audio"] for chunk in chunks] == [f"user_audio/{i:03d}.wav" for i in range(4)]
    assert [chunk["user_frame"] for chunk in chunks] == ["user_frames/000.jpg", "user_frames/001.jpg", None, None]
    first, second = chunks[1]["result"], chunks[2]["result"]
    assert (first["text"], second["text"], second["end_of_turn"]) == ("Hello", " there.", True)
    assert (
        first["ai_audio"] == "ai_audio/turn_0_chunk_000.wav" and second["ai_audio"] == "ai_audio/turn_0_chunk_001.wav"
    )
    assert first["ai_audio_duration_ms"] == 1000
    assert first["timing"]["prefill_ms"] == 5.0 and first["timing"]["wall_clock_ms"] == 30.0
    assert all(isinstance(value, int | float) for value in first["timing"].values()), first["timing"]
    rate, [user] = samples(folder / chunks[1]["user_audio"])
    assert rate == 16_000 and np.abs(user - USER).max() < 1e-3
    rate, [model] = samples(folder / first["ai_audio"])
    assert rate == 24_000 and np.abs(model - MODEL).max() < 1e-3
    assert (folder / "user_frames/000.jpg").read_bytes() == picture("red")
    meta = read_json(folder / "meta.json")
    assert meta is not None and meta["app_type"] == "omni_duplex" and meta["ended_at"] and meta["notes"] == []


def test_replay_has_the_user_left_and_the_model_right(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as recordings:
        recording = recordings.start("audio_duplex", "adx_x")
        assert recording is not None
        talk = Conversation(recording)
        for number in (1, 2, 3):
            talk.chunk(USER)
            talk.worker(result(number, text="a" if number > 1 else "", sound=MODEL if number > 1 else None))
        recording.end()
        wait_done(recordings, recording.recording_id)
        rate, (left, right) = samples(recordings.store.folder_of(recording.recording_id) / "merged_replay.wav")
    assert rate == 16_000 and len(left) == 3 * 16_000
    assert loudness_at(left, USER_HZ) > 0.45 and loudness_at(left, MODEL_HZ) < 0.01
    assert loudness_at(right[16_000:], MODEL_HZ) > 0.45 and loudness_at(right, USER_HZ) < 0.01
    assert np.abs(right[:15_900]).max() < 0.01, "expected silence while the model listens"
    # A click at the seam of two chunks would exceed the tone's own steps.
    assert np.abs(np.diff(right[31_000:33_000])).max() < 1.1 * 0.5 * 2 * np.pi * MODEL_HZ / 16_000


def test_pieces_are_put_together(tmp_path: Path) -> None:
    """Sound and first picture of a unit, an early one too; a turn goes on over incomplete results."""
    with recordings_in(tmp_path) as recordings:
        recording = recordings.start("omni_duplex", "omni_x")
        assert recording is not None
        talk = Conversation(recording)
        pieces, early = USER.reshape(4, -1), {"early": True, "shift_ms": 500.0}
        talk.chunk(pieces[0])
        talk.worker(result(0, incomplete=True))
        talk.chunk(pieces[1], picture("red"))
        talk.worker(result(1, text="a", sound=MODEL, **early))
        for number in range(4):
            talk.chunk(pieces[number], *([picture("lime")] if number else []))
            talk.worker(result(2, text="b", sound=MODEL) if number == 3 else result(1, incomplete=True))
        talk.chunk(pieces[0])
        talk.chunk(pieces[1])
        talk.worker(result(2, incomplete=True))
        recording.end()
        chunks = wait_done(recordings, recording.recording_id)["chunks"]
        folder = recordings.store.folder_of(recording.recording_id)
        heard = [samples(folder / chunk["user_audio"])[1][0] for chunk in chunks]
    assert [len(one) for one in heard] == [8_000, 16_000, 8_000] and np.abs(heard[1] - USER).max() < 1e-3
    assert [chunk["result"].get("shift_ms") for chunk in chunks] == [500, None, None]
    assert [chunk["user_frame"] for chunk in chunks] == ["user_frames/000.jpg", "user_frames/001.jpg", None]
    assert chunks[1]["result"]["ai_audio"] == "ai_audio/turn_0_chunk_001.wav", "expected one turn"
    assert [chunk.get("unanswered") for chunk in chunks] == [None, None, True]
    assert [chunk["replay_ms"] for chunk in chunks] == [0, 1000, 2000]


def test_video_has_pictures_sound_and_subtitles(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as recordings:
        recording = recordings.start("omni_duplex", "omni_x")
        assert recording is not None
        talk = Conversation(recording)
        pictures = [picture("blue", (320, 240)), picture("blue", (240, 320), "PNG"), b"\xff\xd8 broken", b""]
        for number, one in enumerate(pictures, 1):
            talk.chunk(USER, *([one] if one else []))
            talk.worker(result(number, text="Words {\\an8}<b> " * 3 if number > 2 else "", sound=MODEL))
        recording.end()
        content = wait_done(recordings, recording.recording_id)
        path = recordings.store.folder_of(recording.recording_id) / "merged_replay.mp4"
        assert content["merged_replay_video"] == "merged_replay.mp4", content["notes"]
        with av.open(str(path)) as video:
            kinds = {stream.type: stream.codec_context.name for stream in video.streams}
            assert kinds == {"video": "h264", "audio": "aac", "subtitle": "mov_text"}, kinds
            assert video.duration == pytest.approx(4e6, abs=0.6e6)
            images = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    silent, spoken = images[0].astype(int), images[-2].astype(int)
    assert images[0].shape == (240, 320, 3)
    assert abs(silent[220, 160] - [0, 0, 254]).max() < 40, "expected the camera's picture"
    assert (spoken.min(axis=2) > 180).sum() > 50, "expected white subtitles in the picture"
    assert (silent.min(axis=2) > 180).sum() == 0, "expected no subtitles before the model speaks"


def test_errors_and_other_answers_do_not_shift_the_results(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as recordings:
        recording = recordings.start("omni_duplex", "omni_x")
        assert recording is not None
        talk = Conversation(recording)
        loud, soft = tone(440, 1, 16_000, 0.8), tone(440, 1, 16_000, 0.1)
        talk.chunk(loud)
        talk.client(Pause())
        talk.chunk(loud)
        talk.client(ClientDiagnostic())
        recording.from_client("not JSON")
        talk.client(VideoFrame(frame=picture("red")))
        talk.client(Resume())
        talk.chunk(soft)
        for message in (InsertText(text="Hi."), Adjust()):
            talk.client(message)
        talk.chunk(loud)
        talk.chunk(soft)
        talk.worker(result(1))
        talk.worker(Paused(timeout=60))
        talk.worker(Error(error="Worker is paused"))
        talk.worker(Error(error="bad JSON"))
        talk.worker(Resumed())
        talk.worker(result(2))
        talk.worker(TextInserted(n_rows=7))
        talk.worker(Adjusted(applied={}, from_unit=3))
        talk.worker(Error(error="bad sound"))
        talk.worker(result(3))
        recording.end()
        chunks = wait_done(recordings, recording.recording_id)["chunks"]
        folder = recordings.store.folder_of(recording.recording_id)
        peaks = [float(samples(folder / chunk["user_audio"])[1].max()) for chunk in chunks]
    assert peaks == pytest.approx([0.8, 0.1, 0.1], abs=0.01), f"expected the answered chunks, got {peaks}"
    assert [chunk["user_frame"] for chunk in chunks] == [None, "user_frames/001.jpg", None]
    assert [chunk.get("user_text") for chunk in chunks] == [None, None, "Hi."], "expected the text before its unit"


def test_chunks_without_an_answer_are_kept(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as recordings:
        recording = recordings.start("audio_duplex", "adx_x")
        assert recording is not None
        talk = Conversation(recording)
        talk.chunk(USER)
        recording.end()
        recording.from_client("after the end")
        [chunk] = wait_done(recordings, recording.recording_id)["chunks"]
        folder = recordings.store.folder_of(recording.recording_id)
    assert chunk["unanswered"] and chunk["user_audio"] == "user_audio/000.wav"
    assert chunk["result"]["timing"]["wall_clock_ms"] == 0
    assert "timeline.bin" not in list_of(folder)


def test_results_of_a_minimal_worker_are_recorded(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as recordings:
        recording = recordings.start("omni_duplex", "d1")
        assert recording is not None
        recording.from_client('{"type":"prepare","config":{"max_kv_tokens":8000}}')
        recording.from_worker('{"type":"prepared","prompt_length":1}')
        recording.from_client('{"type":"audio_chunk","audio":"AAAAAA=="}')
        recording.from_worker('{"type":"result","is_listen":false,"text":"Hi","audio_data":null,"end_of_turn":true}')
        recording.end()
        [chunk] = wait_done(recordings, recording.recording_id)["chunks"]
    assert chunk["result"]["text"] == "Hi" and chunk["result"]["ai_audio"] is None
    assert all(value == 0 for value in chunk["result"]["timing"].values())


def test_recording_is_off_unless_enabled(tmp_path: Path) -> None:
    with recordings_in(tmp_path, is_enabled=False) as recordings:
        assert recordings.start("omni_duplex", "omni_x") is None
    assert list_of(tmp_path) == []
