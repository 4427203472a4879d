"""Arbitrary health bodies of workers and arbitrary messages of clients."""

import asyncio
import json
import logging

import httpx
import pytest
from fastapi.encoders import jsonable_encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serve.fake_worker import FakeWorker
from server.access.identity import Identity
from server.dispatch.dispatcher import Dispatcher
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import WorkerAddress, Workers
from server.health_watch import HealthWatch
from server.metrics import GatewayMetrics
from server.routes.status_report import queue_status, service_status, worker_info
from tests.server.live_gateway import CHUNK, PREPARE, run, running_gateway, wait_until

# --- health of workers ------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = ("state", "worker_status", "slots", "gpu_id", "compile", "memory", "error", "progress", "avg_inference_time_ms")
SLOTS = st.fixed_dictionaries({"total": JSON | st.integers(-2, 3), "free": JSON | st.integers(-2, 3)})
NAMES = st.sampled_from(["IDLE", "BUSY", "idle", "duplex_active", "error"])
HEALTH = st.dictionaries(st.sampled_from(KEYS), JSON | SLOTS | NAMES, max_size=len(KEYS))


@settings(max_examples=100)
@given(health=HEALTH | JSON)
def test_arbitrary_health_does_not_break_responses(health: object) -> None:
    async def scenario() -> None:
        def answer(_: httpx.Request) -> httpx.Response:
            return httpx.Response(200, text=json.dumps(health))

        workers = Workers([WorkerAddress("127.0.0.1", 1)])
        dispatcher, metrics = Dispatcher(workers, Queue(10), Eta(EtaConfig())), GatewayMetrics()
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), trust_env=False, verify=False) as http:
            await HealthWatch(dispatcher, metrics.record_worker_lost, http, 1.0)._poll(workers.all[0])
        for _ in range(3):
            dispatcher.submit("omni_duplex", "x")
        assert workers.n_slots >= len(workers.leases) >= 0
        here = Identity(address="127.0.0.1")
        service_status(dispatcher, here, draining=False, n_connections=0)
        json.dumps(
            jsonable_encoder([worker_info(workers.all[0], here), queue_status(dispatcher, here)]), allow_nan=False
        )
        metrics.render(dispatcher)

    run(scenario)


# --- messages of clients ----------------------------------------------------------------------------

TYPES = st.sampled_from(["prepare", "audio_chunk", "video_frame", "pause", "resume", "interrupt", "client_diagnostic"])
FIELDS = st.sampled_from(["audio_base64", "config", "spec", "force_listen", "frame_base64_list", "timeout", "x"])
MESSAGES = (
    st.text(max_size=50)
    | st.binary(max_size=50)
    | st.builds(lambda kind, fields: json.dumps({**fields, "type": kind}), TYPES, st.dictionaries(FIELDS, JSON))
    | JSON.map(json.dumps)
)


def test_arbitrary_messages_do_not_end_session(caplog: pytest.LogCaptureFixture) -> None:
    """The session continues after any message, and other sessions are not affected."""

    async def talk(messages: list[str | bytes]) -> None:
        async with FakeWorker(2) as worker, running_gateway(worker) as gateway:
            other = await (await gateway.connect("other")).prepared()
            client = await (await gateway.connect("fuzz")).prepared()
            for message in messages:
                await client.send(message)
            end = {"type": "no_such_thing", "n": len(messages)}
            await client.send(end)
            answers = []
            while True:
                data = await client.receive_raw()
                if isinstance(data, bytes):
                    continue
                answers.append(json.loads(data))
                if answers[-1].get("error", "") == "Unknown message type: no_such_thing":
                    break
                assert answers[-1]["type"] != "stopped", answers[-1]
            await client.send({"type": "resume"}, PREPARE, CHUNK)
            kinds = [json.loads(await client.receive_raw())["type"] for _ in range(3)]
            assert kinds == ["resumed", "prepared", "result"], f"expected the session to continue, got {kinds}"
            await other.unit()

    @settings(max_examples=3)
    @given(st.lists(MESSAGES.filter(lambda one: '"timeout"' not in str(one)), min_size=20, max_size=60))
    def fuzz(messages: list[str | bytes]) -> None:
        asyncio.run(talk(messages))

    with caplog.at_level(logging.ERROR):
        fuzz()
    errors = [record.getMessage() for record in caplog.records if record.name.startswith(("server", "uvicorn"))]
    assert not errors, f"expected no errors in the log, got {errors[:3]}"


def test_invalid_frames_end_only_their_session() -> None:
    async def scenario() -> None:
        async with FakeWorker(3) as worker, running_gateway(worker) as gateway:
            other = await (await gateway.connect("other")).prepared()
            for data in (b"\xff" * 20, b"\x81\x85\x00\x00\x00\x00\xff\xff\xff\xff\xff", b"\x81\x05hello"):
                client = await (await gateway.connect("broken")).prepared()
                client.socket.transport.write(data)
                code, _ = await client.wait_closed()
                assert code in (1002, 1007), f"{data!r}: expected a protocol error, got {code}"
            await other.unit()
            await wait_until(lambda: len(gateway.gateway.live) == 1, "the other connections to close")

    run(scenario)
