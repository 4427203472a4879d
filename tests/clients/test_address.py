"""`TargetAddress`: the full address from what a user enters."""

import ssl

import pytest

from clients.address import TargetAddress
from models.errors import SettingsError

GATEWAY, WORKER = True, False


@pytest.mark.parametrize(
    ("given", "url", "name", "is_gateway"),
    [
        ("ws://host:8006", "ws://host:8006/ws/duplex/me", "me", GATEWAY),
        ("host:8006/", "ws://host:8006/ws/duplex/me", "me", GATEWAY),
        ("https://host", "wss://host/ws/duplex/me", "me", GATEWAY),
        ("ws://host:1/ws/duplex/other", "ws://host:1/ws/duplex/other", "other", GATEWAY),
        ("wss://host/behind/proxy/talk?key=1", "wss://host/behind/proxy/talk?key=1", "talk", GATEWAY),
        ("ws://[::1]:22400/ws/duplex", "ws://[::1]:22400/ws/duplex?session_id=me", "me", WORKER),
        ("ws://h/ws/duplex?session_id=you", "ws://h/ws/duplex?session_id=you", "you", WORKER),
    ],
)
def test_completes_address(given: str, url: str, name: str, is_gateway: bool) -> None:
    got = TargetAddress.of(given, "me")
    assert (got.url, got.session_id, got.is_gateway) == (url, name, is_gateway), got


def test_creates_new_session_ids() -> None:
    first, second = TargetAddress.of("ws://host"), TargetAddress.of("ws://host")
    assert first.session_id != second.session_id and first.session_id in first.url


def test_quotes_session_ids() -> None:
    assert TargetAddress.of("ws://host", "a/b?c").url == "ws://host/ws/duplex/a%2Fb%3Fc"


@pytest.mark.parametrize("given", ["", "ftp://host", "ws://", "ws://host:port", "ws://host:99999999"])
def test_refuses_invalid_addresses(given: str) -> None:
    with pytest.raises(SettingsError, match="url: expected ws://host:port"):
        TargetAddress.of(given)


@pytest.mark.parametrize(
    ("given", "is_local"), [("localhost:1", True), ("127.0.0.9:1", True), ("[::1]:1", True), ("example.org", False)]
)
def test_recognizes_local_addresses(given: str, is_local: bool) -> None:
    assert TargetAddress.of(given).is_local is is_local


def test_tls_contexts() -> None:
    secure, plain = TargetAddress.of("wss://host"), TargetAddress.of("ws://host")
    assert plain.tls(None, insecure=True) is None
    assert secure.tls(None, insecure=False).verify_mode is ssl.CERT_REQUIRED
    assert secure.tls(None, insecure=True).verify_mode is ssl.CERT_NONE
    own = ssl.create_default_context()
    assert secure.tls(own, insecure=False) is own
