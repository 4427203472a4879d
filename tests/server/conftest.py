"""What the gateway's tests run under."""

import pytest


@pytest.fixture(autouse=True)
def workers_are_asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much of what is tested waits for the next time that a worker is asked how it is."""
    monkeypatch.setattr("server.health_watch.EVERY_S", 0.1)
