"""The items of a conversation: their order, their ids, and the objects that the client sees.

Contains no events and no decoding of media.
"""

import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from server.doors.live.event_error import EventError
from server.doors.realtime.events.client_events import MAX_TEXT, ContentPart, GivenItem

MAX_ITEMS = 2000
MAX_CAMERA_ITEMS = 32
MAX_ECHOED_URL = 65_536  # characters of the addresses of an item's pictures in an echo
ROOT = "root"  # as `previous_item_id`: the head of the conversation
Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
MAX_KNOWN_IDS = 4000  # of dropped camera pictures
TEXT_PARTS = ("input_text", "text", "output_text")
SOUND_PARTS = ("input_audio", "audio", "output_audio")


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(10)}"


@dataclass(frozen=True)
class HeardMark:
    """How much of an item's text belongs to its first `audio_ms` of sound."""

    audio_ms: float
    n_chars: int


@dataclass
class ConversationItem:
    """One item.

    Attributes:
        kind: `type` of the item.
        parts: content of a message; pictures and sound are kept elsewhere.
        sound: [n] float32 at 16 kHz of the user's turn, for the turn lane. pictures: encoded, for the turn lane.
        sent_ms: sound of it that was sent to the client.
        marks: of a spoken item, in order.
        heard_ms: sound of it that the user has heard; None: all.
        is_camera: a picture without text, of which only the id is kept after a while.
    """

    id: str
    kind: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "user", "assistant"] | None = None
    status: Status = "completed"
    parts: list[ContentPart] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
    sound: np.ndarray | None = None
    pictures: list[bytes] = field(default_factory=list)
    sent_ms: float = 0.0
    marks: list[HeardMark] = field(default_factory=list)
    heard_ms: int | None = None
    is_camera: bool = False

    @property
    def text(self) -> str:
        """All text and transcripts of a message."""
        return "\n".join(filter(None, (part.text or part.transcript for part in self.parts)))

    @property
    def written(self) -> str:
        """All text of a message, without transcripts of sound."""
        return "\n".join(part.text for part in self.parts if part.text)

    def set_transcript(self, text: str) -> None:
        """Give the sound of the user's turn its words."""
        self.parts = [part.model_copy(update={"transcript": text}) for part in self.parts]

    def described(self) -> Json:
        """The item as the client sees it: without sound, and without long pictures."""
        shown: Json = {"id": self.id, "object": "realtime.item", "type": self.kind, "status": self.status}
        if self.kind == "message":
            return {**shown, "role": self.role, "content": [_described(part) for part in self.parts]}
        shown["call_id"] = self.call_id
        if self.kind == "function_call":
            return {**shown, "name": self.name, "arguments": self.arguments or ""}
        return {**shown, "output": self.output}

    def cut(self, audio_ms: int) -> None:
        """Keep the part of the transcript that belongs to the first `audio_ms` of its sound, also of what follows."""
        self.heard_ms = audio_ms
        marks = [mark for mark in self.marks if mark.audio_ms <= audio_ms]
        for index, part in enumerate(self.parts):
            if part.transcript is not None:
                kept = heard_text(part.transcript, self.marks, audio_ms)
                if len(kept) < len(part.transcript):
                    marks.append(HeardMark(audio_ms, len(kept)))
                self.parts[index] = part.model_copy(update={"transcript": kept})
        self.marks = marks


def _described(part: ContentPart) -> Json:
    shown: Json = {"type": part.type}
    if part.type in TEXT_PARTS:
        shown["text"] = part.text or ""
    elif part.type == "output_audio":
        shown["transcript"] = part.transcript or ""
    elif part.type in SOUND_PARTS:
        shown["transcript"] = part.transcript
    else:
        if part.image_url is not None:
            shown["image_url"] = part.image_url
        shown["detail"] = part.detail or "auto"
    return shown


def _kept(part: ContentPart, role: str, room: int) -> ContentPart:
    """The part as it is kept: in the spelling of its role, without sound, and without a picture above `room`."""
    is_long = part.image_url is not None and len(part.image_url) > room
    changes: Json = {"audio": None, "image_url": None if is_long else part.image_url}
    side = "output" if role == "assistant" else "input"
    if part.type in TEXT_PARTS:
        changes["type"] = f"{side}_text"
    elif part.type in SOUND_PARTS:
        changes["type"] = f"{side}_audio"
    return part.model_copy(update=changes)


def heard_text(transcript: str, marks: list[HeardMark], audio_ms: float) -> str:
    """The words of a transcript that were heard after `audio_ms` of its sound, cut after a whole word."""
    before = HeardMark(0.0, 0)
    for mark in marks:
        if mark.audio_ms > audio_ms:
            share = (audio_ms - before.audio_ms) / (mark.audio_ms - before.audio_ms)
            n_chars = before.n_chars + int(share * (mark.n_chars - before.n_chars))
            break
        before = mark
    else:
        n_chars = before.n_chars if marks and before.audio_ms > audio_ms else len(transcript)
    if n_chars >= len(transcript) or transcript[n_chars].isspace():
        return transcript[:n_chars]
    # Scripts without spaces between words are cut at the character.
    end = max(transcript.rfind(" ", before.n_chars, n_chars), before.n_chars)
    return transcript[: end if " " in transcript[before.n_chars :] else n_chars].rstrip()


def item_of(given: GivenItem) -> ConversationItem:
    """The item that a client creates. Raises: EventError."""
    item_id = given.id or new_id("item")
    if given.type == "message":
        if given.role is None:
            raise EventError("missing_required_parameter", "item.role: expected a role, got none", "item.role")
        n_chars = sum(len(part.text or part.transcript or "") for part in given.content)
        if n_chars > MAX_TEXT:
            message = f"item.content: expected at most {MAX_TEXT} characters, got {n_chars}"
            raise EventError("invalid_value", message, "item.content")
        parts, room = [], MAX_ECHOED_URL
        for part in given.content:
            parts.append(_kept(part, given.role, room))
            room -= len(parts[-1].image_url or "")
        is_camera = bool(parts) and all(part.type == "input_image" for part in parts)
        return ConversationItem(item_id, "message", given.role, parts=parts, is_camera=is_camera)
    if given.call_id is None and given.type == "function_call_output":
        raise EventError("missing_required_parameter", "item.call_id: expected an id, got none", "item.call_id")
    if given.type == "function_call" and given.name is None:
        raise EventError("missing_required_parameter", "item.name: expected a name, got none", "item.name")
    return ConversationItem(
        item_id,
        given.type,
        call_id=given.call_id or new_id("call"),
        name=given.name,
        arguments=given.arguments,
        output=given.output or "",
    )


class Conversation:
    """The items in their order."""

    def __init__(self) -> None:
        self.id = new_id("conv")
        self._order: list[str] = []
        self._items: dict[str, ConversationItem] = {}
        self._camera: deque[str] = deque()
        self._dropped: dict[str, str | None] = {}  # ids of old pictures, which clients still name -> id before

    def __iter__(self) -> Iterator[ConversationItem]:
        return (self._items[item_id] for item_id in self._order)

    def __len__(self) -> int:
        return len(self._order)

    def find(self, item_id: str, code: str, param: str = "item_id") -> ConversationItem:
        """The item with this id. Raises: EventError with this code. param: the field with the id."""
        if item_id not in self._items:
            raise EventError(code, f"{param}: expected the id of an item, got {item_id[:60]}", param)
        return self._items[item_id]

    def __contains__(self, item: object) -> bool:
        return isinstance(item, ConversationItem) and self._items.get(item.id) is item

    def id_before(self, item: ConversationItem) -> str | None:
        """The id of the item before this one; None: it is the first."""
        at = self._order.index(item.id)
        return self._order[at - 1] if at else None

    @property
    def last_id(self) -> str | None:
        return self._order[-1] if self._order else None

    def check_new(self, item: ConversationItem, previous_id: str | None) -> None:
        """Raises: EventError if the client may not add the item."""
        self._check_place(item, previous_id)
        if len(self._order) >= MAX_ITEMS:
            raise EventError("too_many_items", f"items: expected at most {MAX_ITEMS}, got one more")

    def _check_place(self, item: ConversationItem, previous_id: str | None) -> None:
        if item.id in self._items:
            message = f"item.id: expected a new id, got {item.id}, which another item has"
            raise EventError("item_create_duplicate_item_id", message, "item.id")
        if previous_id not in (None, ROOT) and previous_id not in self._items and previous_id not in self._dropped:
            message = f"previous_item_id: expected the id of an item, got {str(previous_id)[:60]}"
            raise EventError("item_create_invalid_previous_item_id", message, "previous_item_id")
        if item.kind == "function_call_output":
            calls = (one.call_id for one in self._items.values() if one.kind == "function_call")
            if item.call_id not in calls:
                message = f"item.call_id: expected the id of a function call, got {item.call_id}"
                raise EventError("invalid_tool_call_id", message, "item.call_id")

    def insert(self, item: ConversationItem, previous_id: str | None = None) -> str | None:
        """Add an item after another one; None: at the end. Returns: the id before it. Raises: EventError.

        Items of the server are added beyond the limit of `check_new`: they belong to what is said already.
        """
        self._check_place(item, previous_id)
        while previous_id in self._dropped:
            previous_id = self._dropped[previous_id] or ROOT
        if previous_id is None:
            at = len(self._order)
        else:
            at = 0 if previous_id == ROOT else self._order.index(previous_id) + 1
        before = self._order[at - 1] if at else None
        self._dropped.pop(item.id, None)
        self._order.insert(at, item.id)
        self._items[item.id] = item
        if item.is_camera:
            self._camera.append(item.id)
            while len(self._camera) > MAX_CAMERA_ITEMS:
                self._drop(self._camera[0])
        return before

    def _drop(self, item_id: str) -> None:
        """Forget a picture but for its id."""
        self._dropped[item_id] = self.id_before(self._items[item_id])
        self._remove(item_id)
        while len(self._dropped) > MAX_KNOWN_IDS:
            del self._dropped[next(iter(self._dropped))]

    def delete(self, item_id: str) -> None:
        """Raises: EventError."""
        if item_id in self._dropped:
            return
        self.find(item_id, "item_delete_invalid_item_id")
        self._remove(item_id)

    def _remove(self, item_id: str) -> None:
        item = self._items[item_id]
        before = self.id_before(item)
        self._order.remove(item_id)
        for dropped, known in self._dropped.items():
            if known == item_id:
                self._dropped[dropped] = before
        del self._items[item_id]
        if item.is_camera:
            self._camera.remove(item_id)
