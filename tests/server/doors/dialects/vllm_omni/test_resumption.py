"""vLLM-Omni sessions that outlive a connection: what is repeated, who may resume, and how long they wait."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import websockets

from benchmarks.serve.fake_worker import FakeWorker
from server.doors.dialects.vllm_omni.session import OmniSession
from server.live.live_sessions import LiveSession
from server.live.resumption import MessageJournal
from tests.server.doors.dialects.vllm_omni.omni_client import SOUND, OmniClient
from tests.server.garbage import without_garbage
from tests.server.live_gateway import RunningGateway, run, running_gateway, wait_until
from worker.protocol.takeover.message_bytes import Data

PATH = "/v1/realtime?duplex=1&autostart=0"


@asynccontextmanager
async def two_sockets(
    grace_s: float = 30.0, **cycle: int
) -> AsyncIterator[tuple[FakeWorker, RunningGateway, OmniClient, websockets.ClientConnection]]:
    """A session of a worker with one slot, and a second connection; nothing of it may be left afterwards."""
    async with FakeWorker(slots=1, **cycle) as worker, running_gateway(worker, resume_grace_s=grace_s) as gateway:
        url = f"ws://127.0.0.1:{gateway.port}{PATH}"
        async with without_garbage(LiveSession, OmniSession):
            first = await websockets.connect(url, compression=None, proxy=None)
            client = OmniClient(first)
            await client.begin()
            async with websockets.connect(url, compression=None, proxy=None) as second:
                yield worker, gateway, client, second
            first.transport.abort()
            await gateway.wait_idle()


def test_a_lost_connection_is_replaced_without_a_gap() -> None:
    """The slot stays the session's, although no other one is free."""

    async def scenario() -> None:
        async with two_sockets(n_listen=0, n_speak=3) as (worker, gateway, client, second):
            await client.append()
            await client.until(SOUND)
            [units_before] = worker.sessions.values()
            client.abort()
            await wait_until(lambda: sum(worker.sessions.values()) > units_before, "speech without a connection")
            await client.resume(second)
            resumed = await client.until("session.resumed")
            assert resumed["attachment_generation"] == 2 and resumed["session"]["id"] == client.log[0]["session_id"]
            done = (await client.until("response.done"))["response"]
            assert done["metadata"]["playback"]["sent_ms"] == 3000, done["metadata"]
            assert len(gateway.gateway.dispatcher.workers.leases) == 1
            await client.send("session.close")
            assert (await client.until("session.closed"))["reason"] == "client_close"

    run(scenario)


def test_a_resumption_that_the_client_does_not_see_may_be_repeated() -> None:
    """The connection is lost before the new secret arrives; once it has arrived, the old one is worthless."""

    async def scenario() -> None:
        async with two_sockets(n_listen=1000) as (_, gateway, client, second):
            url = f"ws://127.0.0.1:{gateway.port}{PATH}"
            old, first = client.log[0]["resume_token"], client.socket
            await client.resume(second)
            await wait_until(first.transport.is_closing, "the first connection's end")
            second.transport.abort()
            async with websockets.connect(url, compression=None, proxy=None) as third:
                await client.resume(third)
                assert (await client.until("session.resumed"))["attachment_generation"] == 3
                await client.send("session.heartbeat")
                await client.until("session.heartbeat_ack")
                client.abort()
            async with websockets.connect(url, compression=None, proxy=None) as fourth:
                await client.resume(fourth, resume_token=old)
                client.n_received = 0
                assert (await client.until("error"))["error"]["code"] == "invalid_resume_token"
                client.n_received = next(
                    event["server_event_seq"]
                    for event in reversed(client.log)
                    if event["type"] == "session.heartbeat_ack"
                )
                await client.resume(fourth)
                await client.until("session.resumed")

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"resume_token": "wrong"}, "invalid_resume_token"),
        ({"session_id": "unknown"}, "session_resume_expired"),
        ({"resume_token": None}, "invalid_session_resume"),
    ],
)
def test_only_the_secrets_owner_resumes(fields: dict[str, str | None], code: str) -> None:
    async def scenario() -> None:
        async with two_sockets(n_listen=1000) as (_, _, client, second):
            first, stranger = client.socket, OmniClient(second)
            stranger.log = client.log[:1]
            await stranger.resume(second, **fields)
            assert (await stranger.until("error"))["error"]["code"] == code
            await client.send("session.heartbeat")
            await client.until("session.heartbeat_ack")
            await first.close()

    run(scenario)


def test_a_second_connection_replaces_an_open_one() -> None:
    async def scenario() -> None:
        async with two_sockets(n_listen=1000) as (_, _, client, second):
            first = client.socket
            before = OmniClient(first)
            await client.resume(second)
            await client.until("session.resumed")
            replaced = await before.until("session.replaced")
            assert replaced["attachment_generation"] == 1
            await first.wait_closed()
            assert first.close_code == 1000
            await client.send("session.heartbeat")
            await client.until("session.heartbeat_ack")

    run(scenario)


def test_a_session_without_a_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.dialects.vllm_omni.running.POLL_S", 0.05)

    async def scenario() -> None:
        async with two_sockets(0.2, n_listen=1000) as (worker, _, client, second):
            client.abort()
            await wait_until(lambda: not worker.sessions, "the slot to be free")
            await client.resume(second)
            client.n_received = 0
            assert (await client.until("error"))["error"]["code"] == "session_resume_expired"

    run(scenario)


def test_missing_events_need_a_new_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.dialects.vllm_omni.running.KEPT_BYTES", 1000)
    large: list[Data] = []  # each drops the one before
    add = MessageJournal.add

    def noted(journal: MessageJournal, data: Data) -> int:
        large.extend([data] * (len(data) > 1000))
        return add(journal, data)

    monkeypatch.setattr(MessageJournal, "add", noted)

    async def scenario() -> None:
        async with two_sockets(n_listen=0, n_speak=3) as (worker, _, client, second):
            large.clear()
            await client.append()
            await wait_until(lambda: worker.total_requests >= 1, "a unit")
            client.abort()
            await wait_until(lambda: len(large) > 1, "a large event that is dropped before the client has it")
            await client.resume(second)
            assert (await client.until("session.resync_required"))["reason"] == "journal_gap"
            await second.wait_closed()

    run(scenario)


def test_a_lost_worker_fails_the_response_and_is_replaced() -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(n_listen=0, n_speak=9) as first,
            FakeWorker(n_listen=0, n_speak=9) as second,
            running_gateway(first, second) as gateway,
        ):
            url = f"ws://127.0.0.1:{gateway.port}{PATH}"
            async with websockets.connect(url, compression=None, proxy=None) as socket:
                client = OmniClient(socket)
                await client.begin()
                await client.append()
                await client.until(SOUND)
                (first if first.sessions else second).crash()
                done = (await client.until("response.done"))["response"]
                assert (done["status"], done["status_details"]["reason"]) == ("failed", "worker_lost")
                await client.append()
                await client.until("response.created")
                assert client.kinds().count("session.created") == 1
            await gateway.wait_idle()

    run(scenario)
