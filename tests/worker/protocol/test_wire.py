"""Strict JSON, sound and pictures as text or bytes, binary frames."""

import base64
import binascii
import struct
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.errors import ModelError
from worker.describe import shown
from worker.protocol import wire
from worker.protocol.base64_text import strict_base64
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import Sound, WireError

LEVELS = st.floats(-2, 2, width=32)
SAMPLES = arrays(np.float32, st.integers(1, 40), elements=LEVELS)


def refused(call, *args: object) -> WireError:
    with pytest.raises(WireError) as caught:
        call(*args)
    return caught.value


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --- errors ---------------------------------------------------------------------------------------


def test_error_text() -> None:
    error = WireError(ErrorCode.BAD_AUDIO, "sound", expected="samples", got="none")
    assert str(error) == "sound: expected samples, got none" and error.code == "bad_audio"
    assert isinstance(error, ModelError) and isinstance(error, ValueError)


def test_error_with_fixed_text() -> None:
    error = WireError(ErrorCode.PAUSED, "unit", expected="an open session", got="paused", text="Worker is paused")
    assert (str(error), error.what, error.expected, error.got) == (
        "Worker is paused",
        "unit",
        "an open session",
        "paused",
    )


def test_shown_is_short_and_fast() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    big = ["x" * 50_000_000, [10**5000] * 100_000, {str(i): 1 for i in range(1000)}, deep]
    start = time.process_time()  # CPU time, since other processes may run
    for value in big:
        assert len(shown(value)) < 400, f"expected a short text, got {len(shown(value))} characters"
    took = time.process_time() - start
    assert took < 1, f"expected to look at the first items only, got {took:.2f} s"
    assert [shown(value) for value in (None, True, [False], "a", 1.5)] == ["null", "true", "[false]", "'a'", "1.5"]
    assert shown(10**5000) == "a number too large to show"


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "{", "{}x", "{'a':1}", '{"a":NaN}', '{"a":Infinity}', '{"a":-Infinity}', "nan", "\x00", "\ufeff{}"),
        *(
            '{"a":"\\ud800"}',
            '{"a":"\ud800"}',
            '{"a":"\x01"}',
            '{"a":' + "1" * 5000 + "}",
            "[" * 100_000,
            b'{"a":"\xff"}',
        ),
        *('{"a":' * 300 + "1" + "}" * 300, b"\xff\xfe"),
    ],
)
def test_refuses_invalid_json(text: str | bytes) -> None:
    error = refused(wire.read_object, text)
    assert error.code == ErrorCode.BAD_JSON, error
    assert str(error).startswith("message: expected JSON, got ") and len(str(error)) < 200, error


@pytest.mark.parametrize("text", ["[]", "null", "1", '"type"', "true", "1e999"])
def test_refuses_other_values_than_objects(text: str) -> None:
    error = refused(wire.read_object, text)
    assert error.code == ErrorCode.BAD_MESSAGE, error
    assert str(error).startswith("message: expected a JSON object, got "), error


def test_reads_objects() -> None:
    assert wire.read_object(' {"a": [1, 2.5, "é😀", null]}\n') == {"a": [1, 2.5, "é😀", None]}
    assert wire.read_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "😀"}
    assert wire.read_object('{"a": 1, "a": 2}') == {"a": 2}


def test_written_json_is_strict() -> None:
    assert wire.json_text({"a": "é\n", "b": None}) == '{"a":"é\\n","b":null}'
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            wire.json_text({"a": number})


def test_clean_replaces_surrogates() -> None:
    assert wire.clean("a\ud800é😀") == "a?é😀"


# --- base64 and pictures --------------------------------------------------------------------------


@given(st.one_of(st.text("AZaz09+/=-_ \né", max_size=40), st.binary(max_size=40).map(b64)))
@example("QR==")  # bits after the last byte
@example("QQ")
@example("-_-_")
def test_strict_base64_is_that_of_binascii(text: str) -> None:
    def decoded(decode: Callable[[str], bytes]) -> bytes | str:
        try:
            return decode(text)
        except ValueError as error:
            return str(error)

    expected = decoded(lambda given: binascii.a2b_base64(given, strict_mode=True))
    assert decoded(strict_base64) == expected


@given(data=st.binary(max_size=200), width=st.integers(1, 80))
def test_base64_with_line_breaks(data: bytes, width: int) -> None:
    text = b64(data)
    assert wire.base64_bytes(text, "sound") == data
    broken = "\r\n".join(text[i : i + width] for i in range(0, len(text), width))
    assert wire.base64_bytes(f"{broken}\n", "sound") == data


@pytest.mark.parametrize("text", ["A", "AA", "AAA", "A===", "AA-_", "AAAA!", "ä", "AA==AAAA", "%%%%", "\ud800"])
def test_refuses_invalid_base64(text: str) -> None:
    error = refused(wire.base64_bytes, text, "audio_chunk.audio_base64")
    assert error.code == ErrorCode.BAD_BASE64
    assert str(error).startswith("audio_chunk.audio_base64: expected base64, got "), error


def test_decodes_pictures() -> None:
    for text in ("/9j/2Q==", "data:image/jpeg;base64,/9j/2Q==", "DATA:;base64,/9j/2Q==", b"\xff\xd8\xff\xd9"):
        assert wire.picture_bytes(text, "frame") == b"\xff\xd8\xff\xd9", text
    for nothing in ("", b"", "data:image/jpeg;base64,"):
        error = refused(wire.picture_bytes, nothing, "frame")
        assert error.code == ErrorCode.BAD_IMAGE and str(error) == "frame: expected a picture, got no bytes", error
    assert refused(wire.picture_bytes, "data:image/jpeg;base64", "frame").code == ErrorCode.BAD_BASE64


# --- sound ----------------------------------------------------------------------------------------


@given(samples=SAMPLES)
def test_sound_as_text(samples: np.ndarray) -> None:
    text = Sound.of(samples).base64()
    assert base64.b64decode(text) == struct.pack(f"<{len(samples)}f", *samples)
    assert Sound.of(samples).json_text() == f'"{text}"'
    got = Sound.of(text).samples("sound")
    assert got.dtype == np.float32 and got.flags.writeable and np.array_equal(got, samples), got


@given(samples=SAMPLES)
def test_pcm16_rounds_to_half_a_step(samples: np.ndarray) -> None:
    data = Sound(samples).packed("pcm16")
    assert len(data) == 2 * len(samples)
    got = Sound(data, "pcm16").samples("sound")
    inside = np.clip(samples, -1, 32767 / 32768)
    worst = np.abs(got - inside).max()
    assert worst <= 1 / 65536, f"expected at most {1 / 65536}, got {worst}"
    assert Sound(got).packed("pcm16") == data, "expected the second trip to lose nothing"


def test_pcm16_scale_and_order() -> None:
    samples = np.array([0, 1 / 32768, -1, 1, 5, -5, 0.5, np.inf, -np.inf, np.nan], np.float32)
    got = np.frombuffer(Sound(samples).packed("pcm16"), "<i2").tolist()
    assert got == [0, 1, -32768, 32767, 32767, -32768, 16384, 32767, -32768, 0], got
    assert Sound(b"\x00\x01", "pcm16").samples("sound").tolist() == [256 / 32768]


@given(samples=SAMPLES)
def test_float32_is_exact(samples: np.ndarray) -> None:
    data = Sound(samples).packed("float32")
    assert np.array_equal(Sound(data, "float32").samples("sound"), samples)
    assert Sound(data, "float32").packed("float32") is data
    assert Sound(b64(data)).packed("float32") == data


def test_nan_is_passed_through() -> None:
    assert np.isnan(Sound(b64(struct.pack("<f", np.nan))).samples("sound")).all()


@pytest.mark.parametrize(
    ("sound", "code", "text"),
    [
        (Sound("AA"), "bad_base64", "x: expected base64, got "),
        (Sound("AAAA"), "bad_audio", "x: expected 4 bytes a sample, got 3 bytes"),
        (Sound(" \n"), "bad_audio", "x: expected at least one sample, got 0 bytes"),
        (Sound(b"", "pcm16"), "bad_audio", "x: expected at least one sample, got 0 bytes"),
        (Sound(b"abc", "pcm16"), "bad_audio", "x: expected 2 bytes a sample, got 3 bytes"),
        (Sound(b"abcdef", "float32"), "bad_audio", "x: expected 4 bytes a sample, got 6 bytes"),
    ],
)
def test_refuses_invalid_sound(sound: Sound, code: str, text: str) -> None:
    error = refused(sound.samples, "x")
    assert error.code == code and str(error).startswith(text), error


def test_refuses_other_values_as_sound() -> None:
    for value in (3, b"abcd", None, [0.0], np.zeros((2, 2), np.float32), np.zeros(3, np.int16)):
        with pytest.raises(ValueError, match="float samples"):
            Sound.of(value)


def test_accepts_other_sample_layouts() -> None:
    samples = np.arange(6, dtype=">f8")[::2] / 8
    assert Sound.of(samples).packed("float32") == struct.pack("<3f", 0, 0.25, 0.5)
    assert Sound.of(samples).samples("sound").dtype == np.float32


def test_repr_shows_size_only() -> None:
    assert repr(Sound("A" * 100_000)) == "Sound(100000 characters)"
    assert [bool(Sound(data)) for data in ("", np.zeros(0, np.float32), b"", "A")] == [False, False, False, True]


# --- binary frames --------------------------------------------------------------------------------


def frame(header: str, payload: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<I", len(header) if length is None else length) + header.encode() + payload


@given(sound=st.binary(max_size=50), pictures=st.lists(st.binary(max_size=20), max_size=4))
def test_frames_round_trip(sound: bytes, pictures: list[bytes]) -> None:
    data = wire.pack_frame({"type": "x", "é": [1]}, sound, pictures)
    assert wire.unpack_frame(data) == ({"type": "x", "é": [1]}, sound, pictures)


def test_frame_layout() -> None:
    header = b'{"type":"x","audio_bytes":2,"frame_bytes":[1,3]}'
    assert wire.pack_frame({"type": "x"}, b"ab", [b"c", b"def"]) == struct.pack("<I", len(header)) + header + b"abcdef"
    for counts in ("{}", '{"audio_bytes":null,"frame_bytes":null}', '{"audio_bytes":0,"frame_bytes":[]}'):
        assert wire.unpack_frame(frame(counts)) == ({}, b"", []), counts


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (b"", "bad_message", "binary frame: expected at least 4 bytes, got 0 bytes"),
        (b"abc", "bad_message", "binary frame: expected at least 4 bytes, got 3 bytes"),
        (frame("{}", length=3), "bad_message", "binary frame's header: expected at most 2 bytes, got 3 bytes"),
        (
            frame("{}", length=2**32 - 1),
            "bad_message",
            "binary frame's header: expected at most 2 bytes, got 4294967295",
        ),
        (frame(" " * 65_537), "bad_message", "binary frame's header: expected at most 65536 bytes, got 65537 bytes"),
        (frame("{"), "bad_json", "binary frame's header: expected JSON, got "),
        (frame("[]"), "bad_message", "binary frame's header: expected a JSON object, got []"),
        (frame("{}", b"a"), "bad_message", "binary frame: expected 0 bytes after the header"),
        (frame('{"audio_bytes":2}', b"a"), "bad_message", "binary frame: expected 2 bytes after the header"),
        (frame('{"audio_bytes":0}', b"a"), "bad_message", "binary frame: expected 0 bytes after the header"),
        (
            frame('{"audio_bytes":-1,"frame_bytes":[2]}', b"a"),
            "bad_message",
            "audio_bytes, frame_bytes: expected whole",
        ),
        (frame('{"audio_bytes":true}', b"a"), "bad_message", "audio_bytes, frame_bytes: expected whole numbers"),
        (frame('{"audio_bytes":1.0}', b"a"), "bad_message", "audio_bytes, frame_bytes: expected whole numbers"),
        (frame('{"frame_bytes":["1"]}', b"a"), "bad_message", "audio_bytes, frame_bytes: expected whole numbers"),
        (frame('{"frame_bytes":1}', b"a"), "bad_message", "frame_bytes: expected a list of numbers of bytes, got 1"),
        (frame('{"audio_bytes":' + "9" * 4000 + "}"), "bad_message", "binary frame: expected a number too large"),
    ],
)
def test_refuses_invalid_frames(data: bytes, code: str, text: str) -> None:
    error = refused(wire.unpack_frame, data)
    assert error.code == code and str(error).startswith(text), f"expected {code} {text}, got {error.code} {error}"


@given(data=st.binary(max_size=40) | st.builds(frame, st.text(max_size=20), st.binary(max_size=9), st.integers(0, 30)))
def test_any_bytes_are_a_frame_or_a_wire_error(data: bytes) -> None:
    try:
        header, sound, pictures = wire.unpack_frame(data)
    except WireError as error:
        assert error.code in (ErrorCode.BAD_JSON, ErrorCode.BAD_MESSAGE)
    else:
        assert wire.unpack_frame(wire.pack_frame(header, sound, pictures)) == (header, sound, pictures)
