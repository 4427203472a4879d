"""Messages of test clients and checks of their results: units of the warm-up video, settings that make the embedded
model speak, comparison of results down to the sample.
"""

import base64
import io
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from worker.config.service import ROOT
from worker.loop.results import SOUND_RATE
from worker.media import MediaUnit, read_units
from worker.protocol.messages import Partial, Result

VIDEO = ROOT / "assets" / "warmup.mp4"
# The embedded model hardly ever decides to listen, and ends a turn only at its token limit.
ALOUD = {"force_listen_count": 0, "listen_prob_scale": 0.01, "max_new_speak_tokens_per_chunk": 4, "seed": 7}
QUIET = {**ALOUD, "generate_audio": False}
# Turns that end, with listening units between them.
TURNS = {
    "force_listen_count": 1,
    "length_penalty": 0.2,
    "listen_top_k": 60,
    "max_new_speak_tokens_per_chunk": 8,
    "drain_s": 1,
}
TURNS_ALOUD, TURNS_QUIET = {**TURNS, "seed": 2}, {**TURNS, "seed": 2, "generate_audio": False}
NUMBERS = ("cost_all_ms", "wall_clock_ms", "server_send_ts", "lag_ms", "headroom_ms")
COUNTS = ("current_time", "n_tokens", "n_tts_tokens", "kv_cache_length", "vision_slices", "vision_tokens")
SILENCE_RMS = 1e-3
COSTS = ("cost_llm_ms", "cost_tts_prep_ms", "cost_tts_ms", "cost_token2wav_ms")


@cache
def video_units() -> list[MediaUnit]:
    """The units of the warm-up video."""
    return list(read_units(VIDEO))


def sound_of(number: int) -> np.ndarray:
    """[16000] float32: the sound of one second of the video, which repeats."""
    return video_units()[number % len(video_units())].sound


@cache
def picture_of(number: int, width: int | None = None, height: int | None = None) -> bytes:
    """A JPEG of one second of the video, at its own size or resized."""
    image = video_units()[number % len(video_units())].frames[0]
    return jpeg(image if width is None else image.resize((width, height)))


def jpeg(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=80)
    return data.getvalue()


def base64_of(data: np.ndarray | bytes) -> str:
    """Samples as little-endian float32, or bytes, in base64."""
    return base64.b64encode(data if isinstance(data, bytes) else data.astype("<f4").tobytes()).decode()


def chunk(number: int = 0, *, sound: np.ndarray | None = None, picture: bool = False, **fields: Any) -> dict[str, Any]:
    """An `audio_chunk` with one second of the video or with `sound`, optionally with its picture and further fields."""
    sound = sound_of(number) if sound is None else sound
    frames = {"frame_base64_list": [base64_of(picture_of(number))]} if picture else {}
    return {"type": "audio_chunk", "audio_base64": base64_of(sound), **frames, **fields}


# --- results --------------------------------------------------------------------------------------


def samples(result: Result | Partial) -> np.ndarray | None:
    return None if result.audio_data is None else result.audio_data.samples("audio_data")


def compared_fields(result: Result) -> dict[str, Any]:
    """The fields that must be equal in every run, except the sound."""
    return {name: getattr(result, name) for name in ("is_listen", "text", "end_of_turn", "n_caught_up", *COUNTS)}


def assert_same_results(
    got: Sequence[Result], expected: Sequence[Result], what: str = "results", *, tolerance: float = 0.0
) -> None:
    """Check that results are equal.

    Args:
        got, expected: the results.
        what: their name in errors.
        tolerance: largest difference of two samples. Vocoder windows of concurrent sessions are padded to the largest,
            which changes the order of summation.
    """
    assert len(got) == len(expected), f"{what}: expected {len(expected)}, got {len(got)}"
    for number, (one, other) in enumerate(zip(got, expected, strict=True), 1):
        wrong = [name for name, value in compared_fields(other).items() if compared_fields(one)[name] != value]
        assert not wrong, f"{what}, unit {number}: expected the same {wrong} as in {other!r}, got {one!r}"
        sounds = [np.zeros(0) if (sound := samples(result)) is None else sound for result in (one, other)]
        lengths = [len(sound) for sound in sounds]
        assert lengths[0] == lengths[1], f"{what}, unit {number}: expected {lengths[1]} samples, got {lengths[0]}"
        worst = float(np.abs(sounds[0] - sounds[1]).max(initial=0.0))
        assert worst <= tolerance, f"{what}, unit {number}: expected samples within {tolerance}, got {worst:.3g}"


def assert_result(result: Result, voiced: bool = True) -> None:
    """Check the properties that the protocol guarantees for every result."""
    for name in NUMBERS:
        assert isinstance(getattr(result, name), float), f"{name}: expected a float, got {getattr(result, name)!r}"
    for name in COUNTS:
        assert type(getattr(result, name)) is int, f"{name}: expected a whole number, got {getattr(result, name)!r}"
    for name in COSTS:
        value = getattr(result, name)
        assert isinstance(value, float | None), f"{name}: expected a float or null, got {value!r}"
    assert result.vision_tokens == 64 * result.vision_slices
    assert abs(result.server_send_ts - time.time()) < 600, f"expected Unix seconds, got {result.server_send_ts}"
    if result.is_listen:
        assert (result.text, result.audio_data) == ("", None), f"listening: expected no text and sound, got {result!r}"
    elif voiced and not result.end_of_turn:
        sound = samples(result)
        assert sound is not None and len(sound) >= SOUND_RATE, f"expected at least a second of sound, got {result!r}"
    if (sound := samples(result)) is not None:
        assert len(sound) and np.isfinite(sound).all() and np.abs(sound).max() <= 1, f"expected sound, got {result!r}"


def assert_audible(path: Path) -> None:
    """Check that a file has mono sound at 24 kHz that is no silence."""
    sound, rate = soundfile.read(path)
    loudness = float(np.sqrt(np.mean(np.square(sound))))
    assert (rate, sound.ndim) == (24_000, 1), f"expected 24 kHz mono, got {rate} Hz, {sound.ndim} dimensions"
    assert loudness > SILENCE_RMS, f"expected an audible reply, got RMS {loudness:.6f}"
