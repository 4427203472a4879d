"""The checks that every event of the door's tests passes: a whole log passes, and each single fault in it fails."""

import copy
from collections.abc import Callable
from typing import Any, get_args

import pytest

from server.access.identity import Identity
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.items import Conversation
from server.doors.realtime.responses import COMPLETED, RealtimeResponse, ResponseShape
from server.doors.realtime.session_config import RealtimeConfig
from server.doors.realtime.turns.input_transcriptions import InputTranscriptions
from server.doors.realtime.turns.user_turns import UserTurns
from tests.server.doors.realtime import event_schema, object_schema
from tests.server.doors.realtime.event_log import EventLog
from tests.server.doors.realtime.event_schema import Json
from tests.server.doors.stub_transcriber import StubTranscriber

Fault = Callable[[list[Json]], Any]


def recorded() -> list[Json]:
    """The events of a turn of the user and its spoken answer."""
    log: list[Json] = []
    send, conversation, config = EventSender(log.append), Conversation(), RealtimeConfig("duo")
    send("session.created", session={**config.described(), "id": "sess_1", "expires_at": 2_000_000_000})
    turns = UserTurns(send, conversation, InputTranscriptions(send, StubTranscriber(), Identity(), "s"))
    turns.begin(100)
    turns.end(900)
    response = RealtimeResponse(send, conversation, ResponseShape.of(config, {"a": "b"}), is_asked=True)
    response.begin()
    response.add_text("Good ")
    response.add_sound(bytes(30_000))
    response.add_text("day.")
    response.finish(COMPLETED)
    send("rate_limits.updated", rate_limits=[])
    return copy.deepcopy(log)


def check(log: list[Json]) -> None:
    checks = EventLog()
    for event in log:
        checks.take(event, 100)


def find(log: list[Json], kind: str) -> Json:
    return next(event for event in log if event["type"] == kind)


def drop(kind: str) -> Fault:
    return lambda log: log.remove(find(log, kind))


def change(kind: str, **fields: Any) -> Fault:
    return lambda log: find(log, kind).update(fields)


def swap(first: str, second: str) -> Fault:
    def swapped(log: list[Json]) -> None:
        i, j = log.index(find(log, first)), log.index(find(log, second))
        log[i], log[j] = log[j], log[i]

    return swapped


def test_a_recorded_turn_passes() -> None:
    check(recorded())


@pytest.mark.parametrize(
    "fault",
    [
        drop("session.created"),
        drop("response.created"),
        drop("response.output_item.added"),
        drop("response.content_part.added"),
        drop("response.output_audio.done"),
        drop("response.output_item.done"),
        drop("conversation.item.added"),
        swap("response.output_audio.done", "response.output_audio_transcript.done"),
        swap("response.content_part.done", "response.output_item.done"),
        swap("response.done", "response.output_item.done"),
        change("response.output_audio_transcript.done", transcript="Good"),
        change("response.output_item.added", output_index=1),
        change("conversation.item.added", previous_item_id="item_unknown"),
        change("input_audio_buffer.speech_stopped", audio_end_ms=50),
        change("response.output_audio.delta", delta="AAA"),
        change("rate_limits.updated", event_id="event_other", more=1),
        change("response.done", event_id=None),
        lambda log: log.append(find(log, "rate_limits.updated")),
        lambda log: log.append({**find(log, "response.output_audio.delta"), "event_id": "event_late"}),
        lambda log: find(log, "response.done")["response"]["usage"].update(total_tokens=5),
        lambda log: find(log, "response.done")["response"].update(status="in_progress"),
        lambda log: find(log, "response.done")["response"]["output"].clear(),
        lambda log: find(log, "session.created")["session"]["audio"]["input"]["format"].update(rate=16_000),
        lambda log: find(log, "session.created")["session"].update(tool_choice={"type": "function"}),
    ],
)
def test_each_fault_fails(fault: Fault) -> None:
    log = recorded()
    fault(log)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check(log)


def test_a_frame_that_stock_clients_do_not_read_fails() -> None:
    with pytest.raises(AssertionError, match="1048576"):
        EventLog().take(recorded()[0], 2**20)


def test_the_shapes_have_the_fields_of_the_sdk() -> None:
    """Each event has all fields that the SDK's class requires, and none that it does not know."""
    types = pytest.importorskip("openai.types.realtime")
    known, ours = (by_kind(one) for one in (types.RealtimeServerEvent, event_schema.AnyEvent))
    assert set(ours) <= set(known), set(ours) - set(known)
    pairs = [(kind, ours[kind], known[kind]) for kind in ours]
    pairs += [("response", object_schema.Response, types.RealtimeResponse)]
    pairs += [("usage", object_schema.Usage, types.RealtimeResponseUsage)]
    for kind, shape, sdk in pairs:
        required = {name for name, field in sdk.model_fields.items() if field.is_required()}
        names = set(shape.model_fields)
        assert required <= names <= set(sdk.model_fields), (
            f"{kind}: {required - names}, {names - set(sdk.model_fields)}"
        )


def by_kind(union: object) -> dict[str, Any]:
    """The classes of a union of events, by the values of `type`."""
    members = get_args(get_args(union)[0])
    return {kind: one for one in members for kind in get_args(one.model_fields["type"].annotation)}
