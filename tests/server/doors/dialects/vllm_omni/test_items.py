"""Items of vLLM-Omni conversations: what was heard of them, and the texts that another context begins with."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from server.doors.core.request_fields import RequestFields
from server.doors.dialects.vllm_omni.conversation import OmniConversation
from server.doors.dialects.vllm_omni.events import OmniEvents
from server.doors.dialects.vllm_omni.items import MAX_ITEM_CHARS, MAX_ITEMS, OmniItem, OmniItems
from server.doors.errors import ApiError
from server.doors.live.unit_lane import LiveLane
from worker.protocol.messages import Error
from worker.protocol.text_messages import InsertText


def spoken(item_id: str = "item_resp_1") -> OmniItem:
    """Ten characters in the first second, ten in the second one."""
    item = OmniItem(item_id, "assistant", [{"type": "output_audio", "transcript": "one, two, three four"}])
    item.marks = [(10, 1000.0), (20, 2000.0)]
    item.playback.sent_ms = 2000.0
    return item


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, ""), (500, "one, "), (1000, "one, two,"), (1500, "one, two, three"), (2000, None), (9000, None)],
)
def test_what_was_heard_follows_the_marks(ms: float, text: str | None) -> None:
    item = spoken()
    assert item.heard(ms) == (item.transcript if text is None else text.rstrip())


def test_a_cut_item_has_what_was_heard() -> None:
    item = spoken()
    item.playback.acknowledge(1800, None)
    item.cut(500)
    assert item.transcript == "one," and item.playback.shown()["committed_ms"] == 500
    assert item.heard(9000) == "one,"


def test_another_context_begins_with_what_was_kept() -> None:
    items = OmniItems()
    items.add(OmniItem("a", "user", [], text="Count."))
    items.add(OmniItem("b", "user", [{"type": "input_audio", "transcript": None}]))
    items.add(spoken())
    whole = items.history(is_heard_only=False)
    assert [text.text for text in whole] == ["Count.", "You have said: one, two, three four"]
    assert [text.text for text in items.history(is_heard_only=True)] == ["Count."], "nothing was acknowledged"
    items.find("item_resp_1").playback.acknowledge(1000, None)
    assert items.history(is_heard_only=True)[-1].text == "You have said: one, two,"


def test_acknowledgements_name_an_item_of_a_response() -> None:
    items = OmniItems()
    assert items.find_spoken(None, None) is None
    items.add(OmniItem("a", "user", []))
    item = spoken()
    assert items.add(item) == "a"
    assert items.find_spoken(None, None) is items.find_spoken(None, "resp_1") is item
    for item_id, response_id, code in (
        ("a", None, "playback_item_not_found"),
        ("a", "resp_1", "playback_item_mismatch"),
        (None, "resp_2", "playback_item_not_found"),
    ):
        with pytest.raises(ApiError) as refused:
            items.find_spoken(item_id, response_id)
        assert refused.value.code == code


def test_the_oldest_items_are_forgotten() -> None:
    items = OmniItems()
    for number in range(MAX_ITEMS + 1):
        items.add(OmniItem(f"i{number}", "user", []))
    assert not items.has("i0") and items.has("i1") and items.last_id == f"i{MAX_ITEMS}"
    with pytest.raises(ApiError, match="item_id: expected an item of the conversation, got i0"):
        items.delete("i0")
    items.add(OmniItem("long", "user", [], text="a" * (MAX_ITEM_CHARS + 1)))
    assert items.has("long") and not items.has("i9")


def test_an_id_is_taken_while_its_text_waits_for_the_context() -> None:
    waiting: list[Callable[[Error | None], None]] = []

    class Lane:
        n_texts = 0

        def insert(self, message: InsertText, *, is_said: bool, on_done: Callable[[Error | None], None]) -> None:
            waiting.append(on_done)

    events: list[dict[str, Any]] = []
    send = OmniEvents(lambda event, _: events.append(event), "me")
    conversation = OmniConversation(send, cast(LiveLane, Lane()), lambda _: None)
    given = RequestFields({"item": {"id": "a", "content": [{"type": "input_text", "text": "Hi"}]}})
    conversation.create(given)
    with pytest.raises(ApiError) as refused:
        conversation.create(given)
    assert refused.value.code == "item_create_duplicate_item_id" and len(waiting) == 1
    waiting.pop()(Error(error="no room", code="context_full"))
    conversation.create(given)
    waiting.pop()(None)
    assert [event["type"] for event in events] == ["error", "conversation.item.added", "conversation.item.done"]
