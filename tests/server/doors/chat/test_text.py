"""Text of answers while it arrives: stop texts, calls of functions, transcripts of earlier answers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.doors.chat.audio_answers import LIFETIME_S, MAX_ANSWERS, AudioAnswers
from server.doors.chat.stop_filter import StopFilter
from server.doors.core.tool_calls import FoundCall, ToolCallReader

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "上海"}}\n</tool_call>'


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@given(st.text("ab\n", max_size=20), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_text_ends_before_the_first_stop_text(text: str, stops: list[str], size: int) -> None:
    filtered = StopFilter(stops)
    got = "".join(filtered.push(part) for part in cut(text, size)) + filtered.finish()
    ends = [text.find(stop) for stop in stops if stop in text]
    assert got == text[: min(ends, default=len(text))]
    assert filtered.is_over == bool(ends)


def test_text_that_begins_no_stop_text_is_not_held_back() -> None:
    filtered = StopFilter(["\nUser:"])
    assert filtered.push("Hello\n") == "Hello" and filtered.push("Us") == "" and filtered.push("e me") == "\nUse me"


def read(text: str, size: int) -> list[str | FoundCall]:
    reader = ToolCallReader()
    parts = [part for piece in cut(text, size) for part in reader.push(piece)]
    return [*parts, *reader.finish()]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_in_text(size: int) -> None:
    parts = read(f"Let me see.\n{CALL}\n{CALL}", size)
    calls = [part for part in parts if isinstance(part, FoundCall)]
    assert "".join(part for part in parts if isinstance(part, str)).strip() == "Let me see."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "上海"})] * 2
    assert calls[0].id != calls[1].id and calls[0].id.startswith("call_")


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("text", ["a <b> c", "<tool_call>no JSON</tool_call>", "<tool_call>{}</tool_call> x", "<tool_"])
def test_text_without_a_valid_call_stays_text(text: str, size: int) -> None:
    parts = read(text, size)
    assert all(isinstance(part, str) for part in parts) and "".join(map(str, parts)).replace(" ", "") == text.replace(
        " ", ""
    )


def test_call_without_its_end_counts_if_it_is_complete() -> None:
    [call] = read(CALL.removesuffix("</tool_call>"), 4)
    assert isinstance(call, FoundCall) and call.name == "weather"
    [text] = read('<tool_call>\n{"name": "wea', 4)
    assert text == '<tool_call>\n{"name": "wea'


def test_transcripts_are_kept_for_an_hour_and_for_their_owner() -> None:
    now = 0.0
    answers = AudioAnswers(lambda: now)
    first = answers.new_id()
    answers.keep(first, "Hello", "me")
    assert answers.transcript(first, "me") == "Hello" and answers.transcript(first, "you") is None
    assert answers.expires_at() == LIFETIME_S
    now = LIFETIME_S + 1.0
    assert answers.transcript(first, "me") is None


def test_oldest_transcripts_go_first() -> None:
    answers = AudioAnswers()
    ids = [answers.new_id() for _ in range(MAX_ANSWERS + 1)]
    for one in ids:
        answers.keep(one, one, "me")
    assert answers.transcript(ids[0], "me") is None and answers.transcript(ids[1], "me") == ids[1]
