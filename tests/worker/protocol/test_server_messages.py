"""Server messages: their JSON, rounding, errors."""

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from models.errors import AudioError
from tests.worker.protocol.message_helpers import LISTEN, refused
from worker.protocol.codec import Message
from worker.protocol.codes import ErrorCode
from worker.protocol.gateway_messages import Queued, QueueDone, QueueUpdate, StartProgress
from worker.protocol.messages import (
    PLAIN_SPEC,
    Error,
    Interrupted,
    Partial,
    Paused,
    Prepared,
    Result,
    Resumed,
    Spec,
    Stopped,
    Timeout,
    read_server,
    write,
)
from worker.protocol.text_messages import TextInserted
from worker.protocol.unit_counters import Mark, UnitUsage
from worker.protocol.wire import WireError


def fields_of(message: Message, spec: Spec = PLAIN_SPEC) -> dict[str, Any]:
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


def test_counters_are_left_out_until_they_are_set() -> None:
    usage = UnitUsage(text_rows=4, audio_rows=10, image_rows=64, text_tokens=3, speech_tokens=25, side_tokens=7)
    marks = [Mark(text_chars=12, audio_ms=840.00049)]
    got = fields_of(Result(**LISTEN, turn_limit=True, usage=usage, marks=marks, side_texts=["{}"]))
    assert got["side_texts"] == ["{}"]
    assert got["turn_limit"] is True and got["marks"] == [{"text_chars": 12, "audio_ms": 840.0}]
    assert got["usage"] == {
        "text_rows": 4,
        "audio_rows": 10,
        "image_rows": 64,
        "text_tokens": 3,
        "speech_tokens": 25,
        "side_tokens": 7,
    }
    again = read_server(json.dumps({**got, "usage": {**got["usage"], "later": 1}}))
    assert (again.usage, again.marks) == (usage, marks)


def test_empty_sound_is_null() -> None:
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


def test_messages_with_few_fields() -> None:
    for message, fields in (
        (Paused(timeout=60), {"type": "paused", "timeout": 60.0}),
        (Resumed(), {"type": "resumed"}),
        (Interrupted(), {"type": "interrupted"}),
        (TextInserted(n_rows=9), {"type": "text_inserted", "n_rows": 9}),
        (Stopped(session_id="omni_1"), {"type": "stopped", "session_id": "omni_1"}),
        (Timeout(reason="Pause timeout (60.0s)"), {"type": "timeout", "reason": "Pause timeout (60.0s)"}),
        (QueueDone(), {"type": "queue_done"}),
    ):
        assert fields_of(message) == fields
    waiting = {"position": 2, "estimated_wait_s": 206.1, "queue_length": 2, "eta_seconds": 206.1, "reason": "busy"}
    assert fields_of(QueueUpdate(position=2, estimated_wait_s=206.06, queue_length=2)) == {
        "type": "queue_update",
        **waiting,
    }
    queued = Queued(position=2, estimated_wait_s=206.06, queue_length=2, ticket_id="q_0a1b2c3d4e5f")
    assert fields_of(queued) == {"type": "queued", **waiting, "ticket_id": "q_0a1b2c3d4e5f"}
    progress = StartProgress(what="compiling", done=3, total=8)
    loading = fields_of(
        QueueUpdate(position=2, estimated_wait_s=206.06, queue_length=2, reason="loading", progress=progress)
    )
    assert (loading["reason"], loading["progress"]) == ("loading", {"what": "compiling", "done": 3, "total": 8})


def test_prepared() -> None:
    got = fields_of(Prepared(prompt_length=28, session_id="d1", notes=["n"], spec=Spec(partial_results=True)))
    spec = {"version": 1, "partial_results": True, "sound_in": "base64", "sound_out": "base64", "backlog": "keep"}
    spec |= {"counters": False, "resume": False, "trace": False}
    expected = {"type": "prepared", "prompt_length": 28, "session_id": "d1", "protocol_version": 1, "spec": spec}
    assert got == {**expected, "notes": ["n"]}, got
    recorded = fields_of(Prepared(prompt_length=28, recording_session_id="omni_d1"))
    assert recorded["recording_session_id"] == "omni_d1"


def test_error_messages() -> None:
    got = fields_of(Error(error="Worker is paused", code=ErrorCode.PAUSED))
    assert got == {"type": "error", "error": "Worker is paused", "message": "Worker is paused", "code": "paused"}
    assert Error.of(refused(type="audio_chunk")).model_dump() == {
        "type": "error",
        "error": "Missing audio_base64",
        "code": "missing_audio",
        "message": "Missing audio_base64",
    }
    message = Error.of(AudioError("sound", expected="a", got="b"), ErrorCode.BAD_AUDIO)
    assert (message.error, message.code) == ("sound: expected a, got b", "bad_audio")
    assert Error.of(KeyError()).error == "KeyError" and Error.of(ValueError("x" * 9999)).code == "internal"
    assert len(Error.of(ValueError("x" * 9999)).error) == 2000
    assert write(Error.of(ValueError("half \ud800"))).encode("utf-8").count(b"half ?") == 2


def test_reads_unknown_error_codes() -> None:
    assert read_server('{"type":"error","error":"Worker is paused"}').code == "internal"
    assert read_server('{"type":"error","error":"x","code":"of_tomorrow"}').code == "of_tomorrow"
    assert read_server('{"type":"error","error":"x","code":"paused"}').code == ErrorCode.PAUSED
    with pytest.raises(WireError, match="Unknown message type: heartbeat") as caught:
        read_server('{"type":"heartbeat"}')
    assert caught.value.code == ErrorCode.UNKNOWN_TYPE


def test_constructor_refuses_invalid_fields() -> None:
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
