"""A client's attempts to continue its conversation, without sockets."""

import asyncio

import pytest
from websockets.exceptions import ConnectionClosedError

from clients import resumption
from clients.errors import ConnectionLost, Refused
from clients.resumption import FIRST_S, MAX_S, SPREAD, Resumption
from worker.protocol.gateway_messages import SessionResumed
from worker.protocol.messages import Prepared, write


class Socket:
    """A connection over which the server resumes the session. lost: messages that it has dropped."""

    def __init__(self, lost: int = 0):
        self._lost = lost

    async def send(self, _: object) -> None:
        pass

    async def recv(self) -> str | bytes:
        message = SessionResumed(
            resume_token="t", resume_grace_s=30, received=0, next=1, lost=self._lost, lost_sound_s=1.5 * self._lost
        )
        return write(message)

    async def close(self, *_: object) -> None:
        pass


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits before attempts, in s, which take no time."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(resumption.asyncio, "sleep", sleep)
    return waited


def resumed(*answers: Socket | Exception, grace_s: float = 1e9) -> tuple[Resumption, list[object]]:
    """What resumes with these answers, the last one again, and the answers that it got."""
    given: list[object] = []

    async def reopen() -> Socket:
        given.append(answers[min(len(given), len(answers) - 1)])
        if isinstance(given[-1], Exception):
            raise given[-1]
        return given[-1]

    one = Resumption(reopen, None)
    one.prepared(Prepared(prompt_length=1, resume_token="t", resume_grace_s=grace_s))
    return one, given


@pytest.mark.parametrize("status", [401, 404])
def test_a_refusal_for_good_ends_the_attempts(status: int, waits: list[float]) -> None:
    one, given = resumed(Refused("ws://a", status), Socket())
    assert asyncio.run(one.resume()) is None and len(given) == 1, f"expected one attempt, got {given}"
    assert isinstance(one.end, Refused) and one.end.status == status, f"expected the refusal, got {one.end!r}"


def test_waits_between_attempts_double(waits: list[float]) -> None:
    one, given = resumed(
        Refused("ws://a", 503), Refused("ws://a", 502), ConnectionLost("a", expected="b", got="c"), Socket()
    )
    assert asyncio.run(one.resume()) is given[-1] and len(given) == 4 and one.end is None
    for got, expected in zip(waits, (0, FIRST_S, 2 * FIRST_S, 4 * FIRST_S), strict=True):
        assert abs(got - expected) <= SPREAD * expected, f"expected {expected} s, got {got}"


def test_connections_that_end_at_once_are_not_opened_without_a_pause(waits: list[float]) -> None:
    one, _ = resumed(Socket())
    for _ in range(8):
        assert asyncio.run(one.resume()) is not None
    assert waits[0] == 0 and min(waits[1:]) >= (1 - SPREAD) * FIRST_S, f"expected pauses, got {waits}"
    assert max(waits) <= (1 + SPREAD) * MAX_S and waits[-1] >= (1 - SPREAD) * MAX_S, f"got {waits}"
    one.received()
    assert asyncio.run(one.resume()) is not None
    assert waits[-1] == 0, f"expected an attempt at once after a message, got {waits[-1]}"


def test_lost_messages_end_the_conversation_with_the_reason(waits: list[float]) -> None:
    one, given = resumed(Socket(lost=2), Socket())
    assert asyncio.run(one.resume()) is None and len(given) == 1
    assert "2 lost messages with 3.0 s of sound" in str(one.end), f"expected the loss, got {one.end}"


def test_an_attempt_that_is_cut_is_made_again(waits: list[float]) -> None:
    class Cut(Socket):
        async def recv(self) -> str:
            raise ConnectionClosedError(None, None)

    one, given = resumed(Cut(), Socket())
    assert asyncio.run(one.resume()) is given[-1] and len(given) == 2
