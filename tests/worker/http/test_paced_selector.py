"""The event loop's selector: when it looks at the sockets, on a clock that the test moves."""

import asyncio
import selectors
import socket
from collections.abc import Iterator

import pytest

from worker.http.paced_selector import MANY, SPACING_S, PacedSelector


class Paced(PacedSelector):
    """Its sleeps move its clock. sleeps: their lengths."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []
        super().__init__(lambda: self.now, self.wait)

    def wait(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_every_message_is_read_at_once_with_few_conversations(pair: tuple[socket.socket, socket.socket]) -> None:
    with Paced() as selector:
        selector.register(pair[0], selectors.EVENT_READ)
        selector.set_n_conversations(MANY - 1)
        pair[1].send(b"a")
        for _ in range(3):
            assert len(selector.select(0)) == 1 and len(selector.select(None)) == 1
        assert selector.sleeps == []


def paced(selector: Paced, reader: socket.socket) -> None:
    """Make the selector wait for its next look: its last ones have found a message, and nothing after it."""
    selector.register(reader, selectors.EVENT_READ)
    selector.set_n_conversations(MANY)
    assert selector.select(0) == []


def test_messages_gather_with_many_conversations(pair: tuple[socket.socket, socket.socket]) -> None:
    with Paced() as selector:
        paced(selector, pair[0])
        pair[1].send(b"a")
        assert selector.select(0) == [], "expected no look while work is ready"
        selector.now += SPACING_S / 3
        assert len(selector.select(None)) == 1
        [slept] = selector.sleeps
        assert slept == pytest.approx(SPACING_S * 2 / 3), "expected a loop without work to sleep until the next look"


def test_long_messages_are_read_without_waits(pair: tuple[socket.socket, socket.socket]) -> None:
    with Paced() as selector:
        paced(selector, pair[0])
        pair[1].send(b"abc")
        selector.now += SPACING_S
        for _ in range(3):
            assert len(selector.select(0)) == 1, "expected another look after one that has found something"
            pair[0].recv(1)
        assert selector.select(None) == [], "expected a look without a wait after one that has found something"
        pair[1].send(b"d")
        assert selector.select(0) == [] and selector.sleeps == []
        assert len(selector.select(None)) == 1 and selector.sleeps == [SPACING_S]


def test_timers_are_in_time_and_do_not_shorten_the_wait(pair: tuple[socket.socket, socket.socket]) -> None:
    with Paced() as selector:
        paced(selector, pair[0])
        pair[1].send(b"a")
        assert selector.select(SPACING_S / 4) == [] and selector.sleeps == [SPACING_S / 4]
        assert len(selector.select(SPACING_S)) == 1
        assert selector.now == pytest.approx(SPACING_S)


def test_conversations_that_end_end_the_pace(pair: tuple[socket.socket, socket.socket]) -> None:
    with Paced() as selector:
        paced(selector, pair[0])
        pair[1].send(b"a")
        selector.set_n_conversations(MANY - 1)
        assert len(selector.select(0)) == 1


def test_a_loop_with_many_conversations_runs_calls_timers_and_other_threads() -> None:
    selector = PacedSelector()
    selector.set_n_conversations(MANY)

    async def main() -> list[str]:
        loop, found = asyncio.get_running_loop(), list[str]()
        loop.call_soon(found.append, "soon")
        await asyncio.sleep(0.01)
        found.append(await asyncio.to_thread(lambda: "thread"))
        reader, writer = socket.socketpair()
        with reader, writer:
            reader.setblocking(False)
            loop.call_later(0.01, writer.send, b"socket")
            found.append((await loop.sock_recv(reader, 10)).decode())
        return found

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        assert runner.run(main()) == ["soon", "thread", "socket"]
