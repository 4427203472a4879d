"""Items 45 and 46 of the conformance list: one start from the settings file of the public implementation."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from launcher.preflight import port_owner
from tests.conformance.servers import WireClient
from tests.launcher.processes import Launched, free_ports, launcher
from tests.server.doors.dialects.minicpm_o.mode_client import wav_text
from tests.worker.config.public_files import EXAMPLE
from tests.worker.http.client_scripts import QUIET, chunk

START_S = 200.0
MARK = "Zq7private"  # in everything that no log may hold
N_WORKERS = 2


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
    with launcher(*flags, "--max-sessions", "1", environ=environ) as process:
        process.wait_line(f"gateway  answers at http://localhost:{ports[0]}, while the model loads")
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


def test_ctrl_c_ends_all_programs(launched: Launched, logs: Path) -> None:
    assert len(launched.family()) >= 1 + N_WORKERS
    launched.send(signal.SIGINT)
    assert launched.wait() == 0, launched.output
    launched.expect_none_left()
    assert not list(logs.glob("*.pid"))
    written = {file.name: file.read_text() for file in logs.iterdir() if file.is_file()}
    assert "session logged ended" in written["gateway.log"] and MARK not in launched.output
    found = [line for text in written.values() for line in text.splitlines() if MARK in line]
    assert not found, f"expected no content, key or name of a voice in the logs, got {found}"
