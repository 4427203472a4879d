"""All HTTP routes except those of presets and pages: responses, and errors for invalid requests."""

import asyncio
import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import websockets

from benchmarks.serve.fake_worker import FakeWorker
from server.access.identity import Identity
from server.registry.apps import KNOWN
from server.routes.bodies import WorkerInfo
from server.routes.status_report import service_status
from tests.server.access.keyed_gateway import USER, bearer, user_and_admin
from tests.server.live_gateway import running_gateway, wait_until
from tests.server.routes.asgi_gateway import IDLE, asgi_client, gateway_of


async def fetch(path: str, *, health: dict[str, Any] | None = None, n_workers: int = 1) -> Any:
    gateway = gateway_of(n_workers)
    if health is not None:
        gateway.dispatcher.workers.record_health(gateway.dispatcher.workers.all[0], health)
    async with asgi_client(gateway) as http:
        return await http.get(path)


# --- the gateway and its workers ------------------------------------------------------------------


def test_probes_before_first_health_poll() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of(2)) as http:
            assert (await http.get("/livez")) == {"alive": True}
            health = await http.get("/health")
            assert health["status"] == "healthy" and datetime.fromisoformat(health["timestamp"])
            ready = await http.get("/readyz", 503)
            expected = {"ready": False, "total_workers": 2, "ready_workers": 0, "free_slots": 0, "total_slots": 0}
            assert expected.items() <= ready.items(), f"expected {expected}, got {ready}"

    asyncio.run(scenario())


def test_health_says_why_a_worker_is_down(tmp_path: Path) -> None:
    """The text may come from a log, so that requests without a key do not get it."""
    report = {"state": "waiting", "restarts": 3, "reason": "ended with exit status 1: no GPU", "next_start": 1e9}
    (tmp_path / "workers.json").write_text(json.dumps({"workers": {"worker_0": report}}))

    async def scenario() -> None:
        gateway = replace(gateway_of(config=user_and_admin(tmp_path)), log_folder=tmp_path)
        async with asgi_client(gateway) as http:
            known = (await http.request("GET", "/health", headers=bearer(USER))).json()
            assert known["workers"] == {"worker_0": report}
            assert (await http.get("/health"))["workers"] == {"worker_0": {**report, "reason": ""}}
            (tmp_path / "workers.json").write_text("{")
            assert (await http.get("/health"))["workers"] == {}

    asyncio.run(scenario())


def test_ready_until_draining() -> None:
    async def scenario() -> None:
        gateway = gateway_of()
        gateway.dispatcher.workers.record_health(gateway.dispatcher.workers.all[0], IDLE)
        async with asgi_client(gateway) as http:
            ready = await http.get("/readyz")
            assert (ready["ready"], ready["free_slots"], ready["total_slots"]) == (True, 2, 2), ready
            gateway.live.drain()
            assert (await http.get("/readyz", 503))["draining"] is True
            assert (await http.get("/livez")) == {"alive": True}, "expected a draining gateway to be alive"

    asyncio.run(scenario())


def test_workers_route_copies_health() -> None:
    health = {**IDLE, "state": "LOADING", "worker_status": "loading", "error": None}
    health["progress"] = {"what": "weights", "done": 3, "total": 7, "seconds": 1.5}
    found = asyncio.run(fetch("/workers", health=health, n_workers=2))
    assert found["total"] == 2
    first, second = found["workers"]
    assert first["worker_id"] == "worker_0" and first["status"] == "loading" and first["state"] == "LOADING"
    assert first["progress"] == {"what": "weights", "done": 3, "total": 7, "seconds": 1.5}
    assert first["gpu_id"] == 3 and datetime.fromisoformat(first["last_heartbeat"])
    assert second["status"] == "offline" and second["last_heartbeat"] is None
    assert first.keys() == WorkerInfo.model_fields.keys()


INVALID_VALUES = (None, [], {"a": 1}, "x", -1, 1e400, True, "\ud800", 10**400)


def test_invalid_health_does_not_break_routes() -> None:
    keys = ("error", "progress", "avg_inference_time_ms", "gpu_id", "slots", "compile", "memory", "kv")

    async def scenario() -> None:
        gateway = gateway_of()
        async with asgi_client(gateway) as http:
            for value in INVALID_VALUES:
                progress = dict.fromkeys(("what", "done", "total", "seconds"), value)
                bodies = [{key: value} for key in keys] + [
                    {"progress": progress},
                    {"compile": {"counts": {"x": value}}},
                ]
                for health in bodies:
                    gateway.dispatcher.workers.record_health(gateway.dispatcher.workers.all[0], {**IDLE, **health})
                    for path in ("/status", "/workers", "/metrics"):
                        answer = await http.raw.get(path)
                        assert answer.status_code == 200, f"{path}, {health}: expected 200, got {answer.status_code}"

    asyncio.run(scenario())


def test_status_counts_every_worker_once() -> None:
    async def scenario() -> None:
        gateway = gateway_of(5)
        workers = gateway.dispatcher.workers
        workers.record_health(workers.all[0], IDLE)
        workers.record_health(workers.all[1], {**IDLE, "slots": {"total": 1, "free": 0}})
        assert not service_status(gateway.dispatcher, Identity(), draining=False, n_connections=0).random_weights
        workers.record_health(
            workers.all[1], {**IDLE, "slots": {"total": 1, "free": 0}, "model": {"random_weights": True}}
        )
        workers.record_health(workers.all[2], {**IDLE, "state": "COMPILING", "worker_status": "loading"})
        workers.record_health(workers.all[3], {**IDLE, "state": "FAILED", "worker_status": "error"})
        async with asgi_client(gateway) as http:
            got = await http.get("/status")
            cache = await http.get("/cache")
        names = ("idle", "busy", "duplex", "loading", "error", "offline")
        counts = {name: got[f"{name}_workers"] for name in names}
        assert counts == {"idle": 1, "busy": 1, "duplex": 0, "loading": 1, "error": 1, "offline": 1}
        assert (got["gateway_healthy"], got["total_workers"], got["slots"]["free"]) == (True, 5, 2)
        assert got["random_weights"] is True, got
        statuses = [one["status"] for one in cache["workers"]]
        assert statuses == ["idle", "idle", "loading", "error", "offline"], f"got {cache}"

    asyncio.run(scenario())


def test_live_session_appears_in_all_routes() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as running:
            client = await (await running.connect("adx_live")).prepared()
            await client.unit()
            await wait_until(lambda: running.gateway.dispatcher.workers.leases[0].n_units == 1, "a unit counted")
            status, queue = await running.get("/status"), await running.get("/api/queue")
            [task] = status["running_tasks"]
            assert queue["running_tasks"][0]["session_id"] == task["session_id"] == "adx_live"
            assert (task["request_type"], task["units"], task["worker_id"]) == ("audio_duplex", 1, "worker_0")
            assert task["elapsed_s"] >= 0 and task["estimated_remaining_s"] > 0 and not task["paused"]
            assert (status["idle_workers"], status["duplex_workers"], status["connections"]) == (0, 1, 1)
            [info] = (await running.get("/workers"))["workers"]
            assert (info["status"], info["sessions"], info["total_requests"]) == ("duplex_active", ["adx_live"], 1)
            waiting = await running.connect("omni_next")
            ticket = (await waiting.receive("queued"))["ticket_id"]
            item = (await running.get("/api/queue"))["items"][0]
            assert (item["ticket_id"], item["request_type"], item["position"]) == (ticket, "omni_duplex", 1)
            found = await running.get(f"/api/queue/{ticket}")
            assert found["found"] and found["ticket"]["cancelled"] is False, found
            assert (await running.http.delete(f"/api/queue/{ticket}")).json() == {"success": True}
            assert (await waiting.receive("error"))["code"] == "cancelled"
            assert (await running.get(f"/api/queue/{ticket}"))["found"] is False
            assert (await running.http.delete(f"/api/queue/{ticket}")).json() == {"success": False}
            assert "duologue_gateway_units_total" in (await running.http.get("/metrics")).text
            for one in (client, waiting):
                await one.close()
            await running.wait_idle()

    asyncio.run(scenario())


# --- estimates ------------------------------------------------------------------------------------


def test_omitted_estimate_is_kept() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            body = {"eta_chat_s": 20, "eta_streaming_s": None, "eta_duplex_s": 3, "anything": [1]}
            await http.put("/api/config/eta", {"eta_half_duplex_s": 77.5, "ema_alpha": 0.5})
            got = await http.put("/api/config/eta", body)
            config = got["config"]
            expected = {"eta_chat_s": 20, "eta_half_duplex_s": 77.5, "eta_audio_duplex_s": 120, "eta_omni_duplex_s": 90}
            assert expected.items() <= config.items(), f"expected {expected}, got {config}"
            assert (got["ema_alpha"], config["ema_alpha"]) == (0.5, 0.5)
            assert (config["eta_streaming_s"], config["eta_duplex_s"]) == (77.5, 90), "old names follow the new ones"
            assert got == await http.get("/api/config/eta")
            await http.put("/api/config/eta", {"ema_alpha": None})
            assert (await http.get("/api/config/eta"))["ema_alpha"] == 0.5

    asyncio.run(scenario())


def test_measured_durations_have_aliases() -> None:
    async def scenario() -> None:
        gateway = gateway_of()
        gateway.dispatcher.eta.record("omni_duplex", 42.04)
        async with asgi_client(gateway) as http:
            got = await http.get("/api/config/eta")
        assert (got["ema_omni_duplex_s"], got["ema_omni_duplex_samples"]) == (42.0, 1)
        assert (got["ema_duplex_s"], got["ema_duplex_samples"]) == (42.0, 1)
        assert (got["ema_chat_s"], got["ema_streaming_s"], got["ema_streaming_samples"]) == (None, None, 0)

    asyncio.run(scenario())


INVALID_BODIES = (
    '{"eta_chat_s": null}',
    '{"eta_chat_s": "15"}',
    '{"eta_chat_s": true}',
    '{"eta_chat_s": -1}',
    '{"eta_chat_s": 86401}',
    '{"eta_chat_s": NaN}',
    '{"eta_chat_s": 1e999}',
    '{"eta_chat_s": ' + "9" * 400 + "}",
    '{"eta_chat_s": ' + "9" * 5000 + "}",
    '{"ema_alpha": 1.5}',
    '{"eta_chat_s": "\\ud800"}',
    "[" * 30_000,
    "[]",
    "null",
    "{",
    "",
)


@pytest.mark.parametrize("body", INVALID_BODIES, ids=lambda text: repr(text[:40]))
def test_invalid_estimate_changes_nothing(body: str) -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            before = await http.get("/api/config/eta")
            headers = {"Content-Type": "application/json"}
            answer = await http.raw.put("/api/config/eta", content=body, headers=headers)
            assert answer.status_code in (400, 422), (
                f"expected 400 or 422, got {answer.status_code} {answer.text[:200]}"
            )
            assert answer.json()["detail"], f"expected a reason, got {answer.text}"
            assert await http.get("/api/config/eta") == before

    asyncio.run(scenario())


def test_error_does_not_repeat_input() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            answer = await http.request("PUT", "/api/config/eta", 422, json={"eta_chat_s": "me" * 9000})
            assert "meme" not in answer.text and len(answer.text) < 500, answer.text[:600]

    asyncio.run(scenario())


@pytest.mark.parametrize("chunked", [False, True])
def test_body_size_is_limited(chunked: bool) -> None:
    async def parts() -> Any:
        for _ in range(100):
            yield b" " * 1000

    async def scenario() -> None:
        gateway = gateway_of()
        async with asgi_client(gateway) as http:
            content = parts() if chunked else b" " * 100_000
            headers = {"Content-Type": "application/json"}
            answer = await http.request("PUT", "/api/config/eta", 413, content=content, headers=headers)
            assert "65536 bytes" in answer.json()["detail"], answer.text
            counted = gateway.metrics.registry.get_sample_value(
                "duologue_gateway_limits_total", {"limit": "body_bytes"}
            )
            assert counted == 1, f"expected one body above the limit, got {counted}"

    asyncio.run(scenario())


# --- apps -----------------------------------------------------------------------------------------


def test_apps_can_be_disabled_and_enabled() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            names = [app.app_id for app in KNOWN]
            assert [app["app_id"] for app in (await http.get("/api/apps"))["apps"]] == names
            assert names == ["turnbased", "half_duplex_audio", "omni", "audio_duplex"]
            got = await http.put("/api/admin/apps/omni", {"enabled": False})
            app = {"app_id": "omni", "name": "Omni Full-Duplex", "route": "/omni", "enabled": False}
            assert got == {"success": True, "app": app}, got
            assert [app["app_id"] for app in (await http.get("/api/apps"))["apps"]] == [
                one for one in names if one != "omni"
            ]
            switches = {app["app_id"]: app["enabled"] for app in (await http.get("/api/admin/apps"))["apps"]}
            assert switches == {name: name != "omni" for name in names}
            answer = await http.request("GET", "/omni", 302)
            assert answer.headers["location"] == "/" and answer.headers["cache-control"] == "no-store"
            assert answer.headers["set-cookie"].startswith("duologue_off=omni; Max-Age=10;"), answer.headers
            await http.request("GET", "/audio_duplex")
            await http.put("/api/admin/apps", {"app_id": "omni", "enabled": True})
            await http.request("GET", "/omni")
            assert len((await http.get("/api/apps"))["apps"]) == len(KNOWN)

    asyncio.run(scenario())


def test_unknown_app_is_404() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            for path, body in (
                ("/api/admin/apps/x", {"enabled": True}),
                ("/api/admin/apps", {"app_id": "x", "enabled": True}),
            ):
                assert await http.put(path, body, 404) == {"detail": "Unknown app: x"}
            for body in ({}, {"enabled": "no"}, {"enabled": 0}, [], None):
                await http.put("/api/admin/apps/omni", body, 422)
            assert len((await http.get("/api/apps"))["apps"]) == len(KNOWN)

    asyncio.run(scenario())


async def _refusal(running: Any, name: str) -> int:
    with pytest.raises(websockets.InvalidStatus) as refused:
        await running.connect(name)
    return refused.value.response.status_code


def test_sockets_of_disabled_app_are_refused() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=2) as worker, running_gateway(worker) as running:
            talking = await (await running.connect("adx_before")).prepared()
            await running.http.put("/api/admin/apps/audio_duplex", json={"enabled": False})
            for name in ("adx_me", "audio_duplex_me", "adx.me"):  # the last becomes adx_me
                got = await _refusal(running, name)
                assert got == 403, f"{name}: expected 403, got {got}"
            await (await (await running.connect("omni_me")).with_slot()).close()
            await talking.unit()
            await running.http.put("/api/admin/apps/audio_duplex", json={"enabled": True})
            await wait_until(
                lambda: len(running.gateway.dispatcher.workers.leases) == 1, "the slot of the closed session"
            )
            await (await (await running.connect("adx_me")).with_slot()).close()
            await talking.close()
            await running.wait_idle()

    asyncio.run(scenario())


# --- origins, HEAD and errors -----------------------------------------------------------------------


def test_foreign_origins_cannot_change_state() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            foreign = {"Origin": "https://foreign.example"}
            for method, path in (
                ("PUT", "/api/config/eta"),
                ("PUT", "/api/admin/apps/omni"),
                ("DELETE", "/api/queue/x"),
            ):
                answer = await http.request(method, path, 403, headers=foreign)
                assert "foreign.example" in answer.json()["detail"]
            await http.request("PUT", "/api/config/eta", headers={"Origin": "http://localhost"}, json={})
            answer = await http.request("GET", "/api/apps", headers=foreign)
            assert not [name for name in answer.headers if name.startswith("access-control")]

    asyncio.run(scenario())


def test_head_matches_get() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            paths = [path for path, methods in http.app.openapi()["paths"].items() if "get" in methods]
            assert len(paths) > 10
            for path in paths:
                path = re.sub(r"\{[a-z_:]+\}", "none", path)
                whole, head = await http.raw.get(path), await http.raw.head(path)
                assert (head.status_code, head.content) == (whole.status_code, b""), f"{path}: got {head}"
                assert head.headers["content-type"] == whole.headers["content-type"], path
                if path not in ("/metrics", "/health"):
                    assert head.headers["content-length"] == str(len(whole.content)), path

    asyncio.run(scenario())


def test_errors_are_json() -> None:
    async def scenario() -> None:
        gateway = gateway_of()
        async with asgi_client(gateway) as http:
            for method, path, status in (
                ("GET", "/nothing", 404),
                ("GET", "/api/queue/a/b", 404),
                ("POST", "/health", 405),
                ("PATCH", "/api/config/eta", 405),
                ("GET", "/api/admin/apps/omni", 405),
            ):
                answer = await http.request(method, path, status)
                assert answer.json().keys() == {"detail"}, f"{method} {path}: got {answer.text}"
            object.__setattr__(gateway.dispatcher.eta, "measured", None)  # causes an internal error
            broken = await http.request("GET", "/api/config/eta", 500)
            assert broken.json() == {"detail": "Internal server error"}

    asyncio.run(scenario())
