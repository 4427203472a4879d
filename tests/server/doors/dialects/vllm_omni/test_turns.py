"""The user's turns of vLLM-Omni sessions, and decisions about speech over a response."""

from typing import Any, cast

import numpy as np
import pytest

from server.access.identity import Identity
from server.doors.core.request_fields import RequestFields
from server.doors.core.transcriber import Transcriber
from server.doors.dialects.vllm_omni.events import OmniEvents
from server.doors.dialects.vllm_omni.settings import OmniSettings
from server.doors.dialects.vllm_omni.transcripts import OmniTranscripts
from server.doors.dialects.vllm_omni.turns import OmniTurns
from server.doors.errors import ApiError
from server.doors.live.sound.detector import SpeechContinues, SpeechHeard, SpeechOver
from tests.server.doors.stub_transcriber import StubTranscriber

SECOND = np.zeros(16_000, np.float32)


class Host:
    """A session. calls: what was asked of it."""

    def __init__(self) -> None:
        self.has_response, self.epoch = False, 0
        self.calls: list[Any] = []

    def commit(self, item_id: str, end_ms: float, *, is_speech_due: bool) -> None:
        self.calls.append(("commit", end_ms, is_speech_due))

    def interrupt(self, reason: str) -> None:
        self.calls.append(("interrupt", reason))

    def listen_while(self, is_user_speaking: bool) -> None:
        self.calls.append(("listen", is_user_speaking))


class Stage:
    """Turns with these settings. events: what the client gets."""

    def __init__(self, **session: Any):
        self.events: list[dict[str, Any]] = []
        settings = OmniSettings("m").merged(RequestFields(session))
        self.host = Host()
        send = OmniEvents(lambda event, _: self.events.append(event), "me")
        transcripts = OmniTranscripts(send, cast(Transcriber, StubTranscriber()), Identity(), "me")
        self.turns = OmniTurns(send, self.host, settings, transcripts)

    def respond(self) -> None:
        """Open a response after a second of sound."""
        self.turns.append(SECOND, RequestFields({}))
        self.host.has_response = True
        self.turns.begin_response()

    def decisions(self) -> list[tuple[str, str]]:
        return [(one["action"], one["reason"]) for one in self.events if one["type"] == "overlap.decision"]


def test_the_detector_commits_a_turn_and_asks_for_a_response() -> None:
    stage = Stage(turn_detection={"type": "server_vad", "min_speech_duration_ms": 200})
    stage.turns.on_heard(SpeechHeard(100, 96, 300))
    assert not stage.events, "expected nothing before 200 ms of speech"
    stage.turns.on_heard(SpeechContinues(224, 450))
    stage.turns.on_heard(SpeechOver(900))
    started, stopped = stage.events
    assert (started["type"], started["audio_start_ms"]) == ("input_audio_buffer.speech_started", 100)
    assert (stopped["type"], stopped["audio_end_ms"]) == ("input_audio_buffer.speech_stopped", 900)
    assert started["item_id"] == stopped["item_id"]
    assert stage.host.calls == [("listen", True), ("listen", False), ("commit", 900, True)]


def test_the_detector_ends_a_response() -> None:
    stage = Stage(turn_detection={"type": "server_vad"})
    stage.respond()
    stage.turns.on_heard(SpeechHeard(0, 96, 900))
    stage.turns.on_heard(SpeechContinues(160, 1060))
    assert stage.decisions() == [], "expected no decision: most of the speech came before the response"
    stage.turns.on_heard(SpeechContinues(224, 1130))
    assert stage.decisions() == [("barge_in", "server_vad_speech_started")]
    assert stage.host.calls[-1] == ("interrupt", "turn_detected")


@pytest.mark.parametrize(
    ("policy", "decisions", "is_ended"),
    [
        ("listen_only", [("listen", "policy_listen_only")], False),
        ("barge_in_on_speech", [("barge_in", "barge_in_on_speech")], True),
        ("auto", [("listen", "accumulating_overlap_speech"), ("barge_in", "long_overlap_speech")], True),
    ],
)
def test_clients_may_say_what_is_speech(policy: str, decisions: list[tuple[str, str]], *, is_ended: bool) -> None:
    stage = Stage(overlap_policy=policy)
    stage.respond()
    for _ in range(2):
        assert stage.turns.append(SECOND, RequestFields({"is_speech": True}))
    assert stage.decisions() == decisions
    assert (("interrupt", "barge_in") in stage.host.calls) == is_ended


def test_a_short_remark_lets_the_response_go_on() -> None:
    stage = Stage(overlap_policy="auto")
    stage.respond()
    stage.turns.append(SECOND[:6400], RequestFields({"is_speech": True}))
    stage.turns.append(SECOND[:6400], RequestFields({"is_speech": False}))
    assert stage.decisions() == [("listen", "accumulating_overlap_speech"), ("listen", "short_ack")]
    assert not stage.host.calls


@pytest.mark.parametrize(
    ("fields", "decision", "is_kept"),
    [
        ({"overlap_action": "interrupt"}, ("barge_in", "client_overlap_action"), True),
        ({"force_barge_in": True}, ("barge_in", "client_force_barge_in"), True),
        ({"overlap": "ack"}, ("listen", "client_overlap_action"), True),
        ({"overlap_action": "ignore"}, ("drop", "client_overlap_action"), False),
    ],
)
def test_clients_may_decide(fields: dict[str, object], decision: tuple[str, str], *, is_kept: bool) -> None:
    stage = Stage()
    assert stage.turns.append(SECOND, RequestFields(fields)), "expected no effect without a response"
    stage.respond()
    assert stage.turns.append(SECOND, RequestFields(fields)) == is_kept
    assert stage.decisions() == [decision]


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"turn_detection": {"type": "semantic_vad"}}, "turn_detection.type"),
        ({"turn_detection": {"type": "server_vad", "treshold": 1}}, "turn_detection.treshold"),
        ({"turn_detection": {"type": "server_vad", "interrupt_response": False}}, "turn_detection.interrupt_response"),
        ({"turn_detection": {"type": "server_vad"}, "overlap_policy": "auto"}, "overlap_policy"),
    ],
)
def test_settings_of_turns_are_checked(session: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        OmniSettings("m").merged(RequestFields(session))
    assert (refused.value.code, refused.value.param) == ("unsupported_turn_detection", param)


def test_settings_of_turns_imply_a_policy() -> None:
    nested = {"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": 0.7}}}}
    settings = OmniSettings("m").merged(RequestFields(nested))
    assert settings.detection is not None and settings.detection.threshold == 0.7
    assert settings.overlap_policy == "barge_in_on_speech"
    off = settings.merged(RequestFields({"turn_detection": None}))
    assert off.detection is None and off.overlap_policy == "listen_only"
