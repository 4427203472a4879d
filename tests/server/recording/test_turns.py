"""Recordings that consist of turns: half duplex, chat over WebSocket and HTTP, legacy streaming."""

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from server.recording.recordings import RecordingKind
from tests.server.recording.recorded import recordings_in, tone, wait_done
from tests.server.recording.test_duplex import USER, loudness_at, picture, samples
from worker.protocol.half_duplex_messages import TurnChunk, TurnDone, TurnHeard, TurnPrepared, VadState
from worker.protocol.messages import Error, write
from worker.protocol.wire import Sound

Json = dict[str, Any]
MODEL = tone(1000, 0.5, 24_000)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def recorded(data_dir: Path, kind: RecordingKind, messages: list[tuple[str, Json | str | bytes]]) -> tuple[Json, Path]:
    """Record messages, each with its direction `up` or `down`. Returns: `recording.json` and the folder."""
    with recordings_in(data_dir) as recordings:
        recording = recordings.start(kind, "x")
        assert recording is not None
        for direction, message in messages:
            data = json.dumps(message) if isinstance(message, dict) else message
            (recording.from_client if direction == "up" else recording.from_worker)(data)
        recording.end()
        content = wait_done(recordings, recording.recording_id)
        return content, recordings.store.folder_of(recording.recording_id)


def test_half_duplex_turns_have_the_speech_and_the_answer(tmp_path: Path) -> None:
    silence, speech = np.zeros(8000, np.float32), USER[:8000]
    system = [{"type": "text", "text": "Be brief."}, {"type": "audio", "data": None, "name": "x"}]
    up = [{"type": "audio_chunk", "audio_base64": Sound(one).base64()} for one in (silence, silence, speech, speech)]
    content, folder = recorded(
        tmp_path,
        "half_duplex_audio",
        [
            ("up", {"type": "prepare", "system_content": system, "config": {"vad": {"threshold": 0.8}}}),
            ("down", write(TurnPrepared(session_id="hdx_1", timeout_s=300))),
            *(("up", one) for one in up),
            ("down", write(VadState(speaking=True))),
            ("down", write(VadState(speaking=False))),
            ("down", write(TurnHeard(speech_duration_ms=1000))),
            ("down", write(TurnChunk(chunk_index=0, text_delta="Hel", audio_data=Sound(MODEL)))),
            ("down", write(TurnChunk(chunk_index=1, text_delta="lo", audio_data=Sound(MODEL)))),
            ("down", write(TurnChunk(chunk_index=2, is_final=True))),
            ("down", write(TurnDone(turn_index=1, text="Hello"))),
            ("up", up[2]),
            ("down", write(TurnHeard(speech_duration_ms=500))),
            ("down", write(TurnChunk(chunk_index=0, text_delta="cut"))),
        ],
    )
    assert content["mode"] == "half_duplex_audio" and content["config"]["vad"]["threshold"] == 0.8
    assert content["config"]["system_prompt"] == "Be brief."
    first, second = content["turns"]
    assert first["turn_index"] == 0
    assert first["input"] == {"type": "audio", "duration_ms": 1000, "audio": "user_audio/000.wav"}
    assert first["output"] == {"text": "Hello", "audio": "ai_audio/turn_0.wav", "audio_duration_ms": 1000}
    assert isinstance(first["timing"]["elapsed_ms"], float) and first["timing"]["speech_input_ms"] == 1000
    assert second["incomplete"] and second["output"] == {"text": "cut"}
    _, [heard] = samples(folder / "user_audio/000.wav")
    assert loudness_at(heard, 440) > 0.4, "expected the last second, which is speech"
    _, (left, right) = samples(folder / "merged_replay.wav")
    assert loudness_at(left[:16_000], 440) > 0.4 and loudness_at(right[16_000:32_000], 1000) > 0.4
    assert np.abs(right[:15_900]).max() < 0.01


def test_chat_turn_has_text_pictures_videos_and_sound(tmp_path: Path) -> None:
    mp3 = io.BytesIO()
    soundfile.write(mp3, USER, 16_000, format="MP3")
    items = [
        {"type": "text", "text": "What is this?"},
        {"type": "image", "data": b64(picture("red"))},
        {"type": "image", "data": "not base64!"},
        {"type": "video", "data": b64(b"video bytes"), "stack_frames": 1},
        {"type": "audio", "data": Sound(USER).base64(), "name": "extra"},
        {"type": "audio", "data": b64(mp3.getvalue())},
        {"type": "unknown", "data": "x"},
    ]
    history = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "old"}]
    request = {
        "messages": [*history, {"role": "assistant", "content": "old answer"}, {"role": "user", "content": items}],
        "tts": {"enabled": True, "ref_audio_data": Sound(USER).base64()},
        "generation": {"max_new_tokens": 9},
    }
    content, folder = recorded(
        tmp_path,
        "chat",
        [
            ("up", request),
            ("down", {"type": "prefill_done", "input_tokens": 50}),
            ("down", {"type": "chunk", "text_delta": "A "}),
            ("down", {"type": "chunk", "text_delta": "picture.", "audio_data": Sound(MODEL).base64()}),
            ("down", {"type": "done", "text": "A picture.", "generated_tokens": 4, "input_tokens": 50}),
        ],
    )
    [turn] = content["turns"]
    assert turn["input"]["text"] == "What is this?" and turn["input"]["images"] == ["user_images/img_0.jpg"]
    assert turn["input"]["videos"] == ["user_videos/vid_0.mp4"] and turn["input"]["audio"] == "user_audio/000.wav"
    assert turn["output"]["text"] == "A picture." and turn["output"]["audio"] == "ai_audio/turn_0.wav"
    assert (turn["timing"]["tokens"], turn["timing"]["input_tokens"]) == (4, 50)
    assert content["config"]["system_prompt"] == "Be kind." and content["config"]["ref_audio"] == "from the client"
    assert "ref_audio_data" not in json.dumps(content["config"])
    assert len(content["notes"]) == 1 and "image" in content["notes"][0]
    assert (folder / "user_images/img_0.jpg").read_bytes() == picture("red")
    _, [said] = samples(folder / "user_audio/000.wav")
    assert len(said) == pytest.approx(32_000, abs=2500) and loudness_at(said[18_000:30_000], 440) > 0.4


@pytest.mark.parametrize("success", [True, False])
def test_http_chat_is_one_turn(tmp_path: Path, success: bool) -> None:
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 24_000, 0, "NONE", ""))
        file.writeframes(Sound(MODEL).packed("pcm16"))
    response = {
        "success": success,
        "text": "Hi" if success else "",
        "audio_data": b64(sound.getvalue()) if success else None,
        "token_stats": {"generated_tokens": 2, "input_tokens": 7},
        "error": None if success else "out of memory",
    }
    content, _ = recorded(
        tmp_path, "chat", [("up", {"messages": [{"role": "user", "content": "Hello"}]}), ("down", response)]
    )
    [turn] = content["turns"]
    assert turn["input"] == {"text": "Hello"} and turn["timing"]["input_tokens"] == 7
    if success:
        assert turn["output"] == {"text": "Hi", "audio": "ai_audio/turn_0.wav", "audio_duration_ms": 500}
    else:
        assert turn["output"]["error"] == "out of memory" and turn["incomplete"]


def test_streaming_turns_share_one_recording(tmp_path: Path) -> None:
    def prefill(text: str) -> Json:
        return {"clear_kv_cache": True, "type": "prefill", "messages": [{"role": "user", "content": text}]}

    content, _ = recorded(
        tmp_path,
        "streaming",
        [
            ("up", prefill("one")),
            ("down", {"type": "prefill_done", "input_tokens": 3}),
            ("up", {"type": "generate"}),
            ("down", {"type": "chunk", "text_delta": "1"}),
            ("down", {"type": "done", "token_stats": {"generated_tokens": 1}}),
            ("up", prefill("two")),
            ("up", {"type": "generate"}),
            ("down", write(Error(error="no"))),
            ("up", "not JSON"),
        ],
    )
    first, second = content["turns"]
    assert (first["input"], first["output"]) == ({"text": "one"}, {"text": "1"})
    assert (second["input"], second["output"]) == ({"text": "two"}, {"text": "", "error": "no"})
    assert all(isinstance(turn["timing"]["elapsed_ms"], float) for turn in content["turns"])
