"""What a worker keeps for a gateway that is lost: any order of sending, reading, acknowledging and losing gateways."""

import asyncio
import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.http.client_scripts import QUIET
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.scripted_client import ScriptedClient
from tests.worker.http.small_worker import N_SLOTS
from worker.http.metrics import WorkerMetrics
from worker.http.slot_keeper import KEPT_BYTES, KEPT_S, SlotKeeper
from worker.http.socket import WorkerSockets
from worker.http.socket_conversation import ConversationEnd
from worker.protocol.codes import CloseCode, CloseReason
from worker.protocol.messages import Paused, write
from worker.protocol.takeover.slot_messages import KeepSlot, SlotTaken, TakeSlot
from worker.protocol.wire import WireError


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def terms(*tokens: str, owner: str = "", grace_s: float = 30.0, **fields: int) -> KeepSlot:
    given = {"received": 0, "n_frames": 1, "number": 1, "acknowledged": 0, **fields}
    return KeepSlot(grace_s=grace_s, tokens=[digest(one) for one in tokens], owner=owner, **given)


def taken(keeper: SlotKeeper, token: str, received: int, *next_tokens: str, owner: str = "") -> tuple[SlotTaken, list]:
    request = TakeSlot(token=digest(token), owner=owner, received=received, tokens=[digest(one) for one in next_tokens])
    _, link = keeper.take(request)
    keeper.greet(link, received, paused=False)
    answer, *messages = link.greeting
    return answer, messages


def test_only_the_valid_tokens_and_the_key_of_the_session_take_it() -> None:
    keeper = SlotKeeper()
    keeper.add("prepared", "pcm16")
    assert not keeper.accepts(digest("one"), ""), "expected nothing to be kept without terms"
    keeper.keep(keeper.newest, terms("one", owner="key:a"))
    tried = (("one", "key:a"), ("one", "key:b"), ("one", "address:::1"), ("two", "key:a"), ("", "key:a"))
    assert [keeper.accepts(digest(token), owner) for token, owner in tried] == [True, False, False, False, False]
    before = keeper.newest
    taken(keeper, "one", 1, "two", "one", owner="key:a")
    assert before.taken.is_set() and not keeper.newest.taken.is_set()
    keeper.keep(before, terms("old", owner="key:a"))  # was on its way when the other gateway took the session
    assert not keeper.accepts(digest("old"), "key:a"), "expected the terms of a connection that was replaced to be left"
    keeper.keep(keeper.newest, terms("two", owner="key:a", n_frames=0))  # the client has the new token
    with pytest.raises(WireError, match="newest token"):
        taken(keeper, "one", 1, "three", owner="key:a")
    with pytest.raises(WireError, match="at most 1"):
        taken(keeper, "two", 2, "three", owner="key:a")
    assert keeper.accepts(digest("two"), "key:a"), "expected a refused request to change nothing"


def test_the_oldest_messages_are_dropped_and_counted() -> None:
    now = [0.0]
    keeper = SlotKeeper(lambda: now[0])
    second = '{"type":"result","audio_data":"' + "A" * 128_000 + '"}'  # of float32
    for _ in range(2):
        keeper.add(second, "pcm16")
    keeper.keep(keeper.newest, terms("one"))
    now[0] = KEPT_S + 1
    keeper.add("new", "pcm16")
    answer, messages = taken(keeper, "one", 0, "two")
    assert (answer.next, answer.lost, messages) == (3, 2, ["new"]), answer
    assert answer.lost_sound_s == pytest.approx(2.0, abs=0.01)
    for _ in range(2):
        keeper.add("x" * KEPT_BYTES, "pcm16")
    answer, messages = taken(keeper, "two", 3, "three")
    assert (answer.next, answer.lost, len(messages)) == (5, 1, 1), "expected the newest message however long it is"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["frame", "read", "own", "show", "ack", "send", "lose"]), max_size=60))
def test_a_client_receives_each_message_once_whatever_gateways_are_lost(events: list[str]) -> None:
    """Messages of the worker reach a gateway late, and the client later still; gateways add messages of their own."""
    keeper = SlotKeeper()
    keeper.add("0", "pcm16")
    n_made, in_flight, n_read, number, shown, got, acknowledged = 1, [], 1, 1, [], ["0"], 0
    n_received = n_sent = 0

    def tell() -> None:
        keeper.keep(
            keeper.newest, terms("t", received=n_sent, n_frames=n_read, number=number, acknowledged=acknowledged)
        )

    tell()
    for event in [*events, "lose"]:
        if event == "frame":
            in_flight.append(str(n_made))
            keeper.add(str(n_made), "pcm16")
            n_made += 1
        elif event == "read" and in_flight:
            shown.append(in_flight.pop(0))
            n_read, number = n_read + 1, number + 1
        elif event == "own":
            shown.append("own")
            number += 1
            tell()
        elif event == "show" and shown:
            got.append(shown.pop(0))
        elif event == "ack":
            acknowledged = len(got)
            tell()
        elif event == "send":
            n_sent += 1
            keeper.count_received()
        elif event == "lose":
            answer, messages = taken(keeper, "t", len(got), "t")
            lost = [one for one in shown if one == "own"]
            assert answer.received == n_sent
            assert answer.lost <= len(lost), f"expected at most {len(lost)} messages of the gateway to be lost"
            got += ["own"] * answer.lost  # as the client counts
            in_flight, shown, n_read, number = list(messages), [], 0, answer.next - 1
            n_received = answer.received
            tell()
    got += in_flight
    assert [one for one in got if one != "own"] == [str(one) for one in range(n_made)]
    assert n_received == n_sent


def test_a_slot_is_free_after_the_grace(worker: WorkerProcess) -> None:
    """Also at once, if the gateway closes the connection; a connection that presents another token is refused."""
    for grace_s, is_closed in ((0.5, False), (600.0, True)):
        client = ScriptedClient(worker, "adx_kept")
        client.prepare(QUIET, spec={"resume": True})
        client.send(str(write(terms("token", grace_s=grace_s))))
        client.send({"type": "pause"})
        client.expect(Paused)  # so that the terms have arrived
        body = {"session_id": "adx_kept", "token": digest("token"), "owner": "address:"}
        assert worker.ask("/kept_session", post=body)[1] == {"kept": True}
        assert worker.ask("/kept_session", post={**body, "token": digest("other")})[1] == {"kept": False}
        if is_closed:
            client.close()
        else:
            client.drop()
            worker.wait_health(lambda health: health["kept_sessions"] == 1, "a kept session")
        worker.wait_free(N_SLOTS)
        assert worker.health()["kept_sessions"] == 0
        assert worker.ask("/kept_session", post=body)[1] == {"kept": False}


class EndingConversation:
    """A conversation that asks, while its answers are cancelled, whether a gateway may take it."""

    name, n_units, paused, has_left = "s", 0, False, False
    end_if_cancelled = ConversationEnd(CloseCode.NORMAL, CloseReason.STOPPED)

    def __init__(self, sockets: WorkerSockets):
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.is_kept: list[bool] = []
        self._sockets = sockets

    async def start(self) -> None: ...

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_kept.append(self._sockets.keeps(self.name, digest("token"), ""))

    def leave(self) -> None:
        self.has_left = True


class FakeSocket:
    """A connection of a gateway, which sends these messages and then nothing."""

    def __init__(self, query: dict[str, str], *sent: str | bytes):
        self.query_params, self.scope, self._sent = query, dict[str, Any](), list(sent)

    async def receive(self) -> dict[str, Any]:
        if not self._sent:
            await asyncio.Event().wait()
        return {"type": "websocket.receive", "text": self._sent.pop(0)}

    async def accept(self) -> None: ...

    async def close(self, code: int, reason: str) -> None: ...


def test_a_gateway_that_ends_while_it_takes_a_session_leaves_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.http.socket.until_gone", lambda _: asyncio.Event().wait())
    sockets = WorkerSockets(SimpleNamespace(decoders=None), WorkerMetrics())  # type: ignore[arg-type]
    conversation: Any = EndingConversation(sockets)

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0)

    async def story() -> None:
        first: Any = FakeSocket({"session_id": "s"}, write(terms("token")))
        serving = asyncio.create_task(sockets.serve(first, lambda *_: conversation, keeps=True))
        await until(lambda: sockets.keeps("s", digest("token"), ""))
        request = TakeSlot(token=digest("token"), owner="", received=0, tokens=[digest("next")])
        second: Any = FakeSocket({"session_id": "s"}, write(request))
        taking = asyncio.create_task(sockets.take(second))
        await until(lambda: sockets.keeps("s", digest("next"), ""))
        assert not serving.done(), "expected the connection before to be there still"
        taking.cancel()
        await asyncio.gather(taking, serving, return_exceptions=True)
        await until(lambda: bool(conversation.is_kept))
        assert conversation.has_left and not sockets.conversations and conversation.is_kept == [False]

    asyncio.run(story())


def test_a_session_that_ends_cannot_be_taken_while_its_tasks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next gateway would run the conversation, whose slot is given back, a second time."""
    monkeypatch.setattr("worker.http.socket.until_gone", lambda _: asyncio.Event().wait())
    sockets = WorkerSockets(SimpleNamespace(decoders=None), WorkerMetrics())  # type: ignore[arg-type]
    conversation, kept = EndingConversation(sockets), []

    async def serve() -> None:
        async def receive() -> dict[str, Any]:
            if not kept:
                kept.append(write(terms("token")))
                return {"type": "websocket.receive", "text": kept[0]}
            kept.append(sockets.keeps("s", digest("token"), ""))
            return {"type": "websocket.disconnect", "code": int(CloseCode.NORMAL)}

        async def accept() -> None: ...

        websocket: Any = SimpleNamespace(query_params={"session_id": "s"}, scope={}, receive=receive, accept=accept)
        open_talk: Any = lambda *_: conversation  # noqa: E731
        await sockets.serve(websocket, open_talk, keeps=True)

    asyncio.run(serve())
    assert kept[1:] == [True], f"expected a session that is kept until its connection is closed, got {kept[1:]}"
    assert conversation.is_kept == [False], f"expected a session that nothing can take, got {conversation.is_kept}"
