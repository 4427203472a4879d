"""The events of a vLLM-Omni client about items: inserted texts, retrieval, deletion, truncation, playback."""

from collections.abc import Callable
from typing import Literal

from server.doors.core.request_fields import RequestFields, item_fields
from server.doors.dialects.vllm_omni.events import OmniEvents
from server.doors.dialects.vllm_omni.items import MAX_ID, OmniItem, OmniItems, new_item_id
from server.doors.errors import ApiError, invalid
from server.doors.live.unit_lane import MAX_TEXTS, LiveLane
from worker.protocol.messages import Error
from worker.protocol.text_messages import InsertText

MAX_TEXT = 65_536  # characters


class OmniConversation:
    """The items of one session.

    Args:
        send: sends events.
        lane: gets the inserted texts.
        on_deleted: called with the id of an item that the client deletes.
    """

    def __init__(self, send: OmniEvents, lane: LiveLane, on_deleted: Callable[[str], None]):
        self._send, self._lane, self._on_deleted = send, lane, on_deleted
        self.items = OmniItems()
        self._inserting: set[str] = set()  # ids of items whose texts are not in the context yet

    def insert_text(self, message: InsertText, on_done: Callable[[Error | None], None]) -> None:
        """Insert a text before the next unit. Raises: ApiError when too many wait."""
        if (n := self._lane.n_texts) >= MAX_TEXTS:
            raise invalid("item", expected=f"at most {MAX_TEXTS} texts that wait", got=n, code="too_many_texts")
        self._lane.insert(message, is_said=False, on_done=on_done)

    def report(self, error: Error | None) -> None:
        """Send an error of the worker, if there is one."""
        if error is not None:
            self._send.error(ApiError(400, error.error, code=str(error.code)), None)

    # --- events --------------------------------------------------------------------------------

    def create(self, given: RequestFields) -> None:
        """Insert the text of an item. Raises: ApiError."""
        group = given.group("item")
        if group is None:
            raise invalid("item", expected="an object", got="none")
        group.choice("type", ("message",), "message")
        role = group.choice("role", ("user", "system"), "user")
        content = group.items("content")
        texts = [_text_of(part, index) for index, part in enumerate(content)]
        item_id = group.text("id", "")[:MAX_ID] or new_item_id()
        self._insert(item_id, "system" if role == "system" else "user", texts)

    def append_text(self, given: RequestFields) -> None:
        """Insert a text of the user. Raises: ApiError."""
        self._insert(new_item_id(), "user", [given.text("text")])

    def _insert(self, item_id: str, role: Literal["user", "system"], texts: list[str]) -> None:
        text, content = "\n".join(texts), [{"type": "input_text", "text": one} for one in texts]
        if not 0 < len(text) <= MAX_TEXT:
            raise invalid("item.content", expected=f"1 to {MAX_TEXT} characters", got=len(text))
        if self.items.has(item_id) or item_id in self._inserting:
            raise invalid("item.id", expected="a new id", got=item_id, code="item_create_duplicate_item_id")
        item = OmniItem(item_id, role, content, text=text)

        def done(error: Error | None) -> None:
            self._inserting.discard(item_id)
            if error is not None:
                self.report(error)
                return
            before = self.items.add(item)
            for kind in ("conversation.item.added", "conversation.item.done"):
                self._send(kind, previous_item_id=before, item=item.shown())

        self.insert_text(InsertText(text=text, role=role), done)
        self._inserting.add(item_id)

    def retrieve(self, given: RequestFields) -> None:
        """Send an item. Raises: ApiError."""
        self._send("conversation.item.retrieved", item=self._found(given).shown())

    def delete(self, given: RequestFields) -> None:
        """Forget an item. Raises: ApiError."""
        item = self._found(given)
        if item.status == "in_progress":
            raise invalid("item_id", expected="an item that is complete", got="one that is being spoken")
        self.items.delete(item.id)
        self._on_deleted(item.id)
        details = {"type": "conversation.item.deleted", "item_id": item.id, "deleted": True}
        self._send("conversation.item.deleted", item_id=item.id, event=details)

    def truncate(self, given: RequestFields) -> None:
        """Cut an item of the assistant to what was heard. Raises: ApiError."""
        item = self._found(given)
        index = given.whole("content_index", 0) or 0
        ms = given.whole("audio_end_ms", 0)
        if item.role != "assistant" or index:
            raise invalid("item_id", expected="the first part of an item of the assistant", got=f"part {index}")
        if ms is None or ms > item.playback.sent_ms + 1:
            raise invalid("audio_end_ms", expected=f"at most {item.playback.sent_ms:.0f}", got=ms)
        item.cut(ms)
        place = {"item_id": item.id, "content_index": 0, "audio_end_ms": ms}
        details = {"type": "conversation.item.truncated", **place, "truncated": True}
        self._send("conversation.item.truncated", **place, event=details)

    def acknowledge(self, given: RequestFields, epoch: int) -> None:
        """Record what the client has played of a response. Raises: ApiError."""
        played_ms = given.number("played_ms", 0, 1e9) or 0.0
        committed_ms = given.number("committed_ms", 0, 1e9)
        is_cut = given.flag("truncate")
        item = self.items.find_spoken(given.text("item_id", "") or None, given.text("response_id", "") or None)
        shown: dict[str, int] = {}
        if item is not None:
            item.playback.acknowledge(played_ms, committed_ms)
            if is_cut:
                item.cut(item.playback.committed_ms)
            shown = item.playback.shown()
        details = {
            "type": "playback.acknowledged",
            "epoch": epoch,
            "item_id": None if item is None else item.id,
            "played_ms": round(played_ms),
            "committed_ms": round(played_ms if committed_ms is None else committed_ms),
            "truncate": is_cut,
            "playback": shown,
            "history_committed": item is not None and item.status != "in_progress",
        }
        self._send("playback.acknowledged", event=details, playback=shown)

    def _found(self, given: RequestFields) -> OmniItem:
        item_id = given.text("item_id", "")
        if not item_id:
            raise ApiError(400, "item_id: expected a value, got none", param="item_id", code="missing_item_id")
        return self.items.find(item_id)


def _text_of(part: object, index: int) -> str:
    fields = item_fields(part, f"item.content[{index}]")
    fields.choice("type", ("input_text", "text"))
    return fields.text("text")
