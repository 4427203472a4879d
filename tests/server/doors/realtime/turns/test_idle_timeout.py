from server.doors.realtime.turns.idle_timeout import IdleTimeout


def test_the_timeout_counts_from_the_end_of_playback() -> None:
    timeout = IdleTimeout()
    assert timeout.due_at(5000) is None, "expected no timeout before the first response"
    timeout.record_response(100.0)
    assert timeout.due_at(5000) == 105.0 and timeout.due_at(None) is None


def test_speech_stops_it_until_the_next_response() -> None:
    timeout = IdleTimeout()
    timeout.record_response(100.0)
    timeout.record_speech()
    assert timeout.due_at(5000) is None
    timeout.record_response(120.0)
    assert timeout.due_at(5000) == 125.0
