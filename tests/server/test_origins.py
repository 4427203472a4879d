"""Allowed origins: programs, pages of this server, configured origins; and DNS rebinding, which is refused."""

import pytest
from starlette.requests import HTTPConnection

from server.origins import Origins


def request_from(origin: str | None, host: str | None) -> HTTPConnection:
    given = {"origin": origin, "host": host}
    headers = [(name.encode(), value.encode()) for name, value in given.items() if value is not None]
    return HTTPConnection({"type": "http", "headers": headers})


@pytest.mark.parametrize(
    ("origin", "host", "on_loopback", "remote"),
    [
        (None, "evil.example:8006", True, True),
        ("http://localhost:8006", "localhost:8006", True, True),
        ("http://LOCALHOST:8006", "localhost:8006", True, True),
        ("http://127.0.0.1:8006", "127.0.0.1:8006", True, True),
        ("http://[::1]:8006", "[::1]:8006", True, True),
        ("https://talk.example.org", "talk.example.org", False, True),
        ("http://evil.example:8006", "evil.example:8006", False, True),
        ("http://192.0.2.7:8006", "192.0.2.7:8006", False, True),
        ("http://localhost:8006", "localhost:9000", False, False),
        ("http://evil.example", "localhost:8006", False, False),
        ("null", "localhost:8006", False, False),
        ("http://localhost:8006", None, False, False),
        ("http://[::1", "[::1", False, False),
        ("", "", False, False),
    ],
)
def test_allows_programs_and_own_pages(origin: str | None, host: str | None, on_loopback: bool, remote: bool) -> None:
    """on_loopback, remote: expected result of a server that listens on a loopback address, or on others."""
    got = tuple(
        Origins((), loopback_only=loopback_only).allows(request_from(origin, host)) for loopback_only in (True, False)
    )
    assert got == (on_loopback, remote), f"{origin} at {host}: expected {(on_loopback, remote)}, got {got}"


@pytest.mark.parametrize("allowed", ["https://talk.example.org", "https://TALK.example.org/", "*"])
def test_allows_configured_origins(allowed: str) -> None:
    request = request_from("https://talk.example.org", "localhost:8006")
    assert Origins((allowed,), loopback_only=True).allows(request)
    assert not Origins(("https://other.example.org",), loopback_only=True).allows(request)
