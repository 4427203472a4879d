"""Calls of functions in a model's text: `<tool_call>` with JSON of name and arguments, found while the text arrives."""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from worker.protocol.wire import WireError, read_object

CALL, CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class FoundCall:
    """A call. arguments: JSON of an object."""

    id: str
    name: str
    arguments: str

    def fields(self) -> dict[str, object]:
        """The call as an element of `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallReader:
    """Splits a text into what is said and calls. Text that is no valid call stays text."""

    def __init__(self) -> None:
        self._text = ""
        self._is_call = False

    def push(self, text: str) -> Iterator[str | FoundCall]:
        """The parts that further text completes."""
        self._text += text
        while True:
            if not self._is_call:
                before, marker, after = self._text.partition(CALL)
                if not marker:
                    keep = _held_back(before, CALL)
                    said, self._text = before[: len(before) - keep], before[len(before) - keep :]
                    if said:
                        yield said
                    return
                if before.strip():
                    yield before
                self._text, self._is_call = after, True
            body, marker, after = self._text.partition(CALL_END)
            if not marker:
                return
            self._text, self._is_call = after.lstrip("\n"), False
            yield call_of(body) or f"{CALL}{body}{CALL_END}"

    def finish(self) -> Iterator[str | FoundCall]:
        """The rest. A call whose end marker is missing counts if it is complete."""
        text, is_call, self._text, self._is_call = self._text, self._is_call, "", False
        if is_call:
            yield call_of(text) or f"{CALL}{text}"
        elif text:
            yield text


def call_of(body: str) -> FoundCall | None:
    """The call between the markers; None for any other text."""
    try:
        given = read_object(body)
    except WireError:
        return None
    name, arguments = given.get("name"), given.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return FoundCall(f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False))


def _held_back(text: str, marker: str) -> int:
    """Length of the end of `text` that may be the beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
