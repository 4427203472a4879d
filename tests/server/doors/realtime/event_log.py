"""The order of a Realtime session's events: a state machine that fails at the first event that breaks a rule.

Every event must have its public shape (`event_schema`). A response is open from `response.created` to `response.done`,
at most one of the conversation at a time; its items, parts and deltas come in the order that stock clients rely on.
"""

import base64
from dataclasses import dataclass, field

from tests.server.doors.realtime import event_schema as shapes
from tests.server.doors.realtime.event_schema import AnyEvent, Json, checked_event

MAX_FRAME = 2**20  # bytes that every stock client reads
MAX_DELTA_MS = 250
BYTES_PER_MS = {"audio/pcm": 48, "audio/pcmu": 8, "audio/pcma": 8}


@dataclass
class OutputItem:
    """An item of an open response. step: last event of its end."""

    has_part: bool = False
    text: str = ""
    step: str = ""
    is_done: bool = False


@dataclass
class OpenResponse:
    """A response between its first and its last event."""

    shape: shapes.Response
    items: dict[str, OutputItem] = field(default_factory=dict)


# After the deltas, in this order.
AUDIO_END = ["", "response.output_audio.done", "response.output_audio_transcript.done", "response.content_part.done"]
TEXT_END = ["", "response.output_text.done", "response.content_part.done"]


class EventLog:
    """All events of one session so far. items: ids of the conversation, in order."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.roots_due = 0  # items that the client puts at the head
        self._ids: set[str] = set()
        self._open: dict[str, OpenResponse] = {}
        self._over: set[str] = set()
        self._turns: dict[str, AnyEvent] = {}  # of the user, with their last events
        self._n = 0

    def take(self, given: Json, n_bytes: int = 0) -> AnyEvent:
        """Check the next event. n_bytes: length of its frame. Raises: ValidationError; AssertionError."""
        event = checked_event(given)
        assert n_bytes < MAX_FRAME, f"expected a frame below {MAX_FRAME} bytes, got {n_bytes} of {event.type}"
        assert event.event_id not in self._ids, f"expected a new event_id, got {event.event_id} again"
        self._ids.add(event.event_id)
        is_first, self._n = self._n == 0, self._n + 1
        assert (event.type == "session.created") == is_first, f"expected session.created once, first; got {event.type}"
        if isinstance(event, shapes.ResponseEvent):
            self._on_response(event)
        elif isinstance(event, shapes.OfResponse):
            self._on_part_of_response(event)
        else:
            self._on_conversation(event)
        return event

    # --- the conversation ----------------------------------------------------------------------

    def _on_conversation(self, event: AnyEvent) -> None:
        match event:
            case shapes.SpeechStarted():
                assert event.item_id not in self._turns, "expected a new item of the user"
                self._turns[event.item_id] = event
            case shapes.SpeechStopped():
                started = self._turns[event.item_id]
                assert isinstance(started, shapes.SpeechStarted) and started.audio_start_ms < event.audio_end_ms, event
                self._turns[event.item_id] = event
            case shapes.TimeoutTriggered():
                assert event.audio_start_ms <= event.audio_end_ms, event
                self._turns[event.item_id] = event
            case shapes.Committed():
                assert event.previous_item_id == (self.items[-1] if self.items else None), event
                self._turns[event.item_id] = event
            case shapes.ItemEvent(type="conversation.item.added"):
                self._add(event)
            case shapes.ItemEvent():
                assert event.item.id in self.items, f"expected an item that was added, got {event.item.id}"
                assert event.item.status != "in_progress", event
            case shapes.ItemDeleted():
                self.items = [one for one in self.items if one != event.item_id]
            case shapes.TranscriptionDelta() | shapes.TranscriptionCompleted() | shapes.TranscriptionFailed():
                assert event.item_id in self.items, f"expected an item that was added, got {event.item_id}"
            case _:
                pass

    def _add(self, event: shapes.ItemEvent) -> None:
        item, before = event.item, event.previous_item_id
        assert item.id not in self.items, f"expected a new item, got {item.id} again"
        if before is None and self.items:
            assert self.roots_due, "expected a predecessor: null stands for the head"
            self.roots_due -= 1
        else:
            assert before is None or before in self.items, f"expected an item before it, got {before}"
        is_servers = item.status == "in_progress" or isinstance(self._turns.get(item.id), shapes.Committed)
        assert not is_servers or before == (self.items[-1] if self.items else None), (
            f"expected {self.items[-1:]}, got {before}"
        )
        self.items.insert(0 if before is None else self.items.index(before) + 1, item.id)

    # --- responses -----------------------------------------------------------------------------

    def _on_response(self, event: shapes.ResponseEvent) -> None:
        response = event.response
        if event.type == "response.created":
            assert response.id not in self._open and response.id not in self._over, f"{response.id} begins again"
            others = [one for one in self._open.values() if one.shape.conversation_id is not None]
            assert response.conversation_id is None or not others, "expected one response of the conversation at a time"
            assert (response.status, response.status_details, response.usage) == ("in_progress", None, None), response
            assert not response.output, response
            self._open[response.id] = OpenResponse(response)
            return
        opened = self._open.pop(response.id)
        self._over.add(response.id)
        assert all(item.is_done for item in opened.items.values()), "expected all items to be done"
        assert [item.id for item in response.output] == list(opened.items), response.output
        assert response.status_details is not None and response.status_details.type == response.status, response
        assert response.metadata == opened.shape.metadata and response.audio == opened.shape.audio, response
        used = response.usage
        assert used is not None and used.total_tokens == used.input_tokens + used.output_tokens, used
        details, made = used.input_token_details, used.output_token_details
        assert used.input_tokens == details.text_tokens + details.audio_tokens + details.image_tokens, used
        assert used.output_tokens == made.text_tokens + made.audio_tokens, used

    def _on_part_of_response(self, event: shapes.OfResponse) -> None:
        assert event.response_id in self._open, f"expected an open response, got {event}"
        opened = self._open[event.response_id]
        if isinstance(event, shapes.OutputItemEvent):
            self._on_output_item(opened, event)
            return
        assert isinstance(event, shapes.OfPart | shapes.ArgumentsDelta | shapes.ArgumentsDone)
        item = opened.items[event.item_id]
        assert list(opened.items).index(event.item_id) == event.output_index and not item.is_done, event
        if isinstance(event, shapes.ArgumentsDelta):
            item.text += event.delta
        elif isinstance(event, shapes.ArgumentsDone):
            assert event.arguments == item.text, event
        else:
            _check_part(opened.shape, item, event)

    def _on_output_item(self, opened: OpenResponse, event: shapes.OutputItemEvent) -> None:
        shown = event.item
        if event.type == "response.output_item.added":
            assert event.output_index == len(opened.items) and shown.id not in opened.items, event
            assert shown.status == "in_progress", event
            is_empty = not (shown.content if isinstance(shown, shapes.AssistantMessage) else shown.arguments)
            assert is_empty, event
            opened.items[shown.id] = OutputItem()
            return
        item = opened.items[shown.id]
        is_call = isinstance(shown, shapes.FunctionCall)
        assert is_call or item.step == "response.content_part.done", f"expected the end of its part, got {item.step}"
        assert shown.status in ("completed", "incomplete") and not item.is_done, event
        item.is_done = True


def _check_part(shape: shapes.Response, item: OutputItem, event: shapes.OfPart) -> None:
    is_spoken = shape.output_modalities == ["audio"]
    steps = AUDIO_END if is_spoken else TEXT_END
    if isinstance(event, shapes.PartEvent):
        assert isinstance(event.part, shapes.AudioPart) == is_spoken, event
    match event:
        case shapes.PartEvent(type="response.content_part.added"):
            assert not item.has_part, event
            item.has_part = True
            return
        case shapes.Delta():
            assert item.has_part and item.step == "", f"expected a delta between the ends of a part, got {event.type}"
            assert (event.type == "response.output_text.delta") != is_spoken, event
            if event.type == "response.output_audio.delta":
                n, form = len(base64.b64decode(event.delta, validate=True)), shape.audio.output.format.type
                assert n <= MAX_DELTA_MS * BYTES_PER_MS[form], f"expected {MAX_DELTA_MS} ms at most, got {n} bytes"
                assert form != "audio/pcm" or n % 2 == 0, f"expected whole samples, got {n} bytes"
            else:
                item.text += event.delta
            return
        case shapes.TranscriptDone():
            assert event.transcript == item.text, event
        case shapes.TextDone():
            assert event.text == item.text, event
        case shapes.PartEvent(part=part):
            said = part.transcript if isinstance(part, shapes.AudioPart) else part.text
            assert said == item.text, event
        case _:
            pass
    assert steps[steps.index(item.step) + 1 :][:1] == [event.type], f"expected what follows {item.step}, got {event}"
    item.step = event.type  # type: ignore[attr-defined]
