"""Items 7, 18, 37 and 38 of the conformance list, and recordings of processes that are killed."""

import base64
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.conformance.servers import Servers, WireClient
from tests.e2e.serving import fake_worker, gateway
from tests.worker.http.client_scripts import QUIET, base64_of, picture_of, sound_of
from tests.worker.http.small_worker import N_SLOTS

COMPLETE_S = 60.0
UNIT_S = 0.05  # at least, between two units
WEBM = b"\x1aE\xdf\xa3 a video"


def recorded(folder: Path, port: int, *flags: str) -> Any:
    """A gateway that records, in front of the worker on this port."""
    service = {"data_dir": str(folder / "data")}
    return gateway(folder, [port], *flags, config={"service": service, "recording": {"enabled": True}})


@pytest.fixture(scope="module")
def recording_servers(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with recorded(tmp_path_factory.mktemp("recorded"), servers.worker.port) as program:
        yield Servers(program.port, servers.worker)


@contextmanager
def api(port: int) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False, timeout=30) as client:
        yield client


def prepare(client: WireClient, **config: Any) -> dict[str, Any]:
    """Prepare a session. Returns: `prepared`."""
    client.send(type="prepare", system_prompt="Be kind.", config={**QUIET, **config})
    return client.until("prepared")[-1]


def unit(client: WireClient, number: int) -> dict[str, Any]:
    frames = [base64.b64encode(picture_of(number, 64, 48)).decode()]
    client.send(type="audio_chunk", audio_base64=base64_of(sound_of(number)), frame_base64_list=frames)
    return client.until("result")[-1]


def complete(http: httpx.Client, recording_id: str) -> dict[str, Any]:
    """Wait until a recording is complete, its video included. Returns: the content of `recording.json`."""
    until = time.monotonic() + COMPLETE_S
    while time.monotonic() < until:
        answer = http.get(f"/api/sessions/{recording_id}/recording")
        if answer.status_code == 200 and (answer.json()["merged_replay_video"] or answer.json()["notes"]):
            return answer.json()
        time.sleep(0.1)
    raise AssertionError(f"expected a complete recording, got {answer.text[:500]}")


@pytest.fixture(scope="module")
def talk(recording_servers: Servers) -> tuple[str, list[dict[str, Any]]]:
    """The id of the recording of one conversation, and its results."""
    with recording_servers.open("/ws/duplex/omni_talk") as client:
        prepared = prepare(client)
        results = [unit(client, number) for number in range(3)]
        client.send(type="stop")
        client.until("stopped")
    assert type(prepared["prompt_length"]) is int
    return prepared["recording_session_id"], results


def test_item_07_prepared_names_the_recording(
    recording_servers: Servers, servers: Servers, talk: tuple[str, list[dict[str, Any]]]
) -> None:
    recording_id, _ = talk
    with api(recording_servers.gateway) as http:
        complete(http, recording_id)
        meta = http.get(f"/api/sessions/{recording_id}").json()
        assert (meta["session_id"], meta["app_type"]) == (recording_id, "omni_duplex")
        listed = http.get("/api/sessions").json()
        assert recording_id in [one["session_id"] for one in listed["sessions"]]
    with servers.open("/ws/duplex/omni_private") as client:
        assert "recording_session_id" not in prepare(client), "expected no id where nothing is recorded"
        client.send(type="stop")
        client.until("stopped")


def test_item_15_recordings_count_ids_as_the_queue_does(recording_servers: Servers) -> None:
    for name, kind in (("adx_a", "audio_duplex"), ("d1", "omni_duplex")):
        with recording_servers.open(f"/ws/duplex/{name}") as client:
            recording_id = prepare(client)["recording_session_id"]
            client.send(type="stop")
            client.until("stopped")
        with api(recording_servers.gateway) as http:
            complete_without_video(http, recording_id)
            assert http.get(f"/api/sessions/{recording_id}").json()["app_type"] == kind


def test_item_18_lost_connection_is_recorded_and_frees_the_worker(recording_servers: Servers) -> None:
    with recording_servers.open("/ws/duplex/omni_lost") as client:
        recording_id = prepare(client)["recording_session_id"]
        unit(client, 0)
        client.send(type="audio_chunk", audio_base64=base64_of(sound_of(1)))
        client.connection.socket.shutdown(2)
    recording_servers.worker.wait_free(N_SLOTS)
    with api(recording_servers.gateway) as http:
        chunks = complete(http, recording_id)["chunks"]
        assert http.get(f"/api/sessions/{recording_id}").json()["ended_at"] is not None
    assert 1 <= len(chunks) <= 2 and chunks[0]["user_audio"] == "user_audio/000.wav"


def test_item_37_assets_archive_upload_and_comment(
    recording_servers: Servers, talk: tuple[str, list[dict[str, Any]]]
) -> None:
    recording_id, _ = talk
    with api(recording_servers.gateway) as http:
        complete(http, recording_id)
        path = f"/api/sessions/{recording_id}"
        head = http.head(f"{path}/assets/merged_replay.wav")
        n_bytes = int(head.headers["content-length"])
        assert (head.status_code, head.content, n_bytes > 3 * 64_000) == (200, b"", True)
        part = http.get(f"{path}/assets/merged_replay.wav", headers={"Range": "bytes=0-3"})
        assert (part.status_code, part.content) == (206, b"RIFF")
        assert http.head(f"{path}/assets/frontend_replay.webm").status_code == 404
        archive = http.get(f"{path}/download")
        assert archive.content[:2] == b"PK" and archive.headers["content-type"] == "application/zip"
        files = {"file": ("replay.webm", WEBM, "video/webm;codecs=vp9")}
        uploaded = http.post(f"{path}/upload-recording", files=files).json()
        assert uploaded == {"status": "ok", "path": "frontend_replay.webm", "size_bytes": len(WEBM)}
        assert http.get(f"{path}/assets/frontend_replay.webm").content == WEBM
        assert http.post(f"{path}/comment", json={"comment": " nice "}).json() == {"status": "ok", "len": 4}
        assert http.get(f"{path}/comment").json() == {"comment": "nice"}
        assert http.post(f"{path}/comment", json={"comment": "x" * 2001}).status_code == 413
    assert raw_status(recording_servers, "POST", f"{path}/upload-recording", n_bytes=201 * 2**20) == 413
    assert raw_status(recording_servers, "GET", f"{path}/assets/../meta.json") == 400


def raw_status(servers: Servers, method: str, path: str, n_bytes: int = 0) -> int:
    """The status of a request whose path is sent as it is, and whose body is announced only."""
    connection = HTTPConnection("127.0.0.1", servers.gateway, timeout=30)
    connection.putrequest(method, path)
    connection.putheader("Content-Type", "multipart/form-data; boundary=b")
    connection.putheader("Content-Length", str(n_bytes))
    connection.endheaders()
    with closing(connection):
        return connection.getresponse().status


def test_item_38_recordings_have_the_shapes_of_the_viewer(
    recording_servers: Servers, talk: tuple[str, list[dict[str, Any]]]
) -> None:
    recording_id, results = talk
    with api(recording_servers.gateway) as http:
        content = complete(http, recording_id)
        assert {"session_id", "mode", "worker_id", "start_ts", "config", "chunks", "merged_replay"} <= content.keys()
        assert (content["mode"], content["merged_replay"], len(content["chunks"])) == ("duplex", "merged_replay.wav", 3)
        assert content["config"]["system_prompt"] == "Be kind." and content["config"]["seed"] == QUIET["seed"]
        for chunk, result in zip(content["chunks"], results, strict=True):
            recorded_result = chunk["result"]
            assert recorded_result["mode"] == ("LISTEN" if result["is_listen"] else "SPEAK")
            assert recorded_result.get("text", "") == result["text"]
            assert recorded_result["timing"]["kv_cache_length"] == result["kv_cache_length"]
            for name in ("user_audio", "user_frame"):
                assert http.head(f"/api/sessions/{recording_id}/assets/{chunk[name]}").status_code == 200
        chat = {"messages": [{"role": "user", "content": "Hello"}], "generation": {"max_new_tokens": 4}}
        answer = http.post("/api/chat", json=chat).json()
        turns = complete_without_video(http, answer["recording_session_id"])
    assert turns["mode"] == "chat" and turns["turns"][0]["input"] == {"text": "Hello"}
    assert turns["turns"][0]["output"]["text"] == answer["text"]
    assert isinstance(turns["turns"][0]["timing"]["elapsed_ms"], float)


def complete_without_video(http: httpx.Client, recording_id: str) -> dict[str, Any]:
    """Wait for a recording that has no video."""
    until = time.monotonic() + COMPLETE_S
    while (answer := http.get(f"/api/sessions/{recording_id}/recording")).status_code != 200:
        assert time.monotonic() < until, f"expected a complete recording, got {answer.text[:500]}"
        time.sleep(0.1)
    return answer.json()


# --- killed processes -----------------------------------------------------------------------------


def converse(client: WireClient, n: int) -> str:
    """Talk for `n` units. Returns: the recording's id."""
    recording_id = prepare(client)["recording_session_id"]
    for number in range(n):
        unit(client, number % 3)
        time.sleep(UNIT_S)
    return recording_id


def test_killed_gateway_completes_its_recordings_at_the_next_start(tmp_path: Path) -> None:
    with fake_worker() as worker:
        with recorded(tmp_path, worker.port) as program, connected(program.port) as client:
            recording_id = converse(client, 30)
            program.process.kill()
            program.process.wait()
        n_before_last_second = 30 - round(1 / UNIT_S)
        with recorded(tmp_path, worker.port) as program, api(program.port) as http:
            chunks = complete(http, recording_id)["chunks"]
            assert http.get(f"/api/sessions/{recording_id}").json()["duration_s"] > 1
    assert sum("unanswered" not in chunk for chunk in chunks) >= n_before_last_second


def test_killed_worker_ends_the_recording_with_everything_before(tmp_path: Path) -> None:
    with fake_worker() as worker, recorded(tmp_path, worker.port) as program:
        with connected(program.port) as client:
            recording_id = converse(client, 12)
            worker.process.kill()
            error = client.until("error")[-1]
            assert error["code"] == "worker_lost"
        with api(program.port) as http:
            chunks = complete(http, recording_id)["chunks"]
    assert len(chunks) == 12 and all("unanswered" not in chunk for chunk in chunks)


@contextmanager
def connected(port: int) -> Iterator[WireClient]:
    address = f"ws://127.0.0.1:{port}/ws/duplex/omni_killed"
    with suppress(ConnectionClosed), connect(address, max_size=None, proxy=None) as connection:
        yield WireClient(connection)
