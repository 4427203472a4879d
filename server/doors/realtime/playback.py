"""Sound that the server plays itself, on the track of a call: its events, and what the user has heard of each item."""

from collections import OrderedDict
from itertools import count
from typing import Protocol

from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.responses import RealtimeResponse


class SoundTrack(Protocol):
    """The outgoing sound of a call. It is sent at the pace of the clock, one response after the other.

    The sender of the track reports to `TrackPlayback` what was sent.
    """

    def play(self, number: int, pcm16: bytes) -> None:
        """Add sound of a response. number: of the response, rising. pcm16: at 24 kHz."""

    def end(self, number: int) -> None:
        """The response has no more sound."""

    def clear(self) -> None:
        """Drop all sound that was not sent."""


class TrackPlayback:
    """The sound of one session's responses on a track."""

    def __init__(self, send: EventSender, track: SoundTrack):
        self._send, self._track = send, track
        self._numbers = count(1)
        self._playing: OrderedDict[int, RealtimeResponse] = OrderedDict()  # not reported as stopped or cleared
        self._cut: set[str] = set()  # ids of open responses whose sound is dropped
        self._last_id = ""

    @property
    def is_playing(self) -> bool:
        """Whether sound is sent, or waits for its time."""
        return bool(self._playing)

    def add(self, response: RealtimeResponse, pcm16: bytes) -> None:
        """Play sound after all earlier sound, unless the response was cut."""
        if response.id in self._cut:
            return
        number = next((number for number, one in self._playing.items() if one is response), None)
        if number is None:
            number = next(self._numbers)
            self._playing[number] = response
        self._last_id = response.id
        self._track.play(number, pcm16)

    def finish(self, response: RealtimeResponse) -> None:
        """The response is done."""
        self._cut.discard(response.id)
        for number, one in self._playing.items():
            if one is response:
                self._track.end(number)

    def cut(self) -> None:
        """Drop the sound that was not sent, and what follows of the same responses."""
        if not self._playing:
            self._send("output_audio_buffer.cleared", response_id=self._last_id)
            return
        self._cut |= {one.id for one in self._playing.values() if not one.is_over}
        self._track.clear()

    # --- what the sender of the track reports --------------------------------------------------

    def on_started(self, number: int) -> None:
        """The first sound of a response is sent."""
        if number in self._playing:
            self._send("output_audio_buffer.started", response_id=self._playing[number].id)

    def on_stopped(self, number: int) -> None:
        """All sound of a response that has ended was sent."""
        response = self._playing.pop(number, None)
        if response is not None:
            self._send("output_audio_buffer.stopped", response_id=response.id)

    def on_cleared(self, number: int, sent_ms: float) -> None:
        """The rest of a response's sound was dropped. sent_ms: its sound that was sent."""
        response = self._playing.pop(number, None)
        if response is None:
            return
        self._send("output_audio_buffer.cleared", response_id=response.id)
        item, end_ms = response.item, int(sent_ms)
        if response.shape.in_conversation and end_ms < item.sent_ms:
            item.cut(end_ms)
            self._send("conversation.item.truncated", item_id=item.id, content_index=0, audio_end_ms=end_ms)
