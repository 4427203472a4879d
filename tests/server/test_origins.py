"""Who may talk: programs, our own pages, pages of allowed origins; and nobody whose name server says we are theirs."""

import pytest
from starlette.requests import HTTPConnection

from server.origins import Origins


def asked(origin: str | None, host: str | None) -> HTTPConnection:
    given = {"origin": origin, "host": host}
    headers = [(name.encode(), value.encode()) for name, value in given.items() if value is not None]
    return HTTPConnection({"type": "http", "headers": headers})


@pytest.mark.parametrize(
    ("origin", "host", "here", "anywhere"),
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
def test_own_pages(origin: str | None, host: str | None, here: bool, anywhere: bool) -> None:
    """here: of a server that only this machine reaches; anywhere: of one that others reach."""
    got = tuple(Origins((), only_here=only_here).admits(asked(origin, host)) for only_here in (True, False))
    assert got == (here, anywhere), f"{origin} at {host}: expected {(here, anywhere)}, got {got}"


@pytest.mark.parametrize("allowed", ["https://talk.example.org", "https://TALK.example.org/", "*"])
def test_allowed_pages(allowed: str) -> None:
    one = asked("https://talk.example.org", "localhost:8006")
    assert Origins((allowed,), only_here=True).admits(one)
    assert not Origins(("https://other.example.org",), only_here=True).admits(one)
