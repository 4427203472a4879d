"""Client messages: types, defaults, aliases, payloads."""

import base64

import pytest

from tests.worker.protocol.message_helpers import PICTURE, b64, refused, sent
from worker.protocol.adjust_messages import Adjust
from worker.protocol.codec import FromClient
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import (
    CLIENT,
    SYSTEM_PROMPT,
    ClientDiagnostic,
    Interrupt,
    Prepare,
    Resume,
    Spec,
    Stop,
)
from worker.protocol.wire import WireError


def test_message_types() -> None:
    got = sorted(CLIENT.classes)
    expected = ["adjust", "audio_chunk", "client_diagnostic", "decided", "insert_text", "interrupt", "pause", "prepare"]
    expected += ["resume", "stop", "video_frame"]
    assert got == expected and all(issubclass(cls, FromClient) for cls in CLIENT.classes.values())
    for cls, name in ((Resume, "resume"), (Stop, "stop"), (Interrupt, "interrupt")):
        assert sent(type=name) == cls()


def test_prepare_defaults() -> None:
    got = sent(type="prepare")
    assert got == Prepare()
    assert (got.system_prompt, got.config, got.max_slice_nums, got.deferred_finalize) == (SYSTEM_PROMPT, {}, None, True)
    assert SYSTEM_PROMPT == "You are a helpful assistant."
    assert got.ref_audio() is None is got.tts_ref_audio() and got.ref_audio_path is None
    assert (
        got.spec
        == Spec()
        == Spec(
            version=1,
            partial_results=False,
            sound_in="base64",
            sound_out="base64",
            backlog="keep",
            counters=False,
            resume=False,
            trace=False,
        )
    )


def test_prepare_with_all_fields() -> None:
    spec = {"version": 1, "partial_results": True, "sound_in": "pcm16", "sound_out": "float32", "backlog": "catch_up"}
    spec |= {"counters": True, "resume": True, "trace": True}
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


def test_speech_voice_defaults_to_the_prompt_voice() -> None:
    got = sent(type="prepare", ref_audio_base64=b64(0.5), tts_ref_audio_base64="")
    assert got.tts_ref_audio().tolist() == [0.5]
    got = sent(type="prepare", tts_ref_audio_base64=b64(0.5), ref_audio_base64="")
    assert got.ref_audio() is None and got.tts_ref_audio().tolist() == [0.5]


def test_reads_system_content() -> None:
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


def test_named_fields_override_system_content() -> None:
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
def test_refuses_invalid_system_content(content: object, text: str) -> None:
    error = refused(type="prepare", system_content=content)
    assert error.code == ErrorCode.BAD_MESSAGE and str(error).startswith(text), error


@pytest.mark.parametrize(("alias", "name"), [("prefix_system_prompt", "system_prompt")])
def test_aliases_in_prepare(alias: str, name: str) -> None:
    assert sent(type="prepare", **{alias: "x"}) == Prepare(**{name: "x"})
    assert sent(type="prepare", **{alias: "x", name: "y"}) == Prepare(**{name: "y"})
    assert sent(type="prepare", **{alias: "x", name: None}) == Prepare(**{name: "x"})
    assert str(refused(type="prepare", **{alias: 3})) == f"prepare.{alias}: expected text, got 3"


def test_aliases_in_audio_chunk() -> None:
    picture = base64.b64encode(PICTURE).decode()
    for audio in ("audio_base64", "audio"):
        for frames in ("frame_base64_list", "video_frames"):
            got = sent(type="audio_chunk", **{audio: b64(0.5), frames: [picture, f"data:image/jpeg;base64,{picture}"]})
            assert got.samples().tolist() == [0.5] and got.pictures() == [PICTURE, PICTURE], (audio, frames)
    for empty in ("", None):
        assert sent(type="audio_chunk", audio_base64=empty, audio=b64(0.5)).samples().tolist() == [0.5]
    assert sent(type="audio_chunk", audio_base64=b64(0.25), audio=b64(0.5)).samples().tolist() == [0.25]
    assert sent(type="video_frame", frame=picture).picture() == PICTURE


def test_all_aliases_are_tested() -> None:
    got = {
        (cls.__name__, alias) for cls in CLIENT.classes.values() for names in cls.aliases.values() for alias in names
    }
    expected = {("Prepare", "prefix_system_prompt"), ("AudioChunk", "audio"), ("AudioChunk", "video_frames")}
    assert got == expected, got


def test_chunk_options() -> None:
    got = sent(type="audio_chunk", audio_base64=b64(0.5))
    assert (got.pictures(), got.force_listen, got.max_slice_nums) == ([], False, None)
    assert (got.force_speak, got.close_early) == (False, False)
    chosen = sent(type="audio_chunk", audio_base64="AAAAAA==", force_speak=True, close_early=True, force_listen=None)
    assert (chosen.force_speak, chosen.close_early, chosen.force_listen) == (True, True, False)
    assert sent(type="audio_chunk", audio_base64="AAAAAA==", force_listen=True, max_slice_nums=2).max_slice_nums == 2
    assert sent(type="audio_chunk", audio_base64="AAAAAA==", max_slice_nums=[1, 2]).max_slice_nums == [1, 2]
    assert sent(type="pause").timeout is None and sent(type="pause", timeout=3).timeout == 3.0


def test_a_unit_must_not_both_listen_and_speak() -> None:
    error = refused(type="audio_chunk", audio_base64="AAAAAA==", force_listen=True, force_speak=True)
    assert error.code == ErrorCode.BAD_MESSAGE
    assert str(error) == "audio_chunk.force_speak: expected false with force_listen, got true"


def test_inserted_text() -> None:
    got = sent(type="insert_text", text="The caller is Ada.")
    assert (got.text, got.role) == ("The caller is Ada.", "user")
    assert sent(type="insert_text", text="x", role="system").role == "system"


def test_decodes_payloads_on_access() -> None:
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


def test_diagnostics_keep_all_fields() -> None:
    got = sent(type="client_diagnostic", event="gap", ms=3.5, list=[1, {"a": None}], nothing=None)
    assert isinstance(got, ClientDiagnostic)
    assert got.model_extra == {"event": "gap", "ms": 3.5, "list": [1, {"a": None}], "nothing": None}


@pytest.mark.parametrize("name", [name for name in CLIENT.classes if name not in ("client_diagnostic", "adjust")])
def test_ignores_unknown_fields_and_nulls(name: str) -> None:
    needed = {
        "audio_chunk": {"audio_base64": "AAAAAA=="},
        "video_frame": {"frame": "AAAA"},
        "insert_text": {"text": "A"},
        "decided": {"unit": 1, "seed": 2, "sampled": [3], "remembered": []},
    }.get(name, {})
    cls = CLIENT.classes[name]
    nulls = {field: None for field in cls.model_fields if field != "type" and field not in needed}
    extra = {"unknown": 1, "model_config": 2, "aliases": [], "samples": "x", "": None}
    got, plain = sent(type=name, **needed, **nulls, **extra), sent(type=name, **needed)
    assert got.model_dump() == plain.model_dump()
    spec = sent(type="prepare", spec={"unknown": 1, "sound_in": None, "sound_out": "pcm16"}).spec
    assert spec == Spec(sound_out="pcm16"), spec


def test_adjust_refuses_unknown_fields_by_name() -> None:
    error = refused(type="adjust", config={"top_k": 1}, confg={"top_k": 2})
    assert error.code == ErrorCode.BAD_MESSAGE
    assert str(error).startswith("adjust.confg: expected no field but config, max_slice_nums"), error
    assert str(error).endswith("got {'top_k': 2}"), error


def test_nulls_of_adjust_count_as_absent() -> None:
    got = sent(type="adjust", config=None, max_slice_nums=None)
    assert got == sent(type="adjust") == Adjust()
    assert sent(type="adjust", ref_audio_base64="", tts_ref_audio_base64="") == Adjust()
    assert sent(type="adjust", ref_audio_base64=b64(0.5)).tts_ref_audio().tolist() == [0.5]
    assert sent(type="adjust", config={"listen_top_k": None}).config == {"listen_top_k": None}
