"""The items of a vLLM-Omni conversation: what was committed, inserted and said, and how much of it was heard."""

import secrets
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from server.doors.errors import ApiError
from server.doors.live.context_texts import newest_texts, said_text
from worker.protocol.text_messages import InsertText

MAX_ITEMS, MAX_ITEM_CHARS = 512, 2**20  # of all items; the oldest beyond are forgotten
MAX_ID = 200


def new_item_id() -> str:
    return f"item_{secrets.token_hex(10)}"


class Playback:
    """How much of a response's sound was sent, played and kept, in ms."""

    def __init__(self) -> None:
        self.sent_ms = self.played_ms = self.committed_ms = 0.0

    def acknowledge(self, played_ms: float, committed_ms: float | None) -> None:
        """Record what the client has played. committed_ms: of it, what belongs to the conversation; None: all."""
        self.played_ms = min(max(self.played_ms, played_ms), self.sent_ms)
        self.committed_ms = min(self.played_ms if committed_ms is None else committed_ms, self.sent_ms)

    def cut(self, ms: float) -> None:
        """Keep nothing after a position."""
        self.played_ms, self.committed_ms = min(self.played_ms, ms), min(self.committed_ms, ms)

    def shown(self) -> dict[str, int]:
        sent, played, committed = int(self.sent_ms), int(self.played_ms), int(self.committed_ms)
        return {"generated_ms": sent, "sent_ms": sent, "played_ms": played, "committed_ms": committed}


@dataclass(eq=False)
class OmniItem:
    """A message of the conversation.

    Attributes:
        content: its parts, as clients see them; of the assistant: one part with the transcript.
        status: `in_progress`, `completed` or `incomplete`.
        text: what a context that begins again has of it; None: nothing, its sound has no transcript.
        marks: of the assistant: characters of the transcript, and the ms of sound that they end at.
        playback: of the assistant: how much was sent, played and kept.
    """

    id: str
    role: Literal["user", "system", "assistant"]
    content: list[Any]
    status: str = "completed"
    text: str | None = None
    marks: list[tuple[int, float]] = field(default_factory=list)
    playback: Playback = field(default_factory=Playback)

    def shown(self) -> dict[str, object]:
        """The item as clients see it."""
        base = {"id": self.id, "object": "realtime.item", "type": "message", "status": self.status}
        return {**base, "role": self.role, "content": self.content if self.status != "in_progress" else []}

    @property
    def n_chars(self) -> int:
        """Length of its text."""
        return len(self.text or "") + len(self.transcript)

    @property
    def transcript(self) -> str:
        """What the assistant said."""
        return str(self.content[0]["transcript"]) if self.role == "assistant" else ""

    def transcribe(self, text: str) -> None:
        """Set what the user said."""
        self.content[0]["transcript"], self.text = text, text

    def heard(self, ms: float) -> str:
        """The transcript up to a position of the sound, in ms."""
        if not self.marks or ms >= self.marks[-1][1]:
            return self.transcript if self.marks or ms > 0 else ""
        for (chars, start), (next_chars, end) in pairwise([(0, 0.0), *self.marks]):
            if ms < end:
                share = (ms - start) / (end - start)
                return self.transcript[: int(chars + share * (next_chars - chars))].rstrip()
        return self.transcript

    def cut(self, ms: float) -> None:
        """Forget what was said after a position of the sound."""
        self.content[0]["transcript"] = self.heard(ms)
        n_chars = len(self.transcript)
        self.marks = [mark for mark in self.marks if mark[1] < ms] + [(n_chars, ms)]
        self.playback.cut(ms)


class OmniItems:
    """The items of one conversation, in order."""

    def __init__(self) -> None:
        self._items: dict[str, OmniItem] = {}

    @property
    def last_id(self) -> str | None:
        return next(reversed(self._items), None)

    def add(self, item: OmniItem) -> str | None:
        """Append an item. Returns: the id of the one before."""
        before = self.last_id
        self._items[item.id] = item
        n_chars = sum(one.n_chars for one in self._items.values())
        while len(self._items) > MAX_ITEMS or (n_chars > MAX_ITEM_CHARS and len(self._items) > 1):
            oldest = self._items.pop(next(iter(self._items)))
            n_chars -= oldest.n_chars
        return before

    def before(self, item: OmniItem) -> str | None:
        """The id of the item before this one."""
        ids = list(self._items)
        place = ids.index(item.id) if item.id in self._items else 0
        return ids[place - 1] if place else None

    def has(self, item_id: str) -> bool:
        return item_id in self._items

    def find(self, item_id: str) -> OmniItem:
        """Raises: ApiError."""
        item = self._items.get(item_id)
        if item is None:
            text = f"item_id: expected an item of the conversation, got {item_id[:MAX_ID]}"
            raise ApiError(404, text, param="item_id", code="item_not_found")
        return item

    def delete(self, item_id: str) -> None:
        """Forget an item. What the model has heard of it stays in its context. Raises: ApiError."""
        self.find(item_id)
        del self._items[item_id]

    def find_spoken(self, item_id: str | None, response_id: str | None) -> OmniItem | None:
        """The assistant's item of an acknowledgement; the newest if none is named. Raises: ApiError."""
        named = item_id or (f"item_{response_id}" if response_id else None)
        if named is None:
            spoken = (item for item in reversed(self._items.values()) if item.role == "assistant")
            return next(spoken, None)
        if response_id and item_id and item_id != f"item_{response_id}":
            text = f"item_id: expected item_{response_id[:MAX_ID]}, got {item_id[:MAX_ID]}"
            raise ApiError(400, text, param="item_id", code="playback_item_mismatch")
        item = self._items.get(named)
        if item is None or item.role != "assistant":
            text = f"item_id: expected an item of a response, got {named[:MAX_ID]}"
            raise ApiError(404, text, param="item_id", code="playback_item_not_found")
        return item

    def history(self, *, is_heard_only: bool) -> list[InsertText]:
        """The newest texts, for a context that begins again.

        is_heard_only: of what was said, only what the client has acknowledged.
        """
        texts: list[InsertText] = []
        for item in self._items.values():
            if item.role == "assistant":
                said = item.heard(item.playback.committed_ms) if is_heard_only else item.transcript
                if said:
                    texts.append(said_text(said))
            elif item.text:
                texts.append(InsertText(text=item.text, role=item.role))
        return newest_texts(texts)
