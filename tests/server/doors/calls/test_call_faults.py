"""Calls whose clients, followers and processes misbehave, and calls of a server that shuts down."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Iterator

import pytest

from benchmarks.doors.call_load import CALLS
from benchmarks.serve.fake_worker import FakeWorker
from server.doors.calls import processes
from server.doors.calls.call import WebRtcCall
from server.doors.calls.routes import LIVE_PATH
from server.doors.live.ends import DoorEnd
from server.doors.realtime.events.client_events import ClientEvent
from server.doors.realtime.session import RealtimeSession
from server.doors.realtime.socket import RealtimeConnection
from server.peers.frames import FrameKind, LinkFrame
from tests.server.doors.calls.call_client import CallClient, calling
from tests.server.doors.calls.served_calls import KEY, Served, follow, serve_calls
from tests.server.live_gateway import ANSWER_S, running_gateway, wait_until
from worker.config.webrtc import WebRtcConfig


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    yield from serve_calls(max_calls=2, processes=2)


@pytest.mark.parametrize("path", [CALLS, LIVE_PATH])
def test_a_client_that_goes_before_the_answer_keeps_no_slot(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def unanswered(call: WebRtcCall, offer: str) -> str:
        return await asyncio.Future()

    monkeypatch.setattr(WebRtcCall, "open", unanswered)

    async def scenario() -> None:
        gateway = served.gateway.gateway
        if path == CALLS:
            sent = served.http.post(CALLS, content="v=0", headers={**KEY, "Content-Type": "application/sdp"})
        else:
            body = {"session": {"model": "gpt-live-1"}, "transport": {"type": "webrtc", "sdp": "v=0"}}
            sent = served.http.post(LIVE_PATH, json=body, headers=KEY)
        asking = asyncio.create_task(sent)
        await wait_until(lambda: gateway.dispatcher.workers.leases, "the slot of the call")
        asking.cancel()
        await wait_until(lambda: not gateway.dispatcher.workers.leases, "a free slot")
        assert not any(process.n_calls for process in gateway.peers.all)

    served.run(scenario)


def test_a_process_that_hangs_is_replaced_and_ends_its_calls_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PING_S", 0.6)

    async def scenario() -> None:
        first, second = served.gateway.gateway.peers.all
        for process in (first, second):
            await process.start()
            await wait_until(lambda process=process: not process._n_unanswered, "an answer to a ping", 60)
        async with calling(served.http, **KEY) as lost, calling(served.http, **KEY) as other:
            assert (first.n_calls, second.n_calls) == (1, 1)
            socket, others_socket, pid = await follow(served, lost, KEY), await follow(served, other, KEY), first.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            async with asyncio.timeout(ANSWER_S):
                await socket.wait_closed()
            assert socket.close_code == 1011, "expected the end of a call whose process is lost"
            async with calling(served.http, **KEY) as again:
                assert first.pid not in (None, pid) and first.n_calls == 1, "expected another process"
                for client in (other, again):
                    await client.send("session.update", session={"instructions": "Go on."})
                    await client.until("session.updated")
            await others_socket.close()

    served.run(scenario)


def test_a_call_whose_session_fails_is_over(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(connection: RealtimeConnection, end: DoorEnd) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RealtimeConnection, "_close", failing)

    async def scenario() -> None:
        async with calling(served.http, **KEY) as client:
            socket = await follow(served, client, KEY)
            await served.http.post(f"{CALLS}/{client.call_id}/hangup", headers=KEY)
            await socket.wait_closed()
            assert socket.close_code == 1011
            assert not any(process.n_calls for process in served.gateway.gateway.peers.all)

    served.run(scenario)


def test_followers_that_flood_leave_the_call_to_its_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.calls.call.MAX_WAITING", 4)
    monkeypatch.setattr("server.doors.calls.call.MAX_WAITING_CHARS", 1000)
    may_handle, handle = asyncio.Event(), RealtimeSession.handle

    async def slow(session: RealtimeSession, given: ClientEvent) -> bool:
        await may_handle.wait()
        return await handle(session, given)

    monkeypatch.setattr(RealtimeSession, "handle", slow)

    async def scenario() -> None:
        async with calling(served.http, **KEY) as client:
            followers = [await follow(served, client, KEY) for _ in range(4)]
            [call] = [one for process in served.gateway.gateway.peers.all for one in process._calls.values()]
            assert isinstance(call, WebRtcCall)
            for socket in followers:
                for _ in range(100):
                    await socket.send(json.dumps({"type": "conversation.item.retrieve", "item_id": "x" * 2000}))
            await wait_until(lambda: call._events.qsize() >= 4, "an event of each follower")
            arrived, on_frame = asyncio.Event(), call.on_frame

            def noted(frame: LinkFrame) -> None:
                on_frame(frame)
                if frame.kind is FrameKind.EVENT:
                    arrived.set()

            monkeypatch.setattr(call, "on_frame", noted)
            await client.send("session.update", session={"instructions": "Be brief."})
            await arrived.wait()
            assert call._events.qsize() == 5, "expected one event of each follower, and the client's"
            may_handle.set()
            await client.until("session.updated")
            for socket in followers:
                socket.transport.abort()

    served.run(scenario)


def test_a_draining_server_ends_calls_and_accepts_none(served: Served) -> None:
    async def scenario() -> None:
        live = served.gateway.gateway.live
        async with calling(served.http, **KEY) as client:
            socket = await follow(served, client, KEY)
            try:
                live.drain()
                await socket.wait_closed()
                assert (socket.close_code, socket.close_reason) == (1001, "Shutting down")
                await wait_until(lambda: client.connection.connectionState == "closed", "the connection's end")
                await served.gateway.wait_idle()
                late = CallClient(with_video=False)
                sdp = await late.offer()
                await late.connection.close()
                headers = {**KEY, "Content-Type": "application/sdp"}
                refused = await served.http.post(CALLS, content=sdp, headers=headers)
                body = {"session": {"model": "gpt-live-1"}, "transport": {"type": "webrtc", "sdp": sdp}}
                for answer in (refused, await served.http.post(LIVE_PATH, json=body, headers=KEY)):
                    assert answer.status_code == 503 and "retry-after" in answer.headers, answer.text
                assert not any(process.n_calls for process in served.gateway.gateway.peers.all)
            finally:
                live.draining = False

    served.run(scenario)


def test_the_password_of_a_turn_server_is_in_no_answer_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    webrtc = WebRtcConfig(turn_url="turn:127.0.0.1:9", turn_username="turn-user", turn_credential="s3cret-of-turn")

    async def scenario() -> list[str]:
        async with FakeWorker() as worker, running_gateway(worker, webrtc=webrtc) as gateway:
            schema = await gateway.get("/openapi.json")
            paths = [path for path, item in schema["paths"].items() if "get" in item and "{" not in path]
            assert {"/status", "/metrics"} <= set(paths), paths
            answers = [await gateway.http.get(path) for path in ("/openapi.json", *paths)]
            answers.append(
                await gateway.http.post(CALLS, content="no SDP", headers={"Content-Type": "application/sdp"})
            )
            assert answers[-1].status_code == 400 and "one audio section" in answers[-1].text
            return [answer.text for answer in answers] + [repr(gateway.gateway)]

    texts = asyncio.run(scenario())
    assert "holds connections of calls" in caplog.text
    for text in (*texts, caplog.text):
        assert "s3cret-of-turn" not in text and "turn-user" not in text
