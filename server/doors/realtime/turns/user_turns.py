"""The user's turns as events and items: begin, end, commit. Contains no detector and no sound of the duplex lane."""

from collections.abc import Callable

import numpy as np

from server.doors.live.event_error import EventError
from server.doors.realtime.events.client_events import ContentPart
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.items import Conversation, ConversationItem, new_id
from server.doors.realtime.turns.input_transcriptions import InputTranscriptions

MIN_COMMIT_MS = 100


class UserTurns:
    """The turns of one session's user.

    transcripts: of what the user says. committed_ms: where the client's last commit is in the detector's sound.
    """

    def __init__(self, send: EventSender, conversation: Conversation, transcripts: InputTranscriptions):
        self._send, self._conversation, self._transcripts = send, conversation, transcripts
        self._open_id: str | None = None
        self._appended_ms = 0.0  # since the last commit
        self.committed_ms = -1.0

    def append(self, ms: float) -> None:
        """Count sound that may be committed."""
        self._appended_ms += ms

    def clear(self) -> None:
        """Drop what is not committed."""
        self._appended_ms = 0.0
        self._transcripts.clear()

    def reset(self) -> None:
        """Forget the open turn and what is not committed."""
        self._open_id, self._appended_ms = None, 0.0
        self._transcripts.clear()

    def begin(self, start_ms: int) -> None:
        """The detector hears speech."""
        self._open_id = new_id("item")
        self._transcripts.begin_turn(start_ms)
        self._send("input_audio_buffer.speech_started", audio_start_ms=start_ms, item_id=self._open_id)

    def end(self, end_ms: int) -> ConversationItem | None:
        """The detector hears silence. Returns: the user's item; None if no turn was open."""
        if self._open_id is None:
            return None
        self._send("input_audio_buffer.speech_stopped", audio_end_ms=end_ms, item_id=self._open_id)
        item = self._commit()
        self._transcripts.start(item, end_ms)
        return item

    def commit(self, take_sound: Callable[[], np.ndarray] | None, end_ms: int) -> None:
        """The client ends the turn.

        Args:
            take_sound: gives the item its sound; None: it has none.
            end_ms: of all sound so far.
        Raises: EventError.
        """
        if self._appended_ms < MIN_COMMIT_MS:
            message = f"input audio buffer: expected at least {MIN_COMMIT_MS} ms, got {self._appended_ms:.0f} ms"
            raise EventError("input_audio_buffer_commit_empty", message)
        if self._open_id is not None:
            self._send("input_audio_buffer.speech_stopped", audio_end_ms=end_ms, item_id=self._open_id)
        self.committed_ms = end_ms
        item = self._commit()
        item.sound = None if take_sound is None else take_sound()
        self._transcripts.start(item)

    def time_out(self, start_ms: int, end_ms: int) -> None:
        """The user has been quiet for the idle timeout. Times of the silence count from the first sample."""
        self._open_id = new_id("item")
        fields = {"audio_start_ms": start_ms, "audio_end_ms": end_ms, "item_id": self._open_id}
        self._send("input_audio_buffer.timeout_triggered", **fields)
        self._commit()

    def _commit(self) -> ConversationItem:
        item = ConversationItem(self._open_id or new_id("item"), role="user", parts=[ContentPart(type="input_audio")])
        self._open_id, self._appended_ms = None, 0.0
        before = self._conversation.last_id
        self._send("input_audio_buffer.committed", previous_item_id=before, item_id=item.id)
        self._conversation.insert(item)
        self._send("conversation.item.added", previous_item_id=before, item=item.described())
        self._send("conversation.item.done", previous_item_id=before, item=item.described())
        return item
