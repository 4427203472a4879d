"""TrackPlayback by the server: its events, and the part of an item that counts as heard."""

from server.doors.realtime.events.client_events import ContentPart
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.items import Conversation
from server.doors.realtime.playback import TrackPlayback
from server.doors.realtime.responses import COMPLETED, RealtimeResponse, ResponseShape, cancelled

SECOND = bytes(48_000)  # PCM16 at 24 kHz


class Track:
    """Records its calls. calls: name and arguments of each; sound as its length in ms."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, float]] = []

    def play(self, number: int, pcm16: bytes) -> None:
        self.calls.append(("play", number, len(pcm16) / 48))

    def end(self, number: int) -> None:
        self.calls.append(("end", number, 0))

    def clear(self) -> None:
        self.calls.append(("clear", 0, 0))


class Played:
    """A playback with a log of its events."""

    def __init__(self) -> None:
        self.log: list[dict[str, object]] = []
        self.track, self.conversation = Track(), Conversation()
        self.send = EventSender(self.log.append)
        self.playback = TrackPlayback(self.send, self.track)

    def response(self) -> RealtimeResponse:
        shape = ResponseShape("audio", "audio/pcm", "default")
        response = RealtimeResponse(self.send, self.conversation, shape, is_asked=False, playback=self.playback)
        response.begin()
        return response

    def buffer_events(self) -> list[str]:
        kinds = [str(event["type"]) for event in self.log]
        return [kind for kind in kinds if kind.startswith(("output_audio_buffer.", "conversation.item.truncated"))]


def test_sound_goes_to_the_track_and_its_reports_become_events() -> None:
    played = Played()
    for number in (1, 2):
        response = played.response()
        response.add_text("one two")
        response.add_sound(SECOND)
        response.finish(COMPLETED)
        assert played.playback.is_playing
        assert played.track.calls == [("play", number, 1000), ("end", number, 0)]
        played.playback.on_started(number)
        played.playback.on_stopped(number)
        assert not played.playback.is_playing
        assert played.buffer_events() == ["output_audio_buffer.started", "output_audio_buffer.stopped"]
        assert {event["response_id"] for event in played.log[-2:]} == {response.id}
        assert not [event for event in played.log if event["type"] == "response.output_audio.delta"]
        assert response.item.sent_ms == 1000
        played.log.clear()
        played.track.calls.clear()


def test_an_interrupted_item_ends_where_its_sound_was_sent() -> None:
    played = Played()
    response = played.response()
    response.add_text("one two")
    response.add_sound(SECOND)
    response.mark()
    played.playback.on_started(1)
    played.playback.cut()
    response.finish(cancelled("turn_detected"))
    played.playback.on_cleared(1, 500.0)
    assert played.buffer_events() == [
        "output_audio_buffer.started",
        "output_audio_buffer.cleared",
        "conversation.item.truncated",
    ]
    assert played.log[-1]["audio_end_ms"] == 500 and played.log[-1]["item_id"] == response.item.id
    assert response.item.parts == [ContentPart(type="output_audio", transcript="one")]
    assert not played.playback.is_playing
    played.playback.on_stopped(1)  # was on its way when the track was cleared
    assert played.buffer_events()[-1] == "conversation.item.truncated"


def test_a_cut_response_stays_silent_and_the_next_one_plays() -> None:
    played = Played()
    response = played.response()
    response.add_sound(SECOND)
    played.playback.cut()
    played.playback.on_cleared(1, 0.0)
    response.add_sound(SECOND)
    response.finish(cancelled("client_cancelled"))
    played.response().add_sound(SECOND)
    assert played.track.calls == [("play", 1, 1000), ("clear", 0, 0), ("play", 2, 1000)]


def test_clearing_an_empty_buffer_is_answered_at_once() -> None:
    played = Played()
    played.playback.cut()
    assert played.buffer_events() == ["output_audio_buffer.cleared"] and not played.track.calls
