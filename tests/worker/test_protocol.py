"""Every message of both hops: names, types, other names, what is refused, how it is written."""

import base64
import json
import struct
import time
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from models.errors import AudioError
from worker.protocol import (
    CLIENT,
    PLAIN_SPEC,
    SERVER,
    SYSTEM_PROMPT,
    AudioChunk,
    ClientDiagnostic,
    Error,
    FromClient,
    FromServer,
    Interrupt,
    Interrupted,
    Partial,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Queued,
    QueueDone,
    QueueUpdate,
    Result,
    Resume,
    Resumed,
    Spec,
    Stop,
    Stopped,
    Timeout,
    VideoFrame,
    read_binary,
    read_server,
    read_text,
    write,
)
from worker.wire import ErrorCode, Form, WireError, pack_frame

FORMS = get_args(Form)
PICTURE = b"\xff\xd8\xff\xd9"
LISTEN = {"is_listen": True, "current_time": 1, "cost_all_ms": 9.0, "server_send_ts": 1777777777.25}
LISTEN |= {"wall_clock_ms": 12.3, "kv_cache_length": 812}


def b64(*samples: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(samples)}f", *samples)).decode()


def sent(**fields: Any) -> Any:
    """What a client's message is read as."""
    return read_text(json.dumps(fields))


def refused(**fields: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        sent(**fields)
    return caught.value


# --- from the client ------------------------------------------------------------------------------


def test_types() -> None:
    got = sorted(CLIENT.classes)
    expected = ["audio_chunk", "client_diagnostic", "interrupt", "pause", "prepare", "resume", "stop", "video_frame"]
    assert got == expected and all(issubclass(cls, FromClient) for cls in CLIENT.classes.values())
    for cls, name in ((Resume, "resume"), (Stop, "stop"), (Interrupt, "interrupt")):
        assert sent(type=name) == cls()


def test_plain_prepare() -> None:
    got = sent(type="prepare")
    assert got == Prepare()
    assert (got.system_prompt, got.config, got.max_slice_nums, got.deferred_finalize) == (SYSTEM_PROMPT, {}, None, True)
    assert SYSTEM_PROMPT == "You are a helpful assistant."
    assert got.ref_audio() is None is got.tts_ref_audio() and got.ref_audio_path is None
    assert (
        got.spec
        == Spec()
        == Spec(version=1, partial_results=False, sound_in="base64", sound_out="base64", backlog="keep")
    )


def test_full_prepare() -> None:
    spec = {"version": 1, "partial_results": True, "sound_in": "pcm16", "sound_out": "float32", "backlog": "catch_up"}
    fields = {
        "system_prompt": "",
        "ref_audio_base64": b64(0.5),
        "tts_ref_audio_base64": b64(0.25, -1),
        "ref_audio_path": "voice.wav",
        "config": {"length_penalty": 1.1, "max_kv_tokens": 8000, "x": [None, {"y": 1}]},
        "max_slice_nums": 2,
        "deferred_finalize": False,
        "spec": spec,
    }
    got = sent(type="prepare", **fields)
    assert got.ref_audio().tolist() == [0.5] and got.tts_ref_audio().tolist() == [0.25, -1]
    assert got.model_dump() == {"type": "prepare", **fields}


def test_the_voice_that_speaks_is_the_one_of_the_prompt() -> None:
    got = sent(type="prepare", ref_audio_base64=b64(0.5), tts_ref_audio_base64="")
    assert got.tts_ref_audio().tolist() == [0.5]
    got = sent(type="prepare", tts_ref_audio_base64=b64(0.5), ref_audio_base64="")
    assert got.ref_audio() is None and got.tts_ref_audio().tolist() == [0.5]


def test_system_content() -> None:
    items = [
        {"type": "text", "text": "Speak like this:", "name": "ignored"},
        {"type": "audio", "data": None, "duration": 3.5},
        {"type": "audio", "data": b64(0.5), "name": "voice", "duration": 1},
        {"type": "text", "text": "And be kind."},
        {"type": "audio", "data": b64(0.25)},
        {"type": "text", "text": None},
    ]
    got = sent(type="prepare", system_content=items)
    assert got.system_prompt == "Speak like this:\nAnd be kind.", got.system_prompt
    assert got.ref_audio().tolist() == [0.5]


def test_what_is_given_by_name_counts_more_than_system_content() -> None:
    items = [{"type": "text", "text": "a"}, {"type": "audio", "data": b64(0.5)}]
    for name in ("system_prompt", "prefix_system_prompt"):
        got = sent(type="prepare", system_content=items, ref_audio_base64=b64(0.25), **{name: "b"})
        assert got.system_prompt == "b" and got.ref_audio().tolist() == [0.25]
    for empty in ([], None, [{"type": "text", "text": ""}]):
        assert sent(type="prepare", system_content=empty) == Prepare()
    assert sent(type="prepare", system_content="a").system_prompt == "a"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (3, "prepare.system_content: expected a list of texts and sounds, got 3"),
        (["a"], 'prepare.system_content[0]: expected an object whose type is "text" or "audio", got \'a\''),
        ([{"type": "text", "text": 3}], "prepare.system_content[0].text: expected text, got 3"),
        ([{"type": "text"}, {"type": "audio", "data": {}}], "prepare.system_content[1].data: expected text, got {}"),
        ([{"type": ["text"]}], "prepare.system_content[0]: expected an object whose type is"),
    ],
)
def test_bad_system_content(content: object, text: str) -> None:
    error = refused(type="prepare", system_content=content)
    assert error.code == ErrorCode.BAD_MESSAGE and str(error).startswith(text), error


@pytest.mark.parametrize(("alias", "name"), [("prefix_system_prompt", "system_prompt")])
def test_other_names_in_prepare(alias: str, name: str) -> None:
    assert sent(type="prepare", **{alias: "x"}) == Prepare(**{name: "x"})
    assert sent(type="prepare", **{alias: "x", name: "y"}) == Prepare(**{name: "y"})
    assert sent(type="prepare", **{alias: "x", name: None}) == Prepare(**{name: "x"})
    assert str(refused(type="prepare", **{alias: 3})) == f"prepare.{alias}: expected text, got 3"


def test_other_names_in_audio_chunk() -> None:
    picture = base64.b64encode(PICTURE).decode()
    for audio in ("audio_base64", "audio"):
        for frames in ("frame_base64_list", "video_frames"):
            got = sent(type="audio_chunk", **{audio: b64(0.5), frames: [picture, f"data:image/jpeg;base64,{picture}"]})
            assert got.samples().tolist() == [0.5] and got.pictures() == [PICTURE, PICTURE], (audio, frames)
    for empty in ("", None):
        assert sent(type="audio_chunk", audio_base64=empty, audio=b64(0.5)).samples().tolist() == [0.5]
    assert sent(type="audio_chunk", audio_base64=b64(0.25), audio=b64(0.5)).samples().tolist() == [0.25]
    assert sent(type="video_frame", frame=picture).picture() == PICTURE


def test_every_other_name_is_tested() -> None:
    got = {
        (cls.__name__, alias) for cls in CLIENT.classes.values() for names in cls.aliases.values() for alias in names
    }
    expected = {("Prepare", "prefix_system_prompt"), ("AudioChunk", "audio"), ("AudioChunk", "video_frames")}
    assert got == expected, got


def test_chunk_options() -> None:
    got = sent(type="audio_chunk", audio_base64=b64(0.5))
    assert (got.pictures(), got.force_listen, got.max_slice_nums) == ([], False, None)
    assert sent(type="audio_chunk", audio_base64="AAAAAA==", force_listen=True, max_slice_nums=2).max_slice_nums == 2
    assert sent(type="audio_chunk", audio_base64="AAAAAA==", max_slice_nums=[1, 2]).max_slice_nums == [1, 2]
    assert sent(type="pause").timeout is None and sent(type="pause", timeout=3).timeout == 3.0


def test_payloads_are_decoded_when_asked_for() -> None:
    got = sent(type="audio_chunk", audio_base64="not base64", frame_base64_list=["?", ""])
    for call, code, what in (
        (got.samples, "bad_base64", "audio_chunk.audio_base64: expected base64"),
        (got.pictures, "bad_base64", "audio_chunk.frame_base64_list[0]: expected base64"),
        (sent(type="audio_chunk", audio="AAAA").samples, "bad_audio", "audio_chunk.audio_base64: expected 4 bytes a"),
        (sent(type="audio_chunk", audio=" ").samples, "bad_audio", "audio_chunk.audio_base64: expected at least one"),
        (sent(type="audio_chunk", audio="A", video_frames=[""]).pictures, "bad_image", "audio_chunk.frame_base64_list"),
        (sent(type="video_frame", frame="?").picture, "bad_base64", "video_frame.frame: expected base64"),
        (sent(type="prepare", ref_audio_base64="?").ref_audio, "bad_base64", "prepare.ref_audio_base64: expected"),
        (sent(type="prepare", tts_ref_audio_base64="AA==").tts_ref_audio, "bad_audio", "prepare.tts_ref_audio_base64"),
    ):
        with pytest.raises(WireError) as caught:
            call()
        assert caught.value.code == code and str(caught.value).startswith(what), caught.value


def test_diagnostics_keep_their_fields() -> None:
    got = sent(type="client_diagnostic", event="gap", ms=3.5, list=[1, {"a": None}], nothing=None)
    assert isinstance(got, ClientDiagnostic)
    assert got.model_extra == {"event": "gap", "ms": 3.5, "list": [1, {"a": None}], "nothing": None}


@pytest.mark.parametrize("name", [name for name in CLIENT.classes if name != "client_diagnostic"])
def test_unknown_fields_and_nulls_say_nothing(name: str) -> None:
    needed = {"audio_chunk": {"audio_base64": "AAAAAA=="}, "video_frame": {"frame": "AAAA"}}.get(name, {})
    cls = CLIENT.classes[name]
    nulls = {field: None for field in cls.model_fields if field != "type" and field not in needed}
    extra = {"unknown": 1, "model_config": 2, "aliases": [], "samples": "x", "": None}
    got, plain = sent(type=name, **needed, **nulls, **extra), sent(type=name, **needed)
    assert got.model_dump() == plain.model_dump()
    spec = sent(type="prepare", spec={"unknown": 1, "sound_in": None, "sound_out": "pcm16"}).spec
    assert spec == Spec(sound_out="pcm16"), spec


# --- what is refused ------------------------------------------------------------------------------


def test_texts_that_clients_look_for() -> None:
    for fields in ({}, {"audio_base64": None}, {"audio_base64": ""}, {"audio": "", "frame_base64_list": ["AAAA"]}):
        error = refused(type="audio_chunk", **fields)
        assert str(error) == "Missing audio_base64" and error.code == "missing_audio", fields
    error = refused(type="video_call")
    assert str(error) == "Unknown message type: video_call" and error.code == "unknown_type"
    assert str(refused(type="x" * 10_000)) == f"Unknown message type: {'x' * 60}..."
    assert str(refused(type="result")) == "Unknown message type: result"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "message.type: expected text, got nothing"),
        ({"type": None}, "message.type: expected text, got nothing"),
        ({"type": 3}, "message.type: expected text, got 3"),
        ({"type": ["stop"]}, "message.type: expected text, got ['stop']"),
        ({"type": "prepare", "system_prompt": ["a"]}, "prepare.system_prompt: expected text, got ['a']"),
        ({"type": "prepare", "ref_audio_base64": 1.5}, "prepare.ref_audio_base64: expected base64 text, got 1.5"),
        ({"type": "prepare", "tts_ref_audio_base64": {}}, "prepare.tts_ref_audio_base64: expected base64 text, got {}"),
        ({"type": "prepare", "ref_audio_path": False}, "prepare.ref_audio_path: expected text, got false"),
        ({"type": "prepare", "config": "x" * 999}, f"prepare.config: expected an object, got '{'x' * 27}...x"),
        ({"type": "prepare", "config": [1]}, "prepare.config: expected an object, got [1]"),
        (
            {"type": "prepare", "max_slice_nums": 0},
            "prepare.max_slice_nums: expected a whole number, at least 1, got 0",
        ),
        (
            {"type": "prepare", "max_slice_nums": 1.0},
            "prepare.max_slice_nums: expected a whole number, at least 1, got",
        ),
        (
            {"type": "prepare", "max_slice_nums": True},
            "prepare.max_slice_nums: expected a whole number, at least 1, got",
        ),
        ({"type": "prepare", "deferred_finalize": 1}, "prepare.deferred_finalize: expected true or false, got 1"),
        ({"type": "prepare", "spec": 3}, "prepare.spec: expected an object, got 3"),
        ({"type": "prepare", "spec": {"version": 2}}, "prepare.spec.version: expected 1, got 2"),
        ({"type": "prepare", "spec": {"version": "1"}}, "prepare.spec.version: expected 1, got '1'"),
        ({"type": "prepare", "spec": {"partial_results": 1}}, "prepare.spec.partial_results: expected true or false"),
        (
            {"type": "prepare", "spec": {"sound_out": "opus"}},
            'prepare.spec.sound_out: expected "base64" or "pcm16" or "float32", got \'opus\'',
        ),
        ({"type": "prepare", "spec": {"sound_in": []}}, 'prepare.spec.sound_in: expected "base64" or "pcm16" or'),
        ({"type": "prepare", "spec": {"backlog": "drop"}}, 'prepare.spec.backlog: expected "keep" or "catch_up", got'),
        ({"type": "audio_chunk", "audio_base64": 0}, "audio_chunk.audio_base64: expected base64 text, got 0"),
        ({"type": "audio_chunk", "audio": ["A"]}, "audio_chunk.audio: expected base64 text, got ['A']"),
        (
            {"type": "audio_chunk", "audio": "A", "frame_base64_list": "A"},
            "audio_chunk.frame_base64_list: expected a list, each base64 text, got 'A'",
        ),
        (
            {"type": "audio_chunk", "audio": "A", "video_frames": ["A", None]},
            "audio_chunk.video_frames[1]: expected base64 text, got null",
        ),
        (
            {"type": "audio_chunk", "audio": "A", "force_listen": "yes"},
            "audio_chunk.force_listen: expected true or false",
        ),
        (
            {"type": "audio_chunk", "audio": "A", "max_slice_nums": "two"},
            "audio_chunk.max_slice_nums: expected a whole number or a list, each a whole number, got 'two'",
        ),
        (
            {"type": "audio_chunk", "audio": "A", "max_slice_nums": [1, True]},
            "audio_chunk.max_slice_nums[1]: expected a whole number, got true",
        ),
        ({"type": "video_frame"}, "video_frame.frame: expected base64 text, got nothing"),
        ({"type": "video_frame", "frame": 3}, "video_frame.frame: expected base64 text, got 3"),
        ({"type": "pause", "timeout": "60"}, "pause.timeout: expected a number, at least 0, at most 86400, got '60'"),
        ({"type": "pause", "timeout": -1}, "pause.timeout: expected a number, at least 0, at most 86400, got -1"),
        (
            {"type": "pause", "timeout": 10**400},
            "pause.timeout: expected a number, at least 0, at most 86400, got a num",
        ),
    ],
)
def test_wrong_types_are_named(fields: dict[str, Any], text: str) -> None:
    error = refused(**fields)
    assert str(error).startswith(text) and len(str(error)) < 250, f"expected {text}, got {error}"
    assert error.code == ErrorCode.BAD_MESSAGE


def test_infinite_numbers() -> None:
    with pytest.raises(WireError, match=r"pause.timeout: expected a number, .* got inf"):
        read_text('{"type":"pause","timeout":1e999}')
    for text in ('{"type":"pause","timeout":NaN}', '{"type":"prepare","config":{"a":Infinity}}'):
        with pytest.raises(WireError) as caught:
            read_text(text)
        assert caught.value.code == ErrorCode.BAD_JSON


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(
    {name for cls in CLIENT.classes.values() for name in (*cls.model_fields, *sum(cls.aliases.values(), ()))}
    | {"system_content", "version", "sound_in", "data", "text", "audio_bytes", "frame_bytes"}
)
MESSAGES = st.dictionaries(
    st.sampled_from(FIELDS),
    JSON
    | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3)
    | st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON)),
    max_size=5,
)
TYPES = st.sampled_from(sorted(CLIENT.classes))


def read_or_refused(call, *args: Any) -> None:
    try:
        got = call(*args)
    except WireError as error:
        assert isinstance(error.code, ErrorCode) and len(str(error)) < 1000, error
        return
    assert isinstance(got, FromClient | FromServer), got
    for name in ("samples", "pictures", "picture", "ref_audio", "tts_ref_audio"):
        if decode := getattr(got, name, None):
            try:
                decode()
            except WireError as error:
                assert error.code in (ErrorCode.BAD_BASE64, ErrorCode.BAD_AUDIO, ErrorCode.BAD_IMAGE)


@given(text=st.text(st.characters(), max_size=40) | JSON.map(json.dumps))
def test_any_text_is_a_message_or_a_wire_error(text: str) -> None:
    read_or_refused(read_text, text)
    read_or_refused(read_server, text)


@given(name=TYPES, fields=MESSAGES)
def test_any_fields_are_a_message_or_a_wire_error(name: str, fields: dict[str, Any]) -> None:
    read_or_refused(read_text, json.dumps({**fields, "type": name}))


@given(name=TYPES, fields=MESSAGES, payload=st.binary(max_size=12), cuts=st.lists(st.integers(0, 12), max_size=3))
def test_any_frame_is_a_message_or_a_wire_error(name: str, fields: dict, payload: bytes, cuts: list[int]) -> None:
    header = json.dumps({"audio_bytes": len(payload) - sum(cuts), "frame_bytes": cuts, **fields, "type": name}).encode()
    for form in FORMS:
        spec = Spec(sound_in=form, sound_out=form)
        read_or_refused(read_binary, struct.pack("<I", len(header)) + header + payload, spec)
        read_or_refused(read_binary, payload, spec)
        read_or_refused(read_server, payload, spec)


@given(
    name=st.sampled_from(sorted(SERVER.classes)),
    fields=st.dictionaries(st.text(max_size=9), JSON, max_size=4),
    data=st.data(),
)
def test_any_servers_message_is_read_or_refused(name: str, fields: dict[str, Any], data: st.DataObject) -> None:
    names = st.sampled_from(list(SERVER.classes[name].model_fields))
    fields |= data.draw(st.dictionaries(names, JSON, max_size=6))
    read_or_refused(read_server, json.dumps({**fields, "type": name}))


# --- binary frames from the client ----------------------------------------------------------------


@pytest.mark.parametrize("form", ["pcm16", "float32"])
def test_binary_chunks(form: Form) -> None:
    spec = Spec(sound_in=form)
    samples = np.array([0.5, -0.25], np.float32)
    chunk = AudioChunk(audio_base64=samples, frame_base64_list=[PICTURE, PICTURE * 2], max_slice_nums=[1, 2])
    data = write(chunk, spec)
    header = b'{"type":"audio_chunk","force_listen":false,"max_slice_nums":[1,2],"audio_bytes":'
    header += b'%d,"frame_bytes":[4,8]}' % (4 if form == "pcm16" else 8)
    sound = b"\x00\x40\x00\xe0" if form == "pcm16" else struct.pack("<2f", 0.5, -0.25)
    assert data == struct.pack("<I", len(header)) + header + sound + PICTURE * 3, data
    got = read_binary(data, spec)
    assert got.samples().tolist() == [0.5, -0.25] and got.pictures() == [PICTURE, PICTURE * 2]
    assert got.max_slice_nums == [1, 2] and write(got, spec) == data
    assert read_text(write(got)).pictures() == [PICTURE, PICTURE * 2], "expected base64 where nothing is agreed"


def test_binary_frames_have_to_be_agreed() -> None:
    data = write(AudioChunk(audio_base64=np.zeros(2, np.float32)), Spec(sound_in="pcm16"))
    for read, spec in ((read_binary, Spec(sound_out="pcm16")), (read_server, Spec(sound_in="pcm16"))):
        with pytest.raises(WireError) as caught:
            read(data, spec)
        assert caught.value.code == ErrorCode.BINARY_NOT_AGREED
        assert str(caught.value) == "message: expected text, as base64 is what was agreed on, got a binary frame"


@pytest.mark.parametrize(
    ("header", "sound", "pictures", "text"),
    [
        ({"type": "prepare"}, b"", [], "binary frame's type: expected audio_chunk, got prepare"),
        ({"type": "hello"}, b"", [], "Unknown message type: hello"),
        ({}, b"ab", [], "message.type: expected text, got nothing"),
        ({"type": "audio_chunk"}, b"", [PICTURE], "Missing audio_base64"),
        (
            {"type": "audio_chunk", "force_listen": 1},
            b"ab",
            [],
            "audio_chunk.force_listen: expected true or false, got",
        ),
    ],
)
def test_bad_binary_chunks(header: dict[str, Any], sound: bytes, pictures: list[bytes], text: str) -> None:
    with pytest.raises(WireError) as caught:
        read_binary(pack_frame(header, sound, pictures), Spec(sound_in="pcm16"))
    assert str(caught.value).startswith(text), caught.value


def test_broken_binary_sound_is_told_when_decoded() -> None:
    chunk = read_binary(pack_frame({"type": "audio_chunk"}, b"abc", [b""]), Spec(sound_in="pcm16"))
    with pytest.raises(WireError, match=r"audio_chunk.audio_base64: expected 2 bytes a sample, got 3 bytes"):
        chunk.samples()
    with pytest.raises(WireError, match=r"audio_chunk.frame_base64_list\[0\]: expected a picture, got no bytes"):
        chunk.pictures()


def test_pictures_in_a_servers_frame() -> None:
    data = pack_frame({"type": "partial", "current_time": 1, "part": 1}, b"ab", [PICTURE])
    with pytest.raises(WireError, match="frame_bytes: expected none, got 1"):
        read_server(data, Spec(sound_out="pcm16"))


# --- to the client --------------------------------------------------------------------------------


def fields_of(message: FromServer, spec: Spec = PLAIN_SPEC) -> dict[str, Any]:
    text = write(message, spec)
    assert isinstance(text, str)
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"expected strict JSON, got {name}"))


def test_listening_result() -> None:
    assert fields_of(Result(**LISTEN)) == {
        "type": "result",
        **LISTEN,
        "text": "",
        "audio_data": None,
        "end_of_turn": False,
        **dict.fromkeys(("cost_llm_ms", "cost_tts_prep_ms", "cost_tts_ms", "cost_token2wav_ms", "headroom_ms")),
        **dict.fromkeys(("n_tokens", "n_tts_tokens", "vision_slices", "vision_tokens", "lag_ms"), 0),
        **dict.fromkeys(("backlog_units", "n_caught_up", "n_parts"), 0),
        "stages": {},
    }


def test_speaking_result() -> None:
    pcm = np.array([0, 0.5, -1], np.float32)
    fields = {**LISTEN, "is_listen": False, "wall_clock_ms": 455.1499, "cost_llm_ms": 120.12345, "vision_slices": 3}
    message = Result(
        **fields, text="Sure, 好😀", audio_data=pcm, end_of_turn=True, stages={"decode": 1.23456, "x": None}
    )
    got = fields_of(message)
    assert base64.b64decode(got["audio_data"]) == struct.pack("<3f", 0, 0.5, -1)
    assert (got["text"], got["end_of_turn"], got["is_listen"]) == ("Sure, 好😀", True, False)
    assert (got["wall_clock_ms"], got["cost_llm_ms"], got["stages"]) == (455.1, 120.123, {"decode": 1.235, "x": None})
    assert (got["vision_slices"], got["vision_tokens"]) == (3, 192)


def test_no_sound_is_null() -> None:
    nothing = Result(**LISTEN, audio_data=np.zeros(0, np.float32))
    for spec in (Spec(), Spec(sound_out="pcm16")):
        assert fields_of(nothing, spec)["audio_data"] is None


def test_result_of_the_published_protocol() -> None:
    text = """{"type":"result","is_listen":false,"text":"Sure, ","audio_data":"AAAAAA==","end_of_turn":false,
        "current_time":7,"cost_llm_ms":120.5,"cost_tts_prep_ms":1.1,"cost_tts_ms":160.0,"cost_token2wav_ms":80.2,
        "cost_all_ms":365.0,"n_tokens":5,"n_tts_tokens":26,"server_send_ts":1777777777.25,"wall_clock_ms":455.1,
        "kv_cache_length":812,"vision_slices":1,"vision_tokens":64,"later":[]}"""
    got = read_server(text)
    assert got.audio_data.samples("sound").tolist() == [0.0] and got.n_tts_tokens == 26
    ours = fields_of(got)
    published = {key: value for key, value in json.loads(text).items() if key != "later"}
    assert {key: ours[key] for key in published} == published


def test_small_messages() -> None:
    for message, fields in (
        (Paused(timeout=60), {"type": "paused", "timeout": 60.0}),
        (Resumed(), {"type": "resumed"}),
        (Interrupted(), {"type": "interrupted"}),
        (Stopped(session_id="omni_1"), {"type": "stopped", "session_id": "omni_1"}),
        (Timeout(reason="Pause timeout (60.0s)"), {"type": "timeout", "reason": "Pause timeout (60.0s)"}),
        (QueueDone(), {"type": "queue_done"}),
    ):
        assert fields_of(message) == fields
    waiting = {"position": 2, "estimated_wait_s": 206.1, "queue_length": 2, "eta_seconds": 206.1}
    assert fields_of(QueueUpdate(position=2, estimated_wait_s=206.06, queue_length=2)) == {
        "type": "queue_update",
        **waiting,
    }
    queued = Queued(position=2, estimated_wait_s=206.06, queue_length=2, ticket_id="q_0a1b2c3d4e5f")
    assert fields_of(queued) == {"type": "queued", **waiting, "ticket_id": "q_0a1b2c3d4e5f"}


def test_prepared() -> None:
    got = fields_of(Prepared(prompt_length=28, session_id="d1", notes=["n"], spec=Spec(partial_results=True)))
    spec = {"version": 1, "partial_results": True, "sound_in": "base64", "sound_out": "base64", "backlog": "keep"}
    expected = {"type": "prepared", "prompt_length": 28, "session_id": "d1", "protocol_version": 1, "spec": spec}
    assert got == {**expected, "notes": ["n"]}, got
    recorded = fields_of(Prepared(prompt_length=28, recording_session_id="omni_d1"))
    assert recorded["recording_session_id"] == "omni_d1"


def test_errors() -> None:
    got = fields_of(Error(error="Worker is paused", code=ErrorCode.PAUSED))
    assert got == {"type": "error", "error": "Worker is paused", "message": "Worker is paused", "code": "paused"}
    assert Error.of(refused(type="audio_chunk")).model_dump() == {
        "type": "error",
        "error": "Missing audio_base64",
        "code": "missing_audio",
        "message": "Missing audio_base64",
    }
    told = Error.of(AudioError("sound", expected="a", got="b"), ErrorCode.BAD_AUDIO)
    assert (told.error, told.code) == ("sound: expected a, got b", "bad_audio")
    assert Error.of(KeyError()).error == "KeyError" and Error.of(ValueError("x" * 9999)).code == "internal"
    assert len(Error.of(ValueError("x" * 9999)).error) == 2000
    assert write(Error.of(ValueError("half \ud800"))).encode("utf-8").count(b"half ?") == 2


def test_errors_of_others_are_read() -> None:
    assert read_server('{"type":"error","error":"Worker is paused"}').code == "internal"
    assert read_server('{"type":"error","error":"x","code":"of_tomorrow"}').code == "of_tomorrow"
    assert read_server('{"type":"error","error":"x","code":"paused"}').code == ErrorCode.PAUSED
    with pytest.raises(WireError, match="Unknown message type: heartbeat") as caught:
        read_server('{"type":"heartbeat"}')
    assert caught.value.code == ErrorCode.UNKNOWN_TYPE


def test_our_own_mistakes_are_errors() -> None:
    for make in (
        lambda: Result(**LISTEN, kv_len=3),
        lambda: Result(**{**LISTEN, "cost_all_ms": float("nan")}),
        lambda: Result(**{**LISTEN, "cost_all_ms": None}),
        lambda: Result(**LISTEN, stages={"x": float("inf")}),
        lambda: Result(**LISTEN, audio_data=b"abc"),
        lambda: Partial(current_time=1, part=0),
        lambda: Queued(position=0, estimated_wait_s=1.0, queue_length=1, ticket_id="q_"),
        lambda: Spec(sound="pcm16"),
    ):
        with pytest.raises(ValidationError):
            make()
    with pytest.raises(ValidationError):
        Result(**LISTEN).text = "x"


FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
COUNT = st.integers(0, 2**53)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SAMPLES = st.none() | st.lists(st.floats(-1, 0.75, width=32), max_size=5).map(lambda got: np.array(got, np.float32))
SPECS = st.builds(
    Spec,
    partial_results=st.booleans(),
    sound_in=st.sampled_from(FORMS),
    sound_out=st.sampled_from(FORMS),
    backlog=st.sampled_from(["keep", "catch_up"]),
)
RESULTS = st.builds(
    Result,
    is_listen=st.booleans(),
    text=TEXT,
    audio_data=SAMPLES,
    current_time=COUNT,
    cost_llm_ms=st.none() | FINITE,
    cost_all_ms=FINITE,
    server_send_ts=FINITE,
    wall_clock_ms=FINITE,
    kv_cache_length=COUNT,
    vision_slices=COUNT,
    stages=st.dictionaries(TEXT, st.none() | FINITE, max_size=3),
    headroom_ms=st.none() | FINITE,
)
SERVERS = st.one_of(
    RESULTS,
    st.builds(Partial, current_time=COUNT, part=st.integers(1, 99), text=TEXT, audio_data=SAMPLES),
    st.builds(Prepared, prompt_length=COUNT, recording_session_id=st.none() | TEXT, spec=SPECS, notes=st.lists(TEXT)),
    st.builds(Paused, timeout=FINITE),
    st.builds(Timeout, reason=TEXT),
    st.builds(Stopped, session_id=TEXT),
    st.builds(Error, error=st.text(st.characters()), code=st.sampled_from(ErrorCode)),
    st.builds(Queued, position=st.integers(1, 99), estimated_wait_s=FINITE, queue_length=COUNT, ticket_id=TEXT),
    st.builds(QueueUpdate, position=st.integers(1, 99), estimated_wait_s=FINITE, queue_length=COUNT),
    st.sampled_from([Resumed(), Interrupted(), QueueDone()]),
)


def assert_same(got: Any, expected: Any, sound: str | None, step: float) -> None:
    assert type(got) is type(expected)
    exclude = {sound} if sound else set()
    assert got.model_dump(exclude=exclude) == expected.model_dump(exclude=exclude)
    if sound:
        was, now = getattr(expected, sound), getattr(got, sound)
        assert bool(was) == bool(now), f"expected {was}, got {now}"
        if was:
            worst = np.abs(was.samples("was") - now.samples("now")).max()
            assert worst <= step, f"expected samples within {step}, got {worst}"


@given(message=SERVERS, spec=SPECS)
def test_server_messages_round_trip(message: FromServer, spec: Spec) -> None:
    data = write(message, spec)
    sound = getattr(message, message.sound_field) if message.sound_field else None
    assert isinstance(data, bytes) == (bool(sound) and spec.sound_out != "base64")
    got = read_server(data, spec)
    assert_same(got, message, message.sound_field, 1 / 65536 if spec.sound_out == "pcm16" else 0)
    assert write(got, spec) == data


@given(
    samples=SAMPLES.filter(lambda got: got is not None and got.size),
    pictures=st.lists(st.binary(min_size=1, max_size=5), max_size=3),
    listen=st.booleans(),
    slices=st.none() | COUNT | st.lists(COUNT, max_size=3),
    spec=SPECS,
)
def test_chunks_round_trip(samples: np.ndarray, pictures: list[bytes], listen: bool, slices: Any, spec: Spec) -> None:
    chunk = AudioChunk(audio_base64=samples, frame_base64_list=pictures, force_listen=listen, max_slice_nums=slices)
    data = write(chunk, spec)
    got = read_text(data) if isinstance(data, str) else read_binary(data, spec)
    worst = np.abs(got.samples() - samples).max()
    assert worst <= (1 / 65536 if spec.sound_in == "pcm16" else 0), worst
    assert (got.pictures(), got.force_listen, got.max_slice_nums) == (pictures, listen, slices)


@given(prompt=TEXT, spec=SPECS, config=st.dictionaries(TEXT, st.none() | st.booleans() | COUNT | TEXT, max_size=3))
def test_prepare_round_trips(prompt: str, spec: Spec, config: dict[str, Any]) -> None:
    message = Prepare(system_prompt=prompt, spec=spec, config=config, ref_audio_base64=np.ones(3, np.float32))
    got = read_text(write(message, spec))
    assert got.ref_audio().tolist() == [1, 1, 1]
    assert (got.system_prompt, got.spec, got.config) == (prompt, spec, config)
    for other in (Pause(timeout=2.5), Stop(), VideoFrame(frame=b"abc")):
        assert read_text(write(other)).model_dump() == other.model_dump()


def test_a_second_of_sound_is_cheap() -> None:
    """The best of many, as the machine may be busy: nothing may look through long text twice."""
    pcm = np.linspace(-1, 1, 24_000, dtype=np.float32)
    result, chunk = Result(**LISTEN, audio_data=pcm), write(AudioChunk(audio_base64=pcm[:16_000]))
    data = write(result)
    assert len(data) > 128_000 and len(chunk) > 85_336
    for name, call in (("write", lambda: write(result)), ("read", lambda: read_text(chunk))):
        times = []
        for _ in range(30):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        assert min(times) < 1e-3, f"{name}: expected below 1 ms, got {1e3 * min(times):.2f} ms"
