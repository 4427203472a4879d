"""Answers by chats: beside units, and to conversations that do not fit into the context."""

import asyncio
from typing import Literal

import pytest

from server.doors.realtime.events.client_events import ContentPart
from server.doors.realtime.items import ConversationItem
from server.doors.realtime.session_config import RealtimeConfig
from server.doors.realtime.turn_request import turn_request, without_oldest
from tests.server.doors.realtime.event_schema import Json
from tests.server.doors.realtime.session_stage import SessionStage, StubTurns, stage
from tests.server.live_gateway import run, wait_until

MANUAL = {"input": {"turn_detection": None}}


async def answered(one: SessionStage) -> Json:
    """The response to six items and a request."""
    for index in range(6):
        content = [{"type": "input_text", "text": f"text {index}"}]
        item = {"id": f"i{index}", "type": "message", "role": "system" if index == 1 else "user", "content": content}
        await one.send("conversation.item.create", item=item)
    await one.send("response.create")
    await wait_until(lambda: one.kinds("response.done"), "the answer")
    response: Json = one.last("response.done")["response"]
    return response


ASIDE = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which day is it?"}]}]


def test_units_listen_while_a_chat_answers_in_the_duplex_lane() -> None:
    async def scenario() -> None:
        async with stage(turns=StubTurns(waits=True)) as one:
            await one.append(1.0)
            await one.send("response.create", response={"input": ASIDE})
            assert one.n_interrupts == 1
            one.speak("late ")
            await one.append(1.0)
            assert [chunk.force_listen for chunk in one.chunks] == [False, True]
            one.listen()
            one.session.lane.detach()
            assert one.kinds("response.done") == [], "expected the lost worker to be none of the chat's"
            await one.send("response.create")
            assert one.last("error")["error"]["code"] == "conversation_already_has_active_response"
            one.speak_up(2500)
            assert one.last("response.done")["response"]["status_details"]["reason"] == "turn_detected"
            await asyncio.sleep(0.02)
            assert one.kinds("response")[-1] == "response.done", "expected nothing of the chat after its end"

    run(scenario)


def test_text_that_came_before_its_sound_is_cut_with_it() -> None:
    async def scenario() -> None:
        async with stage(turns=StubTurns(), audio=MANUAL) as one:
            item_id = (await answered(one))["output"][0]["id"]
            for end_ms, heard in ((300, "Good"), (0, "")):
                await one.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=end_ms)
                await one.send("conversation.item.retrieve", item_id=item_id)
                assert one.last("conversation.item.retrieved")["item"]["content"][0]["transcript"].strip() == heard

    run(scenario)


def test_the_oldest_items_are_left_out_until_the_rest_fits() -> None:
    turns = StubTurns(max_messages=3)

    async def scenario() -> None:
        async with stage(turns=turns, audio=MANUAL, instructions="Be brief.") as one:
            assert (await answered(one))["status"] == "completed" and one.kinds("error") == []
            system, *others = turns.requests[-1].fields["messages"]
            assert system == {"role": "system", "content": "Be brief.\n\ntext 1"}
            assert [said["content"][0]["text"] for said in others] == ["text 4", "text 5"]

    run(scenario)


def test_disabled_truncation_leaves_the_response_incomplete() -> None:
    async def scenario() -> None:
        async with stage(turns=StubTurns(max_messages=3), audio=MANUAL, truncation="disabled") as one:
            assert (await answered(one))["status"] == "incomplete"
            assert one.last("error")["error"]["code"] == "context_length_exceeded"

    run(scenario)


def test_a_conversation_that_never_fits_fails() -> None:
    async def scenario() -> None:
        async with stage(turns=StubTurns(max_messages=0), audio=MANUAL) as one:
            failed = await answered(one)
            assert failed["status_details"]["error"]["code"] == "context_length_exceeded"

    run(scenario)


@pytest.mark.parametrize(("ratio", "kept"), [(None, 7), (0.5, 5), (0.0, 1), (1.0, 9)])
def test_a_ratio_says_how_many_items_stay(ratio: float | None, kept: int) -> None:
    items = [ConversationItem(f"i{index}", role="user") for index in range(10)]
    assert [item.id for item in without_oldest(items, ratio)] == [item.id for item in items[10 - kept :]]


@pytest.mark.parametrize(("detail", "image"), [("low", {"max_slice_nums": 1}), ("high", None), (None, None)])
def test_pictures_of_low_detail_are_not_cut(detail: Literal["low", "high"] | None, image: Json | None) -> None:
    part = ContentPart(type="input_image", detail=detail)
    item = ConversationItem("a", role="user", parts=[part], pictures=[b"picture"])
    assert turn_request(RealtimeConfig("duo"), None, [item]).fields.get("image") == image


def test_a_result_does_not_stay_without_its_call() -> None:
    call = ConversationItem("call", "function_call", call_id="c1")
    output = ConversationItem("output", "function_call_output", call_id="c1")
    last = ConversationItem("last", role="user")
    assert without_oldest([call, output, last], 0.5) == [last]
    assert without_oldest([last], None) == [last]
