"""Settings of the gateway's tests."""

import pytest

from tests.server.shared_validators import share_response_fields_and_paths, share_validators

share_validators()
share_response_fields_and_paths()


@pytest.fixture(autouse=True)
def poll_workers_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tests wait for the next health poll."""
    monkeypatch.setattr("server.health_watch.POLL_S", 0.1)
