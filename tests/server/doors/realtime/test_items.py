import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.doors.live.event_error import EventError
from server.doors.realtime.events.client_events import ContentPart, GivenItem
from server.doors.realtime.items import (
    MAX_CAMERA_ITEMS,
    Conversation,
    ConversationItem,
    HeardMark,
    heard_text,
    item_of,
)


def message(item_id: str, *parts: ContentPart, role: str = "user") -> ConversationItem:
    return item_of(GivenItem(id=item_id, type="message", role=role, content=list(parts)))


TEXT = ContentPart(type="input_text", text="Hello")
PICTURE = ContentPart(type="input_image", image_url="data:image/png;base64,AAAA")


def conversation(*ids: str) -> Conversation:
    found = Conversation()
    for item_id in ids:
        found.insert(message(item_id, TEXT))
    return found


def ids(found: Conversation) -> list[str]:
    return [item.id for item in found]


def test_items_go_to_the_tail_the_head_or_after_another_one() -> None:
    found = conversation("a", "b")
    assert found.insert(message("c", TEXT)) == "b"
    assert found.insert(message("d", TEXT), "a") == "a"
    assert found.insert(message("e", TEXT), "root") is None
    assert ids(found) == ["e", "a", "d", "b", "c"]


@pytest.mark.parametrize(
    ("item_id", "previous", "code"),
    [("a", None, "item_create_duplicate_item_id"), ("x", "nowhere", "item_create_invalid_previous_item_id")],
)
def test_wrong_places_are_refused(item_id: str, previous: str | None, code: str) -> None:
    found = conversation("a")
    with pytest.raises(EventError) as caught:
        found.insert(message(item_id, TEXT), previous)
    assert caught.value.code == code and ids(found) == ["a"]


def test_a_deleted_id_may_be_used_again() -> None:
    found = conversation("a", "b")
    found.delete("a")
    found.insert(message("a", TEXT))
    assert ids(found) == ["b", "a"]
    with pytest.raises(EventError, match="nothing"):
        found.delete("nothing")


def test_old_camera_pictures_are_dropped_and_text_stays() -> None:
    found = conversation("a")
    for index in range(MAX_CAMERA_ITEMS + 5):
        found.insert(message(f"p{index}", PICTURE))
    found.insert(message("told", PICTURE, TEXT))
    assert len(found) == MAX_CAMERA_ITEMS + 2 and ids(found)[:2] == ["a", "p5"] and ids(found)[-1] == "told"


def test_a_dropped_camera_picture_still_names_a_place() -> None:
    """Clients know nothing of the drop: their next item may follow it, and they may delete it."""
    found = conversation("a", "b")
    found.insert(message("p", PICTURE), "a")
    for index in range(MAX_CAMERA_ITEMS):
        found.insert(message(f"q{index}", PICTURE))
    assert "p" not in ids(found)
    assert found.insert(message("c", TEXT), "p") == "a"
    found.delete("p")
    found.delete("a")
    found.insert(message("d", TEXT), "p")
    assert ids(found)[:3] == ["d", "c", "b"]
    found.insert(message("p", TEXT))
    assert ids(found)[-1] == "p"


def test_parts_are_kept_in_the_spelling_of_their_role() -> None:
    beta = [ContentPart(type="text", text="Hi"), ContentPart(type="audio", transcript="Ho")]
    shown = {role: message("a", *beta, role=role).described()["content"] for role in ("user", "assistant")}
    assert shown["user"] == [{"type": "input_text", "text": "Hi"}, {"type": "input_audio", "transcript": "Ho"}]
    assert shown["assistant"] == [{"type": "output_text", "text": "Hi"}, {"type": "output_audio", "transcript": "Ho"}]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * 40_000}] * 2}, "content"),
        ({"type": "function_call", "call_id": "c"}, "name"),
        ({"type": "function_call_output", "output": ""}, "call_id"),
        ({"type": "message"}, "role"),
    ],
)
def test_items_that_cannot_be_shown_are_refused(given: dict[str, object], param: str) -> None:
    with pytest.raises(EventError) as caught:
        item_of(GivenItem.model_validate(given))
    assert caught.value.param == f"item.{param}"


def test_the_server_may_add_items_beyond_the_clients_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.realtime.items.MAX_ITEMS", 2)
    found = conversation("a", "b")
    with pytest.raises(EventError) as caught:
        found.check_new(message("c", TEXT), None)
    assert caught.value.code == "too_many_items"
    assert found.insert(message("c", TEXT, role="assistant")) == "b"


def test_many_pictures_are_echoed_up_to_a_limit() -> None:
    pictures = [PICTURE.model_copy(update={"image_url": "data:image/png;base64," + "A" * 30_000})] * 30
    shown = message("a", *pictures).described()["content"]
    assert [("image_url" in part) for part in shown] == [True] * 2 + [False] * 28


def test_echoes_carry_no_sound_and_no_long_pictures() -> None:
    long = ContentPart(type="input_image", image_url="data:image/png;base64," + "A" * 70_000)
    sound = ContentPart(type="input_audio", audio="AAAA" * 1000)
    shown = message("a", long, sound, PICTURE).described()
    assert shown["content"] == [
        {"type": "input_image", "detail": "auto"},
        {"type": "input_audio", "transcript": None},
        {"type": "input_image", "image_url": PICTURE.image_url, "detail": "auto"},
    ]


def test_an_output_needs_its_call() -> None:
    found = Conversation()
    output = GivenItem(type="function_call_output", call_id="call_1", output="{}")
    with pytest.raises(EventError) as caught:
        found.insert(item_of(output))
    assert caught.value.code == "invalid_tool_call_id"
    found.insert(item_of(GivenItem(type="function_call", call_id="call_1", name="look", arguments="{}")))
    found.insert(item_of(output))
    assert [item.kind for item in found] == ["function_call", "function_call_output"]


MARKS = [HeardMark(1000, 12), HeardMark(2000, 24)]
WORDS = "One two and three four."


@pytest.mark.parametrize(
    ("audio_ms", "kept"),
    [
        (0, ""),
        (1000, "One two and"),
        (1500, "One two and three"),
        (1900, "One two and three"),
        (2000, WORDS),
        (9000, WORDS),
    ],
)
def test_truncation_keeps_the_words_heard(audio_ms: int, kept: str) -> None:
    assert heard_text(WORDS, MARKS, audio_ms).rstrip() == kept


@given(st.text(alphabet="ab cd", max_size=40), st.lists(st.integers(1, 3000), max_size=5), st.integers(0, 9000))
def test_kept_words_are_a_beginning(text: str, lengths: list[int], audio_ms: int) -> None:
    marks, at = [], 0
    for index, ms in enumerate(lengths, start=1):
        at += ms
        marks.append(HeardMark(at, len(text) * index // len(lengths)))
    kept = heard_text(text, marks, audio_ms)
    assert text.startswith(kept)
    assert len(kept) <= len(heard_text(text, marks, audio_ms + 500))


def test_an_item_that_is_cut_while_it_is_spoken_stays_cut() -> None:
    item = ConversationItem("a", role="assistant", status="in_progress", marks=list(MARKS))
    item.cut(1000)
    item.marks.append(HeardMark(3000, 40))
    item.parts = [ContentPart(type="output_audio", transcript=WORDS)]
    assert item.heard_ms == 1000
    item.cut(item.heard_ms)
    assert item.text.rstrip() == "One two and"
    item.cut(500)
    assert item.text.rstrip() == "One", "expected that an item may be cut again"


def test_a_call_of_a_client_gets_an_id_if_it_has_none() -> None:
    call = item_of(GivenItem(type="function_call", name="look", arguments="{}"))
    assert call.call_id is not None and call.call_id.startswith("call_")
