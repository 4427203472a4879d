"""The gateway's metrics of live conversations, and their documentation."""

import ast
import asyncio
import math
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serve.fake_worker import FakeWorker
from server.metrics import (
    DELAY_SECONDS,
    HEADROOM_SECONDS,
    PREFIX,
    RELAY_SECONDS,
    SESSION_SECONDS,
    STAGES,
    UNIT_SECONDS,
    WAIT_SECONDS,
    GatewayMetrics,
)
from tests.server.live_gateway import STOP, RunningGateway, running_gateway, wait_until
from tests.server.routes.asgi_gateway import IDLE, gateway_of
from worker.loop.results import NO_STAGES, StageTimes
from worker.protocol.codes import CloseReason
from worker.status import State

BUCKETS = {
    "units": UNIT_SECONDS,
    "headroom": HEADROOM_SECONDS,
    "relay": RELAY_SECONDS,
    "delay": DELAY_SECONDS,
    "wait": WAIT_SECONDS,
    "session": SESSION_SECONDS,
}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {
        (one.name.removeprefix(f"{PREFIX}_"), tuple(sorted(one.labels.items()))): one.value
        for family in families
        for one in family.samples
    }


async def scraped(running: RunningGateway) -> Samples:
    return samples((await running.http.get("/metrics")).text)


def assert_counted(got: Samples, *expected: tuple[str, dict[str, str], float]) -> None:
    for name, labels, value in expected:
        found = got.get((name, tuple(sorted(labels.items()))))
        assert found == value, f"{name}{labels}: expected {value}, got {found}"


def test_conversation_is_counted() -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(slots=1, n_listen=1, n_speak=2, think_s=0.02) as worker,
            running_gateway(worker) as running,
        ):
            client = await (await running.connect("adx_me")).prepared()
            for _ in range(3):
                await client.unit()
            await client.send("not JSON")
            await client.receive("error")
            assert_counted(
                await scraped(running),
                ("open_sessions", {"worker": "worker_0"}, 1),
                ("slots", {"kind": "total"}, 1),
                ("slots", {"kind": "free"}, 0),
                ("session_seconds_count", {"request_type": "audio_duplex"}, None),
            )
            waiting = await running.connect("omni_next")
            await waiting.receive("queued")
            assert_counted(await scraped(running), ("queue_length", {}, 1))
            await client.send(STOP)
            await client.receive("stopped")
            await client.wait_closed()
            await waiting.receive_until("queue_done")
            await waiting.close()
            await running.wait_idle()
            got = await scraped(running)
            assert_counted(
                got,
                ("units_total", {"request_type": "audio_duplex", "decision": "listen"}, 1),
                ("units_total", {"request_type": "audio_duplex", "decision": "speak"}, 2),
                ("unit_seconds_count", {"decision": "speak"}, 2),
                ("first_sound_seconds_count", {}, 2),
                ("lag_seconds_count", {}, 3),
                ("headroom_seconds_count", {}, 3),
                ("stage_seconds_count", {"stage": "decode"}, 3),
                ("relay_seconds_count", {"direction": "down"}, 6),
                ("errors_total", {"code": "bad_json"}, 1),
                ("sessions_total", {"request_type": "audio_duplex"}, 1),
                ("sessions_total", {"request_type": "omni_duplex"}, 1),
                ("session_seconds_count", {"request_type": "audio_duplex"}, 1),
                ("queue_wait_seconds_count", {}, 2),
                ("sessions_ended_total", {"how": "stopped"}, 1),
                ("sessions_ended_total", {"how": "client gone"}, 1),
                ("open_sessions", {"worker": "worker_0"}, 0),
                ("queue_length", {}, 0),
            )
            # A message received before the relay started is forwarded but not timed.
            up = got["relay_seconds_count", (("direction", "up"),)]
            assert 5 <= up <= 6, f"expected 3 chunks, invalid text, stop, and maybe prepare, got {up}"
            spent = got["unit_seconds_sum", (("decision", "speak"),)]
            assert 0.02 < spent < 10, f"expected seconds, got {spent}"

    asyncio.run(scenario())


def test_lost_worker_is_counted_once_and_is_offline() -> None:
    async def scenario() -> None:
        async with FakeWorker() as worker, running_gateway(worker) as running:
            client = await (await running.connect()).prepared()
            worker.crash()
            await client.receive("error")
            await wait_until(lambda: not running.gateway.dispatcher.workers.all[0].health, "the loss to be detected")
            await running.wait_idle()
            assert_counted(
                await scraped(running),
                ("workers_lost_total", {"worker": "worker_0"}, 1),
                ("errors_total", {"code": "worker_lost"}, 1),
                ("sessions_ended_total", {"how": "worker lost"}, 1),
                ("worker_state", {"worker": "worker_0", "state": "OFFLINE"}, 1),
                ("worker_state", {"worker": "worker_0", "state": "IDLE"}, 0),
                ("slots", {"kind": "total"}, 0),
            )

    asyncio.run(scenario())


def result(**fields: Any) -> dict[str, Any]:
    return {"is_listen": False, "wall_clock_ms": 130.0, "lag_ms": 2.0, "headroom_ms": 868.0, **fields}


def test_late_unit_is_a_miss_and_times_are_in_seconds() -> None:
    metrics, gateway = GatewayMetrics(), gateway_of(0)
    metrics.record_result(result(stages={"decode": 30.0, "first_sound": 60.0}), "omni_duplex")
    metrics.record_result(result(headroom_ms=-0.5), "omni_duplex")
    got = samples(metrics.render(gateway.dispatcher).decode())
    assert_counted(got, ("deadline_misses_total", {}, 1), ("first_sound_seconds_count", {}, 1))
    for name, labels, expected in (
        ("unit_seconds_sum", (("decision", "speak"),), 0.26),
        ("stage_seconds_sum", (("stage", "decode"),), 0.03),
        ("first_sound_seconds_sum", (), 0.06),
        ("lag_seconds_sum", (), 0.004),
    ):
        assert got[name, labels] == pytest.approx(expected), f"{name}: expected {expected}, got {got[name, labels]}"
    assert got["headroom_seconds_bucket", (("le", "0.0"),)] == 1, "expected only the late unit below 0"


@pytest.mark.parametrize(
    "odd", [None, "x", [], True, math.inf, math.nan, 10**400, {"decode": "x"}], ids=lambda one: str(one)[:9]
)
def test_result_with_invalid_fields_is_counted(odd: Any) -> None:
    metrics, gateway = GatewayMetrics(), gateway_of(0)
    metrics.record_result(
        result(wall_clock_ms=odd, lag_ms=odd, headroom_ms=odd, stages=odd, is_listen=odd), "omni_duplex"
    )
    metrics.record_result({"stages": {"first_sound": odd, "decode": odd, "unknown": 1.0}}, "omni_duplex")
    metrics.record_error("unknown code")
    got = samples(metrics.render(gateway.dispatcher).decode())
    assert sum(value for (name, _), value in got.items() if name == "units_total") == 2
    assert_counted(got, ("errors_total", {"code": "other"}, 1), ("unit_seconds_count", {"decision": "listen"}, None))
    assert not any(dict(labels).get("stage") == "unknown" for _, labels in got)


def test_compile_counters_and_memory_of_workers() -> None:
    gateway = gateway_of(1)
    health = {**IDLE, "compile": {"counts": {"graphs": 7}, "after_warm_up": {"graphs": 1}}, "memory": {"resident": 5}}
    gateway.dispatcher.workers.record_health(gateway.dispatcher.workers.all[0], health)
    assert_counted(
        samples(gateway.metrics.render(gateway.dispatcher).decode()),
        ("worker_compiled", {"worker": "worker_0", "what": "graphs"}, 7),
        ("worker_compiled_after_warm_up", {"worker": "worker_0", "what": "graphs"}, 1),
        ("worker_memory_bytes", {"worker": "worker_0", "kind": "resident"}, 5),
    )
    gateway.dispatcher.workers.record_loss(gateway.dispatcher.workers.all[0])
    got = samples(gateway.metrics.render(gateway.dispatcher).decode())
    assert not [name for name, _ in got if name.startswith("worker_compiled")], "expected no metric of a lost worker"
    ones = [labels for (name, labels), value in got.items() if name == "worker_state" and value]
    assert ones == [(("state", "OFFLINE"), ("worker", "worker_0"))], f"expected one state, got {ones}"
    assert sum(name == "worker_state" for name, _ in got) == len(State) + 1
    gateway.dispatcher.workers.remove(gateway.dispatcher.workers.all[0])
    got = samples(gateway.metrics.render(gateway.dispatcher).decode())
    assert not [labels for name, labels in got if name == "worker_state"], "expected no state of a removed worker"


# --- the documentation ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document(root: Path) -> str:
    return (
        (root / "docs" / "metrics.md").read_text(encoding="utf-8").split("\n## The gateway")[1].split("\n## Traces")[0]
    )


def rows(document: str) -> dict[str, tuple[str, set[str], str]]:
    """Name -> kind, labels, name of the buckets."""
    found = re.findall(r"^\| `(\w+)` \| (\w+)(?:, (\w+))? \|([^|]*)\|", document, re.M)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels)), buckets) for name, kind, buckets, labels in found}


def test_documentation_names_every_metric_and_no_other(document: str) -> None:
    registry = GatewayMetrics().registry
    collectors = set(registry._collector_to_names)
    expected = {}
    for collector in collectors:
        [family] = collector.collect() or [None]
        name = family.name.removeprefix(f"{PREFIX}_") + ("_total" if family.type == "counter" else "")
        expected[name] = (family.type, set(collector._labelnames))
    got = {name: (kind, labels) for name, (kind, labels, _) in rows(document).items()}
    assert got == expected, f"expected {expected}, got {got}"


def test_documentation_names_every_end_of_a_connection(document: str, root: Path) -> None:
    tree = ast.parse((root / "server/live/closes.py").read_text())
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    ends = {ast.literal_eval(one.args[2]) for one in calls if getattr(one.func, "id", "") == "SocketClose"}
    [given] = re.findall(r"^\| `sessions_ended_total` \| counter \| `how` ([^|]+) \|", document, re.M)
    documented, expected = set(given.split(", ")), ends | set(CloseReason)
    assert len(ends) > 10 and documented == expected, f"expected no difference, got {documented ^ expected}"


def test_documentation_lists_the_buckets(document: str) -> None:
    documented = dict(re.findall(r"^\| (\w+) \| (-?[0-9][-0-9., ]*) \|$", document, re.M))
    got = {name: tuple(float(one) for one in numbers.split(",")) for name, numbers in documented.items()}
    assert got == {name: tuple(map(float, bounds)) for name, bounds in BUCKETS.items()}, f"got {got}"
    named = {name: buckets for name, (kind, _, buckets) in rows(document).items() if kind == "histogram"}
    for collector in set(GatewayMetrics().registry._collector_to_names):
        name = collector._name.removeprefix(f"{PREFIX}_")
        if name in named:
            bounds = tuple(bound for bound in collector._kwargs["buckets"] if bound != math.inf)
            assert bounds == BUCKETS[named[name]], f"{name}: expected {bounds}, got {named[name]}"


def test_documentation_lists_every_stage(document: str) -> None:
    line = next(line for line in document.splitlines() if line.startswith("| `stage_seconds`"))
    documented = line.split("`stage` ")[1].split(" |")[0].split(", ")
    assert set(documented) == STAGES, f"expected {sorted(STAGES)}, got {documented}"
    measured = set(result_message_stages())
    assert measured == STAGES, f"expected every stage of a result, {sorted(measured)}, got {sorted(STAGES)}"


def result_message_stages() -> list[str]:
    """Stages that are complete when a result is sent."""
    return [name for name in StageTimes.__dataclass_fields__ if name not in {"finalize", *NO_STAGES}]
