"""Items of the conformance list that the gateway answers for: transport, queue, status, apps and administration."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.exceptions import InvalidStatus

from server.dispatch.eta import EtaConfig
from server.live import slot_wait
from tests.conformance.servers import Servers, WireClient
from tests.worker.http.client_scripts import base64_of
from tests.worker.http.small_worker import N_SLOTS, cancels_one
from worker.protocol.connection import MAX_MESSAGE

CHUNK = base64_of(np.zeros(16_000, np.float32))
SHORT = base64_of(np.zeros(800, np.float32))
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "streaming": True, "generation": {"max_new_tokens": 4}}
MIN_SAMPLES = EtaConfig().min_samples
SOON_S = 20.0
UPDATE_S = 3.0  # `queue_update` arrives at least this often


@pytest.fixture(autouse=True)  # each test begins with all slots free
def http(servers: Servers) -> Iterator[httpx.Client]:
    base = f"http://127.0.0.1:{servers.gateway}"
    with httpx.Client(base_url=base, timeout=60, trust_env=False, verify=False) as client:

        def is_idle() -> bool:
            status = client.get("/status").json()
            # A client that closes while it waits may still get a slot until the gateway has read that.
            return (status["slots"]["free"], status["queue_length"], status["connections"]) == (N_SLOTS, 0, 0)

        wait(is_idle, "all slots to be free and no client")
        yield client


def wait(holds: Any, what: str, seconds: float = SOON_S) -> None:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds, f"expected {what} within {seconds:g} s"
        time.sleep(0.05)


@contextmanager
def full(servers: Servers, prefix: str = "omni") -> Iterator[list[WireClient]]:
    """Sessions in all slots."""
    with ExitStack() as stack:
        clients = [stack.enter_context(servers.open(f"/ws/duplex/{prefix}_{index}")) for index in range(N_SLOTS)]
        for client in clients:
            client.until("queue_done")  # it waits while a worker still frees the slots of an earlier session
        yield clients


def test_item_01_frames_of_100_mib_are_forwarded(servers: Servers) -> None:
    """Of 100 MiB and more: the largest that are accepted."""
    text = json.dumps({**CHAT, "unknown": ""})
    with servers.open("/ws/chat") as client:
        client.connection.send(text.replace('"unknown": "', '"unknown": "' + "A" * (MAX_MESSAGE - len(text))))
        kinds = [message["type"] for message in client.until("done")]
        assert kinds[:2] == ["queue_done", "prefill_done"], f"got {kinds}"
        assert client.close_code() == 1000


def kinds_without_places(messages: list[dict[str, Any]]) -> list[str]:
    return [one["type"] for one in messages if one["type"] not in ("queued", "queue_update")]


def test_item_02_prepare_before_the_queue_frames_runs_once(servers: Servers, http: httpx.Client) -> None:
    paths = {"/ws/half_duplex/hdx_2": {"system_content": []}, "/ws/duplex/d2": {"config": {}}}
    with full(servers) as running, ExitStack() as stack:
        clients = [stack.enter_context(servers.open(path)) for path in paths]
        for client, fields in zip(clients, paths.values(), strict=True):
            client.send(type="prepare", **fields)
            client.until("queued")
        for one in running[:2]:
            one.connection.close()
        for client in clients:
            assert kinds_without_places(client.until("prepared")) == ["queue_done", "prepared"]
        for client in clients:
            client.silence(0.15)


@pytest.mark.parametrize("path", ["/ws/duplex/omni_3", "/ws/duplex/adx_3", "/ws/half_duplex/hdx_3"])
def test_item_03_queue_done_comes_first(servers: Servers, http: httpx.Client, path: str) -> None:
    with servers.open(path) as client:
        assert client.receive() == {"type": "queue_done"}
        client.send(type="prepare")
        assert client.receive()["type"] == "prepared"


def test_item_04_queued_clients_are_kept_informed(servers: Servers, http: httpx.Client) -> None:
    with full(servers) as running, ExitStack() as stack:
        for place in (1, 2):
            client = stack.enter_context(servers.open(f"/ws/duplex/d{place}"))
            queued = client.receive()
            assert {"type": "queued", "position": place, "queue_length": place}.items() <= queued.items(), queued
            assert queued["ticket_id"].startswith("q_") and queued["estimated_wait_s"] > 0, f"got {queued}"
        running[0].connection.close()
        place = 2
        while place == 2:
            update = client.until("queue_update")[-1]
            assert update["position"] in (place, place - 1) and update["estimated_wait_s"] >= 0, f"got {update}"
            place = update["position"]
        assert client.until("queue_update")[-1]["position"] == 1, "expected updates that go on"
    assert slot_wait.UPDATE_S < UPDATE_S


def test_item_05_closing_frees_the_ticket(servers: Servers, http: httpx.Client) -> None:
    with full(servers), servers.open("/ws/duplex/d1") as first, servers.open("/ws/duplex/d2") as second:
        assert [client.until("queued")[-1]["queue_length"] for client in (first, second)] == [1, 2]
        first.connection.close()
        updates = second.until("queue_update")
        if updates[-1]["position"] == 2:  # sent before the gateway knew
            updates += second.until("queue_update")
        assert (updates[-1]["position"], updates[-1]["queue_length"]) == (1, 1), f"got {updates}"


def test_item_06_unknown_fields_and_aliases(servers: Servers) -> None:
    with servers.open("/ws/duplex/omni_6") as client:
        client.send(type="prepare", prefix_system_prompt="Be kind.", config={"max_kv_tokens": 8000, "x": 1}, other=[1])
        assert client.until("prepared")[-1]["prompt_length"] > 0
        client.send(type="audio_chunk", audio=CHUNK, video_frames=[], other={"a": 1})
        assert client.receive()["type"] == "result"
    with servers.open("/ws/chat") as client:
        client.send(**CHAT, other=1, omni_mode=False)
        assert client.until("done")[-1]["generated_tokens"] >= 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("omni_15", "omni_duplex"),
        ("d15", "omni_duplex"),
        ("adx_15", "audio_duplex"),
        ("audio_duplex_15", "audio_duplex"),
    ],
)
def test_item_15_ids_decide_the_type(servers: Servers, http: httpx.Client, name: str, kind: str) -> None:
    with servers.open(f"/ws/duplex/{name}") as client:
        client.until("queue_done")
        [task] = http.get("/status").json()["running_tasks"]
        assert (task["session_id"], task["request_type"]) == (name, kind), f"got {task}"


def test_item_15_waiting_ids_decide_the_type(servers: Servers, http: httpx.Client) -> None:
    with full(servers), ExitStack() as stack:
        paths = {"/ws/duplex/adx_w": "audio_duplex", "/ws/duplex/omni_w": "omni_duplex"}
        paths["/ws/half_duplex/hdx_w"] = "half_duplex_audio"
        for path in paths:
            stack.enter_context(servers.open(path)).until("queued")
        items = http.get("/api/queue").json()["items"]
        assert [one["request_type"] for one in items] == list(paths.values()), f"got {items}"


def test_item_17_diagnostics_get_no_reply(servers: Servers) -> None:
    with servers.open("/ws/duplex/omni_17") as client:
        client.send(type="prepare", config={})
        client.until("prepared")
        client.send(type="client_diagnostic", event="gap", ms=12)
        client.silence(0.3)
        client.send(type="audio_chunk", audio_base64=CHUNK)
        assert client.receive()["type"] == "result"


def test_item_31_closing_stops_generation(servers: Servers, http: httpx.Client) -> None:
    request = {**CHAT, "generation": {"max_new_tokens": 2000, "length_penalty": 5, "temperature": 0}}
    with cancels_one(servers.worker), servers.open("/ws/chat") as client:
        client.send(**request)
        client.until("chunk")
    wait(lambda: http.get("/status").json()["slots"]["free"] == N_SLOTS, "the slot to be free at the gateway")


def test_item_32_status_while_waiting(servers: Servers, http: httpx.Client) -> None:
    with full(servers), servers.open("/ws/chat") as waiting:
        waiting.send(**CHAT)
        waiting.until("queued")
        status = http.get("/status").json()
        assert (status["idle_workers"], status["total_workers"], status["queue_length"]) == (0, 1, 1), f"got {status}"
        assert len(status["running_tasks"]) == N_SLOTS
        assert all(task["estimated_remaining_s"] >= 0 for task in status["running_tasks"]), f"got {status}"


def test_item_35_disabled_app(servers: Servers, http: httpx.Client) -> None:
    sockets = {"turnbased": "/ws/chat", "half_duplex_audio": "/ws/half_duplex/h", "audio_duplex": "/ws/duplex/adx_1"}
    routes = {app["app_id"]: app["route"] for app in http.get("/api/apps").json()["apps"]}
    for app, path in sockets.items():
        assert http.put(f"/api/admin/apps/{app}", json={"enabled": False}).json()["app"]["enabled"] is False
        try:
            page = http.get(routes[app])
            assert (page.status_code, page.headers["location"]) == (302, "/"), f"{app}: got {page}"
            assert app not in {one["app_id"] for one in http.get("/api/apps").json()["apps"]}
            with pytest.raises(InvalidStatus) as refused, servers.open(path):
                pass
            assert refused.value.response.status_code == 403
            if app == "turnbased":
                assert http.post("/api/chat", json=CHAT).status_code == 403
        finally:
            http.put("/api/admin/apps", json={"app_id": app, "enabled": True})
        with servers.open(path):
            assert http.get("/api/apps").json()["apps"][-1]["app_id"] == "audio_duplex"


def test_item_36_administration(servers: Servers, http: httpx.Client) -> None:
    [worker] = http.get("/workers").json()["workers"]
    assert worker["status"] == "idle", f"got {worker}"
    before = http.get("/api/config/eta").json()["config"]
    saved = http.put("/api/config/eta", json={"eta_chat_s": 16.0, "eta_streaming_s": None, "eta_x": 1})
    assert saved.status_code == 200
    after = saved.json()["config"]
    assert after == {**before, "eta_chat_s": 16.0}, f"got {after}"
    http.put("/api/config/eta", json={"eta_chat_s": before["eta_chat_s"]})
    with full(servers), servers.open("/ws/duplex/omni_36") as waiting:
        ticket = waiting.until("queued")[-1]["ticket_id"]
        assert http.get(f"/api/queue/{ticket}").json()["found"] is True
        assert http.delete(f"/api/queue/{ticket}").json() == {"success": True}
        assert waiting.until("error")[-1]["code"] == "cancelled"
        assert waiting.close_code() == 1013


def test_item_40_duplex_of_the_tests(servers: Servers) -> None:
    for config in ({}, {"max_kv_tokens": 8000}):
        with servers.open("/ws/duplex/d1") as client:
            assert client.receive() == {"type": "queue_done"}
            client.send(type="prepare", system_prompt="mock test", config=config)
            assert client.receive()["type"] == "prepared"
            for _ in range(3):
                client.send(type="audio_chunk", audio_base64=SHORT)
                assert client.receive()["type"] == "result"
            client.send(type="stop")
            assert client.receive()["type"] == "stopped"
            assert client.close_code() == 1000


def test_item_44_estimates_follow_the_rule(servers: Servers, http: httpx.Client) -> None:
    """Each waiting session takes the slot that is expected to be free first, and keeps it for its type's duration."""
    with full(servers), ExitStack() as stack:
        names = [f"/ws/duplex/adx_{index}" for index in range(N_SLOTS + 2)]
        queued = [stack.enter_context(servers.open(name)).until("queued")[-1] for name in names]
        queue = http.get("/api/queue").json()
        ends = sorted(task["estimated_remaining_s"] for task in queue["running_tasks"])
        eta = http.get("/api/config/eta").json()
        is_measured = eta["ema_audio_duplex_samples"] >= MIN_SAMPLES  # by sessions of other tests of these servers
        duration = eta["ema_audio_duplex_s"] if is_measured else eta["config"]["eta_audio_duplex_s"]
        expected = [*ends, ends[0] + duration, ends[1] + duration]
        for got in ([one["estimated_wait_s"] for one in messages] for messages in (queued, queue["items"])):
            assert np.allclose(got, expected, atol=0.5), f"expected {expected}, got {got}"
        assert [one["eta_seconds"] for one in queued] == [one["estimated_wait_s"] for one in queued]


def test_item_41_chat_over_http_and_turns(servers: Servers, http: httpx.Client) -> None:
    request = {**CHAT, "generation": {"max_new_tokens": 4, "do_sample": False}}
    answer = http.post("/api/chat", json=request).json()
    assert answer["success"] is True and answer["tokens_generated"] <= 4, f"got {answer}"
    assert type(answer["queue_wait_ms"]) is int and answer["estimated_queue_wait_s"] == 0, f"got {answer}"
    with servers.open("/ws/streaming/s1") as client:
        messages = CHAT["messages"]
        for n in (1, 2):
            client.send(type="prefill", messages=messages, session_id="s1", is_last_chunk=True)
            kinds = [message["type"] for message in client.until("prefill_done")]
            assert kinds == ["queue_done", "prefill_done"], f"turn {n}: got {kinds}"
            client.send(type="generate", session_id="s1", generate_audio=False, max_new_tokens=4)
            done = client.until("done")[-1]
            assert (done["session_id"], done["stopped"]) == ("s1", False), f"turn {n}: got {done}"
            wait(lambda: http.get("/status").json()["slots"]["leased"] == 0, "no slot between turns")
            messages = [*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "Again"}]
        assert http.get("/sessions").json()["total"] == 1
        client.send(type="close")
        assert client.close_code() == 1000


def test_item_41_stop_ends_a_turn(servers: Servers, http: httpx.Client) -> None:
    with servers.open("/ws/streaming/s2") as client:
        client.send(type="prefill", **{"messages": CHAT["messages"]})
        client.until("prefill_done")
        client.send(type="generate", generate_audio=False, max_new_tokens=2000, length_penalty=5)
        client.until("chunk")
        stopped = http.post("/api/streaming/stop", json={"session_id": "s2"}).json()
        assert stopped == {"success": True, "stopped": ["s2"], "message": "Stopped"}, f"got {stopped}"
        assert client.until("done")[-1]["stopped"] is True
