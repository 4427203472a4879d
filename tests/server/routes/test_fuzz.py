"""Whatever workers say of themselves and clients say at all: it breaks nothing but its own answer."""

import asyncio
import json
import logging

import httpx
import pytest
from fastapi.encoders import jsonable_encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serve.fake_worker import FakeWorker
from server.dispatch.dispatcher import Dispatcher
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import WorkerAddress, Workers
from server.health_watch import Watch
from server.metrics import GatewayMetrics
from server.routes.status_report import queue_status, service_status, worker_info
from tests.server.gateways import CHUNK, PREPARE, run, running_gateway, until

# --- what workers may say of themselves -------------------------------------------------------------

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
def test_whatever_a_worker_says_of_itself(health: object) -> None:
    async def story() -> None:
        def answer(_: httpx.Request) -> httpx.Response:
            return httpx.Response(200, text=json.dumps(health))

        workers = Workers([WorkerAddress("127.0.0.1", 1)])
        dispatcher, metrics = Dispatcher(workers, Queue(10), Eta(EtaConfig())), GatewayMetrics()
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), trust_env=False, verify=False) as asking:
            await Watch(dispatcher, metrics, asking, 1.0)._ask(workers.all[0])
        for _ in range(3):
            dispatcher.arrive("omni_duplex", "x")
        assert workers.n_slots >= len(workers.leases) >= 0
        service_status(dispatcher, draining=False, n_connections=0)
        json.dumps(jsonable_encoder([worker_info(workers.all[0]), queue_status(dispatcher)]), allow_nan=False)
        metrics.text(dispatcher)

    run(story)


# --- what clients may say ---------------------------------------------------------------------------

TYPES = st.sampled_from(["prepare", "audio_chunk", "video_frame", "pause", "resume", "interrupt", "client_diagnostic"])
FIELDS = st.sampled_from(["audio_base64", "config", "spec", "force_listen", "frame_base64_list", "timeout", "x"])
SPOKEN = (
    st.text(max_size=50)
    | st.binary(max_size=50)
    | st.builds(lambda kind, fields: json.dumps({**fields, "type": kind}), TYPES, st.dictionaries(FIELDS, JSON))
    | JSON.map(json.dumps)
)


def test_whatever_clients_say(caplog: pytest.LogCaptureFixture) -> None:
    """No message breaks more than its own answer; the session goes on, and others are not disturbed."""

    async def talk(messages: list[str | bytes]) -> None:
        async with FakeWorker(2) as worker, running_gateway(worker) as gateway:
            other = await (await gateway.connect("other")).prepared()
            client = await (await gateway.connect("fuzz")).prepared()
            for message in messages:
                await client.say(message)
            end = {"type": "no_such_thing", "n": len(messages)}
            await client.say(end)
            answers = []
            while True:
                data = await client.hear_raw()
                if isinstance(data, bytes):
                    continue
                answers.append(json.loads(data))
                if answers[-1].get("error", "") == "Unknown message type: no_such_thing":
                    break
                assert answers[-1]["type"] != "stopped", answers[-1]
            await client.say({"type": "resume"}, PREPARE, CHUNK)
            heard = [json.loads(await client.hear_raw())["type"] for _ in range(3)]
            assert heard == ["resumed", "prepared", "result"], f"expected a session that goes on, got {heard}"
            await other.unit()

    @settings(max_examples=5)
    @given(st.lists(SPOKEN.filter(lambda one: '"timeout"' not in str(one)), min_size=20, max_size=60))
    def fuzz(messages: list[str | bytes]) -> None:
        asyncio.run(talk(messages))

    with caplog.at_level(logging.ERROR):
        fuzz()
    faults = [record.getMessage() for record in caplog.records if record.name.startswith(("server", "uvicorn"))]
    assert not faults, f"expected no errors in the log, got {faults[:3]}"


def test_frames_that_are_none_end_only_their_sender() -> None:
    async def story() -> None:
        async with FakeWorker(3) as worker, running_gateway(worker) as gateway:
            other = await (await gateway.connect("other")).prepared()
            for data in (b"\xff" * 20, b"\x81\x85\x00\x00\x00\x00\xff\xff\xff\xff\xff", b"\x81\x05hello"):
                client = await (await gateway.connect("broken")).prepared()
                client.socket.transport.write(data)
                code, _ = await client.closed()
                assert code in (1002, 1007), f"{data!r}: expected a protocol error, got {code}"
            await other.unit()
            await until(lambda: len(gateway.gateway.duplex.connections) == 1, "the others to be gone")

    run(story)
