"""`start_all.sh` as users run it, from the settings file of the public implementation: items 45 and 46 of the
conformance list, a conversation, the queue, logs without content, and the end of all programs.

All tests of this file share one start and run in this order. The last one ends it. A worker that starts compiled, from
the cache of `precompile.py`, is in tests/worker/http/test_life.py.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from clients import duplex
from launcher.preflight import port_owner
from tests.conformance.servers import WireClient
from tests.launcher.processes import Launched, free_ports, launcher
from tests.server.doors.dialects.minicpm_o.mode_client import wav_text
from tests.worker.config.public_files import EXAMPLE
from tests.worker.http.client_scripts import QUIET, VIDEO, assert_audible, chunk, sound_of
from worker.protocol.gateway_messages import Queued, QueueUpdate
from worker.protocol.messages import Result

pytestmark = pytest.mark.slow
START_S, TALK_S, FREE_S = 200.0, 120.0, 10.0
MARK = "Zq7private"  # in everything that no log may hold
N_WORKERS = 2  # with one slot each
MAX_ANSWERS = 6  # that are read of one connection: some sessions send sound without end
SESSION = {"model": "gpt-realtime", "instructions": f"{MARK} words"}
MESSAGES = [{"role": "user", "content": f"{MARK} question"}]
# Every socket and route that takes content, with a first message or a body. What they say of it is tested elsewhere.
SOCKETS: dict[str, dict[str, Any]] = {
    "/ws/duplex/content": {"type": "prepare", "system_prompt": MARK, "ref_audio_base64": MARK},
    "/ws/duplex/content?resume=1": {"type": "resume_session", "token": MARK, "received": 0},
    "/ws/half_duplex/content": {"type": "prepare", "system_content": MESSAGES, "config": {"tts": MARK}},
    "/ws/chat": {"messages": MESSAGES, "tts": {"ref_audio_data": MARK}},
    "/ws/streaming": {"type": "prefill", "messages": MESSAGES, "session_id": "content"},
    "/v1/realtime": {"type": "session.update", "session": {"type": "realtime", "instructions": MARK, "tools": [MARK]}},
    "/v1/realtime?mode=video": {"type": "session.init", "payload": {"system_prompt": MARK, "ref_audio_base64": MARK}},
    "/v1/duplex": {"type": "session.update", "session": {"instructions": MARK, "voice": f"{MARK} voice"}},
    "/v1/live/sessions": {"type": "session.start", "session": SESSION},
    "/v1/audio/speech/stream": {"type": "session.config", "voice": f"{MARK} voice", "instructions": MARK},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "gpt-realtime", "messages": MESSAGES, "max_tokens": 2},
    "/v1/audio/speech": {"input": f"{MARK} text", "voice": f"{MARK} voice", "response_format": MARK},
    "/v1/audio/conversions": {"voice": f"{MARK} voice"},
    "/v1/realtime/client_secrets": {"session": {"type": "realtime", **SESSION}},
    "/v1/realtime/calls": {"sdp": MARK, "session": SESSION},
    "/v1/live/sessions": {"sdp": MARK, "session": SESSION},
    "/api/chat": {"messages": MESSAGES, "generation": {"max_new_tokens": 2}},
    "/api/assets/ref_audio": {"name": f"{MARK} voice", "audio_base64": MARK},
    "/api/sessions/content/comment": {"comment": MARK},
}


@pytest.fixture(scope="module")
def ports() -> list[int]:
    """Of the gateway and the workers."""
    return free_ports(1 + N_WORKERS)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("start") / "logs"


@pytest.fixture(scope="module")
def launched(ports: list[int], logs: Path) -> Iterator[Launched]:
    """Everything started. The file is unchanged; flags and variables select free ports and the embedded checkpoint."""
    folder = logs.parent
    (folder / "config.json").write_text(json.dumps(EXAMPLE))
    environ = {
        "DUOLOGUE_MODEL_DEVICE": "cpu",
        "DUOLOGUE_SERVICE_MAX_WARMUP_CHUNKS": "2",
        "DUOLOGUE_SERVICE_DRAIN_TIMEOUT_S": "5",
        "DUOLOGUE_SERVICE_CACHE_DIR": str(folder / "compiled"),
        "DUOLOGUE_SERVICE_DATA_DIR": str(folder / "data"),
    }
    flags = ["--http", "--config", str(folder / "config.json"), "--log-dir", str(logs), "--model-path", "assets/tiny"]
    flags += ["--port", str(ports[0]), "--worker-base-port", str(ports[1]), "--num-workers", str(N_WORKERS)]
    command = ("bash", "start_all.sh")
    with launcher(*flags, "--max-sessions", "1", command=command, environ=environ) as process:
        process.wait_line(f"gateway  answers at http://localhost:{ports[0]}", timeout=START_S)
        process.wait_line("^ready: ", timeout=START_S)
        yield process


@pytest.fixture
def http(launched: Launched, ports: list[int]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=30, trust_env=False) as client:
        yield client


def test_item_45_one_command_starts_workers_and_gateway(
    launched: Launched, http: httpx.Client, ports: list[int], logs: Path
) -> None:
    for index, port in enumerate(ports[1:]):
        launched.wait_line(rf"worker {index} \(CPU\)  ready in .*\(loading .*\): 1 slot, cpu", timeout=START_S)
        assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).json()["model_loaded"] is True
    ready = launched.wait_line("^ready: ")
    assert ready.startswith(f"ready: http://localhost:{ports[0]}  ("), ready
    assert http.get("/health").json()["status"] == "healthy"
    names = ["gateway", *(f"worker_{index}" for index in range(N_WORKERS))]
    assert {f"{name}.pid" for name in names} <= {path.name for path in logs.glob("*.pid")}
    assert "listening on" in (logs / "gateway.log").read_text()
    assert all("IDLE" in (logs / f"{name}.log").read_text() for name in names[1:])
    who, remedy = port_owner(ports[0], logs.parent)
    assert str(launched.process.pid) in who and f"kill {launched.process.pid}" in remedy, (who, remedy)


def test_item_46_settings_file_of_the_public_implementation(
    launched: Launched, http: httpx.Client, ports: list[int]
) -> None:
    status = http.get("/status").json()
    assert (status["total_workers"], status["max_queue_size"]) == (N_WORKERS, EXAMPLE["service"]["max_queue_size"])
    eta = http.get("/api/config/eta").json()["config"]
    assert eta["eta_omni_duplex_s"] == EXAMPLE["service"]["eta_omni_duplex_s"]
    with connect(f"ws://127.0.0.1:{ports[0]}/ws/duplex/omni_46", proxy=None, max_size=None) as connection:
        client = WireClient(connection)
        client.send(type="prepare", config=QUIET)
        assert [one["type"] for one in client.until("prepared")] == ["queue_done", "prepared"]
        client.send(**chunk())
        assert client.receive()["type"] == "result"


def wait_free(http: httpx.Client) -> dict[str, Any]:
    """Wait until all slots are free. Returns: /status."""
    until = time.monotonic() + FREE_S
    while (status := http.get("/status").json())["slots"]["free"] != N_WORKERS:
        assert time.monotonic() < until, f"expected {N_WORKERS} free slots, got {status}"
        time.sleep(0.05)
    return status


def test_client_gets_an_audible_reply(http: httpx.Client, ports: list[int], root: Path, tmp_path: Path) -> None:
    wait_free(http)
    out = tmp_path / "reply.wav"
    command = [sys.executable, "-m", "clients.talk", "--url", f"ws://127.0.0.1:{ports[0]}", "--input", str(VIDEO)]
    done = subprocess.run(
        [*command, "--out", str(out), "--units", "6", "--fast", "--tail", "0"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=TALK_S,
    )
    assert done.returncode == 0, f"expected exit status 0, got {done.returncode}:\n{done.stdout}\n{done.stderr}"
    numbers = [unit["index"] for unit in json.loads(out.with_suffix(".json").read_text())["units"]]
    assert numbers == list(range(6)), f"expected one result for each of 6 units in order, got {numbers}"
    assert_audible(out)
    wait_free(http)


def test_waiting_sessions_are_served_in_order(http: httpx.Client, ports: list[int]) -> None:
    """Two sessions run, three wait: each gets its position, and then the slot that becomes free, in order."""
    positions_of: dict[int, list[tuple[str, int]]] = {number: [] for number in range(5)}
    served: list[int] = []

    async def talk(number: int, arrived: asyncio.Event, until: asyncio.Event | None) -> None:
        def place(message: Queued | QueueUpdate) -> None:
            positions_of[number].append((message.type, message.position))
            arrived.set()

        async with duplex.connect(f"ws://127.0.0.1:{ports[0]}", f"omni_{number}", on_queue=place) as client:
            served.append(number)
            arrived.set()
            await client.prepare(config=QUIET)
            await client.send_unit(sound_of(number))
            result = await anext(client)
            assert isinstance(result, Result), f"expected a result, got {result!r}"
            if until is not None:
                await until.wait()
            await client.stop()

    async def all_of_them() -> None:
        all_here, others_done = asyncio.Event(), asyncio.Event()
        until = {0: all_here, 1: others_done}
        talks = []
        for number in positions_of:
            arrived = asyncio.Event()
            talks.append(asyncio.create_task(talk(number, arrived, until.get(number))))
            await asyncio.wait_for(arrived.wait(), 30)
        queue = (await asyncio.to_thread(http.get, "/api/queue")).json()
        waiting = [item["session_id"] for item in queue["items"]]
        assert waiting == ["omni_2", "omni_3", "omni_4"], f"expected three waiting clients in order, got {waiting}"
        all_here.set()
        await asyncio.wait_for(asyncio.gather(talks[0], *talks[N_WORKERS:]), 60)
        others_done.set()
        await asyncio.wait_for(talks[1], 60)

    wait_free(http)
    asyncio.run(all_of_them())
    assert served == [0, 1, 2, 3, 4], f"expected to be served in the order of arrival, got {served}"
    for number in range(N_WORKERS, 5):
        positions = [position for _, position in positions_of[number]]
        assert positions_of[number][0] == ("queued", number - N_WORKERS + 1), (
            f"client {number}: got {positions_of[number]}"
        )
        assert positions == sorted(positions, reverse=True), f"client {number}: expected to move up, got {positions}"
    status = wait_free(http)
    assert (status["queue_length"], status["running_tasks"]) == (0, []), status


def test_sends_content_keys_and_voice_names_that_no_log_may_hold(http: httpx.Client, ports: list[int]) -> None:
    """What the next test looks for in the logs: input that is accepted and input that is refused."""
    key = f"duo_{MARK}{'k' * 40}"
    uploaded = http.post("/api/assets/ref_audio", json={"name": f"{MARK} voice", "audio_base64": wav_text(2.0)})
    assert uploaded.status_code == 200, uploaded.text
    headers, base = {"Authorization": f"Bearer {key}"}, f"ws://127.0.0.1:{ports[0]}"
    assert http.get(f"/status?token=ek_{MARK}{'s' * 40}", headers=headers).status_code == 200
    with connect(f"{base}/ws/duplex/logged", proxy=None, max_size=None, additional_headers=headers) as connection:
        client = WireClient(connection)
        client.send(type="prepare", config=QUIET, system_prompt=f"{MARK} prompt", ref_audio_path=f"{MARK} unknown")
        client.until("error")
        client.send(type="prepare", config=QUIET, system_prompt=f"{MARK} prompt", ref_audio_path=uploaded.json()["id"])
        client.until("prepared")
        for message in (chunk(), {"type": f"{MARK} type"}, {"type": "insert_text", "text": f"{MARK}", "role": MARK}):
            client.send(**message)
            client.receive()
    with connect(f"{base}/v1/realtime?model=gpt-realtime", proxy=None, additional_headers=headers) as connection:
        client = WireClient(connection)
        client.until("session.created")
        for voice in (f"{MARK}-voice", "alloy"):
            session = {"type": "realtime", "instructions": f"{MARK} words", "audio": {"output": {"voice": voice}}}
            client.send(type="session.update", session=session)
            client.until("error" if MARK in voice else "session.updated")
        part = {"type": "input_text", "text": f"{MARK} text"}
        client.send(type="conversation.item.create", item={"type": "message", "role": "user", "content": [part]})
        client.until("conversation.item.done")


@pytest.mark.parametrize(("path", "first"), [*SOCKETS.items()])
def test_sends_content_to_every_socket(launched: Launched, ports: list[int], path: str, first: dict[str, Any]) -> None:
    """Accepted or not: a first message, an unknown one, fields of wrong types, and a frame that is no JSON."""
    unknown = {"type": f"{MARK} type", "event_id": MARK, MARK: MARK}
    wrong = {**first, **dict.fromkeys(("session", "config", "text", "voice", "messages", "audio", "spec"), f"{MARK} x")}
    answers = []
    for texts in ([first, unknown, wrong], [wrong], [f'{{"type": "{MARK}', f"{MARK} no JSON"]):
        url = f"ws://127.0.0.1:{ports[0]}{path}"
        with (
            connect(url, proxy=None, max_size=None, open_timeout=60) as connection,
            suppress(ConnectionClosed, TimeoutError),
        ):
            for one in texts:
                connection.send(one if isinstance(one, str) else json.dumps(one))
            for _ in range(MAX_ANSWERS):
                answers.append(connection.recv(0.4))
    assert answers, "expected an answer"


@pytest.mark.parametrize(("path", "body"), [*BODIES.items()])
def test_sends_content_to_every_route(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    asked = [http.post(path, json=one) for one in (body, {**body, "model": MARK}, {**body, MARK: [MARK]}, [MARK])]
    asked += [http.post(path, content=f'{{"{MARK}": ', headers={"content-type": "application/json"})]
    asked += [http.post(path, content=f"v=0 {MARK}", headers={"content-type": "application/sdp"})]
    asked += [http.post(path, files={"file": (MARK, MARK.encode())}), http.get(f"{path}/{MARK}?{MARK}={MARK}")]
    assert all(answer.status_code not in (500, 502) for answer in asked), [answer.text for answer in asked]


def test_ctrl_c_ends_all_programs(launched: Launched, logs: Path) -> None:
    assert len(launched.family()) >= 1 + N_WORKERS
    launched.send(signal.SIGINT)
    assert launched.wait() == 0, launched.output
    launched.expect_none_left()
    assert not list(logs.glob("*.pid"))
    written = {file.name: file.read_text() for file in logs.iterdir() if file.is_file()}
    for name in ("logged", "content"):
        assert f"session {name} ended" in written["gateway.log"], written["gateway.log"]
    assert MARK not in launched.output
    found = [line for text in written.values() for line in text.splitlines() if MARK in line]
    assert not found, f"expected no content, key or name of a voice in the logs, got {found}"
