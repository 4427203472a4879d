"""Addresses that a worker's command line refuses."""

import pytest

from worker.key_text import WORKER_SECRET_VARIABLE
from worker.main import main


@pytest.mark.parametrize(
    ("host", "secret", "words"),
    [
        (
            "0.0.0.0",
            None,
            f"--host: expected a loopback address, or the secret of the gateway in {WORKER_SECRET_VARIABLE}",
        ),
        ("0.0.0.0", "", "got 0.0.0.0"),
        ("worker.example.org", None, "got worker.example.org"),
        ("192.0.2.7", "given", "192.0.2.7:0: expected an address to listen on"),
    ],
    ids=["no secret", "empty secret", "a name", "not our address"],
)
def test_refused_addresses_give_one_line(
    host: str, secret: str | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(WORKER_SECRET_VARIABLE, raising=False)
    if secret is not None:
        monkeypatch.setenv(WORKER_SECRET_VARIABLE, secret)
    assert main(["--host", host, "--port", "0"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1 and words in text, f"expected {words!r}, got {text!r}"
