"""One response and its events, in the order that stock clients rely on. Contains no decision when it begins or ends."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from server.doors.core.event_writer import Base64Text
from server.doors.core.tool_calls import FoundCall
from server.doors.live.event_error import EventError
from server.doors.live.sound.wire_sound import WireFormat
from server.doors.realtime.events.client_events import ContentPart
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.items import Conversation, ConversationItem, HeardMark, new_id
from server.doors.realtime.session_config import RealtimeConfig
from server.doors.realtime.usage import TokenUsage

Json = dict[str, Any]
DELTA_MS = 250  # of sound in one event
CancelReason = Literal["turn_detected", "client_cancelled"]
BYTES_PER_MS: dict[WireFormat, int] = {"audio/pcm": 48, "audio/pcmu": 8, "audio/pcma": 8}


@dataclass(frozen=True)
class ResponseEnd:
    """How a response ended. error: sent before it."""

    status: Literal["completed", "cancelled", "incomplete", "failed"]
    details: Json = field(default_factory=dict)
    error: EventError | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the client gets all sound that was made."""
        return self.status in ("completed", "incomplete")

    def status_details(self) -> Json:
        return {"type": self.status, **self.details}


COMPLETED = ResponseEnd("completed")
TOO_LONG = ResponseEnd("incomplete", {"reason": "max_output_tokens"})


def context_full() -> EventError:
    """The error of a conversation that has no room left."""
    return EventError("context_length_exceeded", "The conversation fills the context, and its truncation is disabled")


def out_of_room() -> ResponseEnd:
    """The end of a response that has no room left."""
    return ResponseEnd("incomplete", {"reason": "max_output_tokens"}, context_full())


def cancelled(reason: CancelReason) -> ResponseEnd:
    return ResponseEnd("cancelled", {"reason": reason})


def failed(code: str, message: str) -> ResponseEnd:
    return ResponseEnd("failed", {"error": {"type": "server_error", "code": code, "message": message}})


@dataclass(frozen=True)
class ResponseShape:
    """What a response is made of, fixed when it begins.

    in_conversation: its item joins the conversation.
    """

    modality: Literal["audio", "text"]
    form: WireFormat
    voice: str
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    in_conversation: bool = True
    speed: float = 1.0

    @classmethod
    def of(
        cls, config: RealtimeConfig, metadata: dict[str, str] | None, *, in_conversation: bool = True
    ) -> "ResponseShape":
        """The shape of a response with these settings."""
        limit = config.max_output_tokens
        made = (config.modality, config.output_format, config.voice, limit, metadata, in_conversation)
        return cls(*made, speed=config.speed)


class ResponsePlayback(Protocol):
    """Plays the sound of responses where the server owns the playback."""

    def add(self, response: "RealtimeResponse", pcm16: bytes) -> None:
        """Play sound of the response."""

    def finish(self, response: "RealtimeResponse") -> None:
        """The response is done."""


class RealtimeResponse:
    """A response: at most one message of the assistant, and calls of functions.

    Args:
        send: sends events.
        conversation: gets the response's item.
        shape: what the response is made of.
        is_asked: the client asked for it.
        playback: gets its sound; None: the client does, in events.
    """

    def __init__(
        self,
        send: EventSender,
        conversation: Conversation,
        shape: ResponseShape,
        *,
        is_asked: bool,
        playback: ResponsePlayback | None = None,
    ):
        self.id = new_id("resp")
        self.shape, self.is_asked = shape, is_asked
        self.item = ConversationItem(new_id("item"), role="assistant", status="in_progress")
        self.usage = TokenUsage()
        self.is_over = self.is_chat = False  # a chat answers it, whatever the lane
        self.first_sound_at: float | None = None
        self._send, self._conversation, self._playback = send, conversation, playback
        self._text = ""
        self._message: Literal["none", "open", "over"] = "none"
        self._output: list[ConversationItem] = []
        self._ids = {"response_id": self.id, "item_id": self.item.id, "output_index": 0, "content_index": 0}

    @property
    def text(self) -> str:
        """The text so far."""
        return self._text

    @property
    def sent_ms(self) -> float:
        """Sound sent so far."""
        return self.item.sent_ms

    @property
    def _is_spoken(self) -> bool:
        return self.shape.modality == "audio"

    def begin(self, *, with_message: bool = True) -> None:
        """Send the events up to the first content. with_message: false if the response may consist of calls alone."""
        self._send("response.created", response=self._described("in_progress"))
        if with_message:
            self._begin_message()

    def _begin_message(self) -> None:
        if self._message != "none":
            return
        self._message = "open"
        self._ids["output_index"] = len(self._output)
        self._add_item(self.item)
        part = {"type": "audio", "transcript": ""} if self._is_spoken else {"type": "text", "text": ""}
        self._send("response.content_part.added", **self._ids, part=part)

    def _add_item(self, item: ConversationItem) -> None:
        shown = item.described()
        self._send("response.output_item.added", response_id=self.id, output_index=len(self._output), item=shown)
        self._output.append(item)
        if self.shape.in_conversation:
            before = self._conversation.insert(item)
            self._send("conversation.item.added", previous_item_id=before, item=shown)

    def _finish_item(self, item: ConversationItem) -> None:
        shown = item.described()
        if self.shape.in_conversation and item in self._conversation:  # the client may have deleted it
            self._send("conversation.item.done", previous_item_id=self._conversation.id_before(item), item=shown)
        index = self._output.index(item)
        self._send("response.output_item.done", response_id=self.id, output_index=index, item=shown)

    def add_text(self, delta: str) -> None:
        """Send more text."""
        if delta:
            self._begin_message()
            self._text += delta
            kind = "response.output_audio_transcript.delta" if self._is_spoken else "response.output_text.delta"
            self._send(kind, **self._ids, delta=delta)

    def add_sound(self, data: bytes) -> None:
        """Send more sound. data: in the output format."""
        if not data or not self._is_spoken:
            return
        self._begin_message()
        if self._playback is not None:
            self._playback.add(self, data)
        size = DELTA_MS * BYTES_PER_MS[self.shape.form]
        for start in range(0, len(data) if self._playback is None else 0, size):
            delta = Base64Text.of(data[start : start + size])
            self._send("response.output_audio.delta", **self._ids, delta=delta)
        self.item.sent_ms += len(data) / BYTES_PER_MS[self.shape.form]

    def mark(self, n_chars: int | None = None, audio_ms: float | None = None) -> None:
        """Record that the sound so far speaks the text so far.

        Args:
            n_chars: characters; None: all.
            audio_ms: sound of the model, before its speed is changed; None: all that was sent.
        """
        at = self.sent_ms if audio_ms is None else audio_ms / self.shape.speed
        length = len(self._text) if n_chars is None else n_chars
        marks = self.item.marks
        if not marks or (at > marks[-1].audio_ms and length >= marks[-1].n_chars):
            marks.append(HeardMark(at, length))

    def mark_evenly(self) -> None:
        """Record that the sound so far speaks the text so far at one pace: for text that comes before its sound."""
        self.item.marks[:] = [HeardMark(self.sent_ms, len(self._text))]

    @property
    def n_calls(self) -> int:
        """Calls of functions so far."""
        return sum(item.kind == "function_call" for item in self._output)

    def add_call(self, call: FoundCall, *, is_beside: bool = False) -> None:
        """Send a call of a function. is_beside: the message may go on after it; otherwise the call ends it."""
        if not is_beside:
            self._finish_message("completed")
        item = ConversationItem(new_id("item"), "function_call", status="in_progress", call_id=call.id, name=call.name)
        ids = {"response_id": self.id, "item_id": item.id, "output_index": len(self._output), "call_id": call.id}
        self._add_item(item)
        kind = "response.function_call_arguments"
        self._send(f"{kind}.delta", **ids, delta=call.arguments)
        self._send(f"{kind}.done", **ids, name=call.name, arguments=call.arguments)
        item.arguments, item.status = call.arguments, "completed"
        self._finish_item(item)

    def finish(self, end: ResponseEnd) -> None:
        """Send the events of the end. Nothing of the response may be sent after it."""
        self.is_over = True
        if end.error is not None:
            self._send.error(end.error)
        if not self._output:
            self._begin_message()
        self._finish_message(end.status)
        self._send("response.done", response=self._described(end.status, end))
        if self._playback is not None:
            self._playback.finish(self)

    def _finish_message(self, status: str) -> None:
        if self._message != "open":
            return
        self._message = "over"
        if self._is_spoken:
            self._send("response.output_audio.done", **self._ids)
            self._send("response.output_audio_transcript.done", **self._ids, transcript=self._text)
            part: Json = {"type": "audio", "transcript": self._text}
            content = ContentPart(type="output_audio", transcript=self._text)
        else:
            self._send("response.output_text.done", **self._ids, text=self._text)
            part = {"type": "text", "text": self._text}
            content = ContentPart(type="output_text", text=self._text)
        self._send("response.content_part.done", **self._ids, part=part)
        item = self.item
        item.parts, item.status = [content], "completed" if status == "completed" else "incomplete"
        if item.heard_ms is not None:
            item.cut(item.heard_ms)
        self._finish_item(item)

    def _described(self, status: str, end: ResponseEnd | None = None) -> Json:
        shape = self.shape
        form = {"type": shape.form, "rate": 24_000} if shape.form == "audio/pcm" else {"type": shape.form}
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": end and end.status_details(),
            "output": [] if end is None else [item.described() for item in self._output],
            "output_modalities": [shape.modality],
            "audio": {"output": {"format": form, "voice": shape.voice}},
            "conversation_id": self._conversation.id if shape.in_conversation else None,
            "max_output_tokens": shape.max_output_tokens or "inf",
            "metadata": shape.metadata,
            "usage": None if end is None else self.usage.described(),
        }
