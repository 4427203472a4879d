"""Invalid client messages, as text and binary frames, each with the code of the expected error."""

import io
import json
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from tests.worker.http.client_scripts import QUIET, base64_of, chunk, jpeg, picture_of, sound_of
from worker.protocol.wire import pack_frame


def noise(**changes: float) -> np.ndarray:
    """One second of sound with a few samples replaced."""
    sound = sound_of(0).copy()
    for place, value in changes.items():
        sound[int(place[1:])] = value
    return sound


def png_header(width: int, height: int) -> bytes:
    """A PNG header with a size and no pixels."""

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")


def in_chunk(**fields: Any) -> str:
    return json.dumps(chunk(**fields))


def with_picture(data: bytes | str, **fields: Any) -> str:
    text = data if isinstance(data, str) else base64_of(data)
    return in_chunk(frame_base64_list=[base64_of(picture_of(0)), text], **fields)


def prepare(**fields: Any) -> str:
    return json.dumps({"type": "prepare", **fields})


def setting(**config: Any) -> str:
    """A `prepare` with invalid settings."""
    return prepare(config={**QUIET, **config})


def deep(n: int) -> str:
    return '{"type":"pause","x":' + "[" * n + "]" * n + "}"


HALF = picture_of(0)[: len(picture_of(0)) // 2]
GIF = io.BytesIO()
Image.new("P", (8, 8)).save(GIF, "GIF")
LARGE = base64_of(jpeg(Image.new("RGB", (1344, 1344))))

# Name -> (message, expected code). The message has no other effect on the session.
HARMLESS: dict[str, tuple[str | bytes, str]] = {
    "no-json": ("{", "bad_json"),
    "nothing": ("", "bad_json"),
    "millions-of-values": (prepare(x=[]).replace("[]", "[" + "[]," * 2_000_000 + "0]"), "too_large"),
    "words": ("hello", "bad_json"),
    "nan-in-json": ('{"type":"pause","timeout":NaN}', "bad_json"),
    "deep": (deep(1000), "bad_json"),
    "deeper": (deep(100_000), "too_large"),
    "half-a-character": ('{"type":"prepare","system_prompt":"\\ud800"}', "bad_json"),
    "list": ("[]", "bad_message"),
    "text": ('"audio_chunk"', "bad_message"),
    "number": ("12", "bad_message"),
    "null": ("null", "bad_message"),
    "no-type": ("{}", "bad_message"),
    "type-is-a-number": ('{"type":5}', "bad_message"),
    "unknown-type": ('{"type":"sing"}', "unknown_type"),
    "a-server's-type": ('{"type":"result"}', "unknown_type"),
    "binary": (b"\x00" * 64_000, "binary_not_agreed"),
    "no-sound": ('{"type":"audio_chunk"}', "missing_audio"),
    "empty-sound": (in_chunk(audio_base64=""), "missing_audio"),
    "null-sound": (in_chunk(audio_base64=None), "missing_audio"),
    "sound-is-a-number": (in_chunk(audio_base64=1), "bad_message"),
    "sound-is-a-list": (in_chunk(audio_base64=[0.0, 0.1]), "bad_message"),
    "bad-base64": (in_chunk(audio_base64="*" * 85_336), "bad_base64"),
    "cut-base64": (in_chunk(audio_base64=base64_of(sound_of(0))[:-3]), "bad_base64"),
    "odd-bytes": (in_chunk(audio_base64=base64_of(b"\x00" * 63_999)), "bad_audio"),
    "nan": (in_chunk(sound=noise(_7=np.nan)), "bad_audio"),
    "infinity": (in_chunk(sound=noise(_0=np.inf, _15999=-np.inf)), "bad_audio"),
    "absurd-level": (in_chunk(sound=noise(_1=32_767.0)), "bad_audio"),
    "a-minute": (in_chunk(sound=np.tile(sound_of(0), 60)), "bad_audio"),
    "no-picture": (with_picture(b"This is not a picture."), "bad_image"),
    "broken-jpeg": (with_picture(picture_of(0)[:200] + b"\xff" * 2000), "bad_image"),
    "half-a-jpeg": (with_picture(HALF), "bad_image"),
    "picture-bomb": (with_picture(png_header(50_000, 50_000)), "bad_image"),
    "lying-picture": (with_picture(png_header(4000, 4000)), "bad_image"),
    "line-of-a-picture": (with_picture(jpeg(Image.new("RGB", (1, 60_000)))), "bad_image"),
    "empty-picture": (with_picture(""), "bad_image"),
    "picture-no-base64": (with_picture("*" * 1000), "bad_base64"),
    "picture-is-a-number": (in_chunk(frame_base64_list=[5]), "bad_message"),
    "pictures-are-text": (in_chunk(frame_base64_list="abc"), "bad_message"),
    "no-slices": (with_picture(picture_of(0), max_slice_nums=0), "bad_config"),
    "many-slices": (with_picture(picture_of(0), max_slice_nums=10), "bad_config"),
    "slices-of-others": (with_picture(picture_of(0), max_slice_nums=[1, 1, 1]), "bad_config"),
    "slices-are-text": (with_picture(picture_of(0), max_slice_nums="2"), "bad_message"),
    "too-many-pictures": (in_chunk(frame_base64_list=[base64_of(GIF.getvalue())] * 33), "too_large"),
    "too-many-pixels": (in_chunk(frame_base64_list=[base64_of(png_header(6000, 6000))] * 2), "too_large"),
    "too-many-slices": (in_chunk(frame_base64_list=[LARGE] * 13, max_slice_nums=9), "context_full"),
    "yes-for-true": (in_chunk(force_listen="yes"), "bad_message"),
    "listens-and-speaks": (in_chunk(force_listen=True, force_speak=True), "bad_message"),
    "speaks-a-little": (in_chunk(force_speak=1), "bad_message"),
    "ends-when": (in_chunk(close_early="now"), "bad_message"),
    "text-of-nothing": ('{"type":"insert_text"}', "bad_message"),
    "text-is-empty": ('{"type":"insert_text","text":""}', "bad_message"),
    "text-of-another": ('{"type":"insert_text","text":"a","role":"assistant"}', "bad_message"),
    "text-of-a-book": (json.dumps({"type": "insert_text", "text": "Map of a sea. " * 40_000}), "context_full"),
    "pause-below-zero": ('{"type":"pause","timeout":-1}', "bad_message"),
    "pause-for-ever": ('{"type":"pause","timeout":1e999}', "bad_message"),
    "pause-is-text": ('{"type":"pause","timeout":"60"}', "bad_message"),
    "frame-without-picture": ('{"type":"video_frame"}', "bad_message"),
    "prompt-of-a-book": (prepare(system_prompt="Map of a sea. " * 400_000), "context_full"),
    "prompt-is-a-number": (prepare(system_prompt=5), "bad_message"),
    "content-of-nothing": (prepare(system_content=[{"type": "video"}]), "bad_message"),
    "config-is-a-list": (prepare(config=[]), "bad_message"),
    "no-such-spec": (prepare(spec={"version": 2}), "bad_message"),
    "no-such-form": (prepare(spec={"sound_in": "mp3"}), "bad_message"),
    "slices-of-the-session": (prepare(max_slice_nums=0), "bad_message"),
    "more-slices-of-the-session": (prepare(max_slice_nums=10), "bad_config"),
    "temperature": (setting(temperature=2.1), "bad_config"),
    "temperature-below": (setting(temperature=-0.1), "bad_config"),
    "temperature-is-text": (setting(temperature="hot"), "bad_config"),
    "temperature-too-large-for-a-float": (prepare(config={}).replace("{}", '{"temperature":1e999}'), "bad_config"),
    "top_k": (setting(top_k=-1), "bad_config"),
    "top_k-is-true": (setting(top_k=True), "bad_config"),
    "top_k-of-many-digits": (setting(top_k=10**300), "bad_config"),
    "top_p": (setting(top_p=1.5), "bad_config"),
    "length_penalty": (setting(length_penalty=0), "bad_config"),
    "text_repetition_penalty": (setting(text_repetition_penalty=0), "bad_config"),
    "text_repetition_window_size": (setting(text_repetition_window_size=-1), "bad_config"),
    "listen_prob_scale": (setting(listen_prob_scale=0), "bad_config"),
    "listen_top_k": (setting(listen_top_k=0), "bad_config"),
    "tts_temperature": (setting(tts_temperature=0), "bad_config"),
    "force_listen_count": (setting(force_listen_count=-1), "bad_config"),
    "max_new_speak_tokens_per_chunk": (setting(max_new_speak_tokens_per_chunk=0), "bad_config"),
    "chunk_ms": (setting(chunk_ms=500), "bad_config"),
    "sample_rate": (setting(sample_rate=8000), "bad_config"),
    "ls_mode": (setting(ls_mode="loud"), "bad_config"),
    "decode_mode": (setting(decode_mode="beam"), "bad_config"),
    "generate_audio": (setting(generate_audio=1), "bad_config"),
    "seed": (setting(seed=-1), "bad_config"),
    "window": (setting(window={"mode": "moving"}), "bad_config"),
    "window-upside-down": (setting(window={"high_tokens": 100, "low_tokens": 200}), "bad_config"),
    "window-of-more-than-there-is": (setting(window={"high_tokens": 9000}), "bad_config"),
    "another-solver": (setting(euler_steps=7), "bad_config"),
    "adjust-unknown-field": ('{"type":"adjust","temperature":1}', "bad_message"),
    "adjust-unknown-setting": ('{"type":"adjust","config":{"temprature":1}}', "bad_config"),
    "adjust-out-of-range": ('{"type":"adjust","config":{"top_k":1,"top_p":2}}', "bad_config"),
    "adjust-seed": ('{"type":"adjust","config":{"top_k":1,"seed":5}}', "bad_config"),
    "adjust-solver": ('{"type":"adjust","config":{"euler_steps":7}}', "bad_config"),
    "voice-too-short": (prepare(ref_audio_base64=base64_of(sound_of(0)[:1000])), "bad_audio"),
    "voice-too-long": (prepare(ref_audio_base64=base64_of(np.tile(sound_of(0), 31))), "bad_audio"),
    "voice-of-nan": (prepare(ref_audio_base64=base64_of(np.full(32_000, np.nan, np.float32))), "bad_audio"),
    "voice-no-base64": (prepare(ref_audio_base64="*"), "bad_base64"),
    "voice-of-odd-bytes": (prepare(ref_audio_base64=base64_of(b"\x00" * 64_001)), "bad_audio"),
    "other-voice-of-infinity": (prepare(tts_ref_audio_base64=base64_of(noise(_5=np.inf))), "bad_audio"),
    "voice-outside": (prepare(ref_audio_path="../../../../../etc/passwd"), "bad_config"),
    "voice-far-outside": (prepare(ref_audio_path="/etc/passwd"), "bad_config"),
    "voice-of-the-folder": (prepare(ref_audio_path=".."), "bad_config"),
    "voice-with-a-zero": (prepare(ref_audio_path="default.wav\x00.txt"), "bad_config"),
    "voice-is-a-list": (prepare(ref_audio_path=["default.wav"]), "bad_message"),
}
# The same for binary frames, with float32 agreed on.
BINARY: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "bad_message"),
    "garbage": (bytes(range(256)) * 20, "bad_message"),
    "long-header": (struct.pack("<I", 2**31) + b"{}", "bad_message"),
    "no-json": (struct.pack("<I", 2) + b"{{", "bad_json"),
    "no-text": (struct.pack("<I", 2) + b"\xff\xff", "bad_json"),
    "other-length": (pack_frame({"type": "audio_chunk"}, b"\x00" * 64)[:-1], "bad_message"),
    "length-below-zero": (struct.pack("<I", 41) + b'{"type":"audio_chunk","audio_bytes":  -1}', "bad_message"),
    "odd-bytes": (pack_frame({"type": "audio_chunk"}, b"\x00" * 63), "bad_audio"),
    "no-sound": (pack_frame({"type": "audio_chunk"}, b""), "missing_audio"),
    "nan": (pack_frame({"type": "audio_chunk"}, noise(_0=np.nan).tobytes()), "bad_audio"),
    "no-picture": (pack_frame({"type": "audio_chunk"}, sound_of(0).tobytes(), [b"no picture"]), "bad_image"),
    "unknown-type": (pack_frame({"type": "sing"}, b"\x00" * 64), "unknown_type"),
    "without-sound": (pack_frame({"type": "pause"}, b""), "bad_message"),
}
