from server.peers.frames import FrameKind
from server.peers.sound_queue import PACKET_BYTES, SoundQueue
from worker.config.webrtc import WebRtcConfig

REPORTED = list[tuple[str, int, float]]


def queue(delay_ms: int = 0) -> tuple[SoundQueue, REPORTED]:
    """A queue and the list of its reports."""
    reports: REPORTED = []
    return SoundQueue(lambda kind, number, ms: reports.append((kind.name, number, ms)), delay_ms), reports


def sound(value: int, n_packets: float) -> bytes:
    return bytes([value]) * round(n_packets * PACKET_BYTES)


def test_responses_follow_each_other_without_a_gap() -> None:
    waiting, reports = queue()
    waiting.play(1, sound(1, 1.5))
    waiting.play(2, sound(2, 1.0))
    waiting.end(2)
    waiting.end(1)
    packets = [waiting.take() for _ in range(4)]
    half = PACKET_BYTES // 2
    assert packets == [sound(1, 1), sound(1, 0.5) + sound(2, 0.5), sound(2, 0.5) + bytes(half), None]
    assert reports == [("STARTED", 1, 0.0), ("STOPPED", 1, 30.0), ("STARTED", 2, 0.0), ("STOPPED", 2, 20.0)]


def test_a_response_without_more_sound_is_silent_until_it_ends() -> None:
    waiting, reports = queue()
    waiting.play(1, sound(1, 1))
    assert [waiting.take(), waiting.take()] == [sound(1, 1), None]
    waiting.play(1, sound(3, 1))
    assert waiting.take() == sound(3, 1)
    waiting.end(1)
    assert waiting.take() is None and [kind for kind, *_ in reports] == ["STARTED", "STOPPED"]


def test_the_first_sound_is_held_back_unless_the_response_has_ended() -> None:
    waiting, _ = queue(delay_ms=40)
    waiting.play(1, sound(1, 3))
    assert [waiting.take() for _ in range(4)] == [None, None, sound(1, 1), sound(1, 1)]
    waiting, _ = queue(delay_ms=40)
    waiting.play(1, sound(1, 1))
    waiting.end(1)
    assert waiting.take() == sound(1, 1)


def test_the_default_delay_leaves_no_gap_after_the_first_unit() -> None:
    """The first unit has 840 ms of sound; the rest of the response comes 1020 ms after it."""
    waiting, _ = queue(WebRtcConfig().playback_delay_ms)
    waiting.play(1, sound(1, 42))
    packets = [waiting.take() for _ in range(51)]
    waiting.play(1, sound(1, 50))
    heard = [packet is not None for packet in packets + [waiting.take() for _ in range(50)]]
    assert all(heard[heard.index(True) :]) and sum(heard) == 91, f"expected no gap, got {heard}"


def test_clearing_reports_what_was_sent_of_each_response() -> None:
    waiting, reports = queue()
    waiting.play(1, sound(1, 3))
    waiting.play(2, sound(2, 3))
    waiting.take()
    waiting.clear()
    assert reports[1:] == [(FrameKind.CLEARED.name, 1, 20.0), (FrameKind.CLEARED.name, 2, 0.0)]
    waiting.end(1)  # the gateway's, on its way
    assert waiting.take() is None and len(reports) == 3
