"""What is kept for a client that loses its connection: any order of sending, acknowledging, losing and resuming."""

import asyncio
import json
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serve.fake_worker import FakeWorker
from server.live.client_end import ClientEnd
from server.live.closes import ENDED
from server.live.resumption import KEPT_S, MessageJournal, ResumeTokens
from tests.server.access.keyed_gateway import ADMIN, USER, bearer, entry
from tests.server.live_gateway import (
    CHUNK,
    PREPARE,
    STOP,
    Client,
    RunningGateway,
    run,
    running_gateway,
    wait_until,
)
from worker.protocol.gateway_messages import ResumeSession, SessionMoving
from worker.protocol.messages import read_server
from worker.protocol.takeover.message_bytes import ByteBudget, size_of
from worker.protocol.wire import WireError, json_text


def test_the_journal_drops_the_oldest_messages() -> None:
    now, budget = [0.0], ByteBudget(10**9)
    journal = MessageJournal(lambda: now[0], budget, max_bytes=3 * size_of("m1"))
    assert [journal.add(f"m{n}") for n in range(1, 6)] == [1, 2, 3, 4, 5]
    assert journal.after(3) == ["m4", "m5"] and journal.after(0) == ["m3", "m4", "m5"]
    assert (journal.has_gap_after(1), journal.has_gap_after(2)) == (True, False)
    assert journal.acknowledge(4) and not journal.acknowledge(6), "expected 6 to be refused: only 5 were sent"
    assert budget.used == journal.n_bytes == size_of("m5")
    now[0] = KEPT_S + 1
    journal.add("m6")
    assert journal.after(0) == ["m6"], f"expected nothing older than {KEPT_S} s, got {journal.after(0)}"
    journal.add("m" * 10_000)
    assert journal.after(0) == ["m" * 10_000], "expected the newest message however long it is"
    budget.used = 10**9
    journal.add("m8")
    assert journal.after(0) == ["m8"], "expected the bound of all journals to hold for each"
    journal.clear()
    assert (journal.n_bytes, journal.count, journal.next_after(0)) == (0, 8, None)


def test_a_secret_is_valid_until_the_client_has_the_next_one() -> None:
    tokens = ResumeTokens()
    first = tokens.issue()
    second, third = tokens.replace(first), tokens.replace(first)  # the client did not receive the second
    assert [tokens.accepts(one) for one in (first, second, third, "", "\ud800")] == [True, False, True, False, False]
    tokens.confirm(second)
    assert tokens.accepts(first), "expected a secret that is not the newest one to confirm nothing"
    tokens.confirm(third)
    assert [tokens.accepts(one) for one in (first, third)] == [False, True]
    assert len({first, second, third}) == 3 and min(map(len, (first, second, third))) >= 43, "expected 256 bits"


def test_a_message_that_is_acknowledged_too_early_holds_nothing_up() -> None:
    """The client says that it has what was not sent yet."""

    async def scenario() -> None:
        end = ClientEnd(RecordingSocket(9), ByteBudget(10**6), 30.0)  # type: ignore[arg-type]
        sending = asyncio.create_task(end.send(end.offer(PREPARED)))
        await asyncio.sleep(0)
        assert not sending.done(), "expected the wait for the connection"
        assert end.acknowledge(json_text({"type": "received", "count": 1}))
        async with asyncio.timeout(30):
            await sending

    asyncio.run(scenario())


def test_what_a_slow_client_misses_is_counted() -> None:
    """Answers of the worker wait for it; messages of the gateway take the place of older ones."""

    async def scenario() -> None:
        sound = json_text({"type": "partial", "audio_data": "A" * 128_000})  # a second of float32
        socket = RecordingSocket(9)
        socket.is_open.clear()
        budget = ByteBudget(3 * size_of(sound))
        end = ClientEnd(socket, budget, 30.0)  # type: ignore[arg-type]
        end.lose(end.newest)
        await end.send(end.offer(PREPARED))
        for _ in range(2):
            await end.send(sound)
        connection = end.resume(socket, ResumeSession(token="", received=1))  # type: ignore[arg-type]
        writing = asyncio.create_task(end.write(connection))
        sending = asyncio.create_task(end.send(sound))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not sending.done() and budget.used == 2 * size_of(sound), "expected the answer to wait"
        budget.max_bytes = 0
        end.post(SessionMoving(reason="worker_lost"))
        socket.is_open.set()
        async with asyncio.timeout(30):
            await sending
        got = [json.loads(text) for text in socket.got]
        kinds = [one["type"] for one in got]
        assert kinds == ["session_resumed", "messages_lost", "session_moving", "partial"], kinds
        assert (got[0]["next"], got[0]["lost"]) == (2, 0), got[0]
        assert (got[1]["lost"], got[1]["lost_sound_s"], got[1]["next"]) == (2, 2.0, 4), got[1]
        writing.cancel()
        end.close()

    asyncio.run(scenario())


class RecordingSocket:
    """A connection that keeps what was sent over it, until it breaks after some messages."""

    scope: ClassVar[dict[str, Any]] = {}

    def __init__(self, n_left: int):
        self.got: list[str] = []
        self._n_left = n_left
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def send_text(self, text: str) -> None:
        await self.is_open.wait()
        if self._n_left == 0:
            raise RuntimeError("the connection is lost")
        self._n_left -= 1
        self.got.append(text)


PREPARED = json_text({"type": "prepared", "prompt_length": 1, "spec": {"resume": True}})
EVENTS = st.one_of(
    st.tuples(st.just("message"), st.integers(0, 200)),
    st.tuples(st.just("drop"), st.integers(0, 6)),
    st.tuples(st.just("ack"), st.integers(0, 3)),
)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(EVENTS, max_size=40), max_kept=st.integers(1, 20_000), n_left=st.integers(1, 8))
def test_a_client_gets_each_message_once_and_in_order(
    events: list[tuple[str, int]], max_kept: int, n_left: int
) -> None:
    """`lost` counts the messages that were dropped. Old tokens and wrong counts are refused throughout."""

    async def scenario() -> None:
        budget = ByteBudget(max_kept)
        socket = RecordingSocket(n_left)
        end = ClientEnd(socket, budget, 30.0)  # type: ignore[arg-type]
        sent, has, lost, token = [], [], 0, ""  # `has`: messages that the client received, with None for each lost one
        connection, writing = end.newest, asyncio.create_task(end.write(end.newest))
        n_taken = 0

        async def settle() -> None:
            nonlocal n_taken
            for _ in range(2 + 2 * len(sent)):
                await asyncio.sleep(0)
            has.extend(socket.got[n_taken:])
            n_taken = len(socket.got)

        async def put(text: str) -> None:
            sent.append(text)
            sending = asyncio.create_task(end.send(text))
            await settle()
            if writing.done():
                end.lose(connection)
            await sending

        offered = end.offer(PREPARED)
        token = read_server(offered).resume_token
        await put(offered)
        for kind, n in events:
            if kind == "message":
                await put(f"{len(sent) + 1}:" + "x" * n)
            elif kind == "ack" and not writing.done():
                assert end.acknowledge(json_text({"type": "received", "count": max(0, len(has) - n)}))
            elif kind == "drop":
                writing.cancel()
                end.lose(connection)
                assert not end.accepts("A" * 43)
                with pytest.raises(WireError):
                    end.resume(socket, ResumeSession(token=token, received=len(sent) + 1))  # type: ignore[arg-type]
                assert end.accepts(token)
                socket, n_taken = RecordingSocket(n + 1), 1  # the first message is the greeting
                connection = end.resume(socket, ResumeSession(token=token, received=len(has)))  # type: ignore[arg-type]
                writing = asyncio.create_task(end.write(connection))
                await asyncio.sleep(0)
                greeting = read_server(socket.got[0])
                old, token = token, greeting.resume_token
                has.extend([None] * greeting.lost)
                lost += greeting.lost
                assert greeting.next == len(has) + 1, f"expected the next message to be {len(has) + 1}, got {greeting}"
                await settle()
                end.count_message(connection)
                assert end.accepts(token) and not end.accepts(old)
        if not writing.done():
            await settle()
            assert len(has) == len(sent), f"expected {len(sent)} messages, got {len(has)}"
        for number, text in enumerate(has):
            assert text in (None, sent[number]), f"message {number + 1}: expected {sent[number]}, got {text}"
        assert lost == 0 or max_kept < sum(map(size_of, sent)), f"expected none lost within the bound, got {lost}"
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        end.close()
        assert budget.used == 0 and not end.accepts(token)

    asyncio.run(scenario())


RESUMABLE = PREPARE | {"spec": {"resume": True}}


class Talker:
    """A client that counts the server's messages, over one connection after another."""

    def __init__(self, gateway: RunningGateway, client: Client, options: dict[str, Any]):
        self.gateway, self.client, self.n = gateway, client, 0
        self.token, self.units, self._options = "", [], options

    @classmethod
    async def prepared(cls, gateway: RunningGateway, name: str = "omni_me", **options: Any) -> "Talker":
        talker = cls(gateway, await (await gateway.connect(name, **options)).with_slot(), options)
        await talker.client.send(RESUMABLE)
        message = await talker.take("prepared")
        assert message["resume_grace_s"] == gateway.gateway.sockets.resume_grace_s, message
        talker.token = message["resume_token"]
        return talker

    async def take(self, kind: str) -> dict[str, Any]:
        message = await self.client.receive(kind)
        self.n += 1
        if kind == "result":
            self.units.append(message["current_time"])
        return message

    async def lose(self) -> None:
        """Lose the connection, and wait until the gateway knows."""
        self.client.abort()
        await wait_until(lambda: sample(self.gateway, "detached_sessions") == 1, "a session without a connection")

    async def resume(self, name: str = "omni_me", **fields: Any) -> dict[str, Any]:
        """Continue over another connection. Returns: `session_resumed`."""
        self.client = await self.gateway.connect(f"{name}?resume=1", **self._options)
        await self.client.send({"type": "resume_session", "token": self.token, "received": self.n, **fields})
        resumed = await self.client.receive("session_resumed")
        self.token = resumed["resume_token"]
        return resumed


def sample(gateway: RunningGateway, name: str, **labels: str) -> float | None:
    return gateway.gateway.metrics.registry.get_sample_value(f"duologue_gateway_{name}", labels)


async def refused(gateway: RunningGateway, message: Any, name: str = "omni_me", key: str = USER) -> None:
    client = await gateway.connect(f"{name}?resume=1", additional_headers=bearer(key))
    await client.send(message)
    error = await client.receive("error")
    assert error["code"] in ("resume_refused", "bad_message", "unknown_type", "bad_json"), error
    assert await client.wait_closed() == (1008, "Resume refused")


def test_a_session_outlives_its_connection() -> None:
    """The slot is the only one. Results that the client has not received follow; no other message is repeated."""

    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            talker = await Talker.prepared(gateway)
            await talker.client.send(CHUNK, CHUNK, CHUNK)
            await talker.take("result")
            await talker.client.send({"type": "received", "count": 2})
            await wait_until(lambda: worker.total_requests == 3, "three units")
            await talker.lose()
            waiting = await gateway.connect("omni_waits")
            await waiting.receive("queued")
            resumed = await talker.resume()
            assert (resumed["received"], resumed["next"], resumed["lost"]) == (5, 3, 0), resumed
            await talker.client.send(CHUNK)
            for _ in range(3):
                await talker.take("result")
            assert talker.units == [1, 2, 3, 4], f"expected each result once and in order, got {talker.units}"
            await waiting.close()
            # A connection that is still open is replaced; it does not end the session, and is no longer read.
            old = talker.client
            assert (await talker.resume())["received"] == 6
            assert await old.wait_closed() == (4001, "Replaced")
            await talker.client.send(CHUNK)
            await talker.take("result")
            assert sample(gateway, "resumptions_total", outcome="resumed") == 2
            assert sample(gateway, "resume_journal_bytes") > 0
            await talker.client.send(STOP)
            await talker.take("stopped")
            assert await talker.client.wait_closed() == (1000, "stopped")
            await gateway.wait_idle()
            assert sample(gateway, "resume_journal_bytes") == sample(gateway, "detached_sessions") == 0

    run(scenario)


def test_only_the_client_resumes_its_session() -> None:
    async def scenario() -> None:
        keys = entry("user", USER), entry("boss", ADMIN, admin=True)
        async with FakeWorker(slots=1) as worker, running_gateway(worker, api_keys=keys) as gateway:
            talker = await Talker.prepared(gateway, additional_headers=bearer(USER))
            await talker.lose()
            right = {"type": "resume_session", "token": talker.token, "received": 1}
            for wrong in (
                right | {"token": "A" * 43},
                right | {"token": ""},
                right | {"received": 2},
                right | {"received": -1},
                PREPARE,
                b"\x02\x00\x00\x00{}",
                "x" * 3000,
            ):
                await refused(gateway, wrong)
            await refused(gateway, right, name="omni_you")
            await refused(gateway, right, key=ADMIN)
            assert sample(gateway, "resumptions_total", outcome="refused") == 9
            old = talker.token
            await talker.resume()
            await talker.client.send(CHUNK)  # which says that it has the new token
            await talker.take("result")
            await refused(gateway, right | {"token": old})
            await talker.client.send({"type": "received", "count": 99})
            assert (await talker.take("error"))["code"] == "bad_message"
            await talker.client.close()
            await gateway.wait_idle()
            await refused(gateway, right | {"token": talker.token})

    run(scenario)


def test_a_session_that_is_ending_is_not_resumed() -> None:
    """Its worker is slow to close; the client has ended it with its close frame."""

    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            talker = await Talker.prepared(gateway)
            worker.freeze()
            await talker.client.close()
            await refused(gateway, {"type": "resume_session", "token": talker.token, "received": 1})
            worker.thaw()
            await gateway.wait_idle()

    run(scenario)


@pytest.mark.parametrize("kept", [False, True])
def test_the_slot_is_free_after_a_close_or_the_grace(kept: bool) -> None:
    """At once with a close frame of the client or without `spec.resume`, otherwise after the grace."""

    async def scenario() -> None:
        async with (
            FakeWorker(slots=1) as worker,
            running_gateway(worker, resume_grace_s=0.2 if kept else 600.0) as gateway,
        ):
            if kept:
                talker = await Talker.prepared(gateway)
                talker.client.abort()
                await gateway.wait_idle()
                assert sample(gateway, "resumptions_total", outcome="expired") == 1
                return
            for code in (1000, 1001):
                talker = await Talker.prepared(gateway)
                await talker.client.socket.close(code)
                await gateway.wait_idle()
            (await (await gateway.connect()).prepared()).abort()
            await gateway.wait_idle()
            talker = await Talker.prepared(gateway)
            await talker.client.socket.close(4000)
            await wait_until(lambda: sample(gateway, "detached_sessions") == 1, "a session without a connection")
            [session] = gateway.gateway.live.all
            session.end(ENDED)  # by the operator
            await gateway.wait_idle()

    run(scenario)
