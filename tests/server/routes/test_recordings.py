"""The HTTP routes of recordings."""

import asyncio
import io
import itertools
import json
import threading
import zipfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from models.atomic_file import write_atomically
from server.app import Gateway, build_app
from server.recording import trace_log, upload
from server.recording.files import create_folder
from server.recording.ids import new_recording_id
from tests.server.routes.asgi_gateway import AsgiClient, asgi_client, gateway_of
from worker.config.service import RecordingSection, default_config

WAV = bytes(range(256)) * 10
COMMENT_MAX = 2000


def recording_gateway(data_dir: Path, *, is_enabled: bool = True, **options: Any) -> Gateway:
    config = default_config()
    service = config.service.model_copy(update={"data_dir": data_dir})
    config = config.model_copy(update={"service": service, "recording": RecordingSection(enabled=is_enabled)})
    return gateway_of(config=config, **options)


def add_recording(gateway: Gateway, minute: int = 0) -> str:
    """A complete recording on disk, with a timeline as an interrupted completion leaves it."""
    recording_id = new_recording_id("omni_x", datetime(2026, 5, 1, 10, minute, tzinfo=UTC))
    folder = gateway.recordings.store.folder_of(recording_id)
    create_folder(folder, {"session_id": recording_id, "created_at": "2026-05-01T10:00:00+00:00"})
    (folder / "recording.json").write_text('{"mode":"duplex"}')
    (folder / "merged_replay.wav").write_bytes(WAV)
    (folder / "user_audio" / "000.wav").write_bytes(WAV[:10])
    (folder / "timeline.bin").write_bytes(b"private")
    (folder / ".upload-x").write_bytes(b"private")
    return recording_id


def scenario(folder: Path, steps: Any, **options: Any) -> None:
    async def run() -> None:
        gateway = recording_gateway(folder, **options)
        async with asgi_client(gateway) as client:
            await steps(gateway, client)

    asyncio.run(run())


def test_lists_recordings_newest_first_in_pages(tmp_path: Path) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        assert (await client.get("/api/sessions")) == {"total": 0, "offset": 0, "limit": 50, "sessions": []}
        ids = [add_recording(gateway, minute) for minute in range(5)]
        page = await client.get("/api/sessions?offset=1&limit=2")
        assert page["total"] == 5 and [one["session_id"] for one in page["sessions"]] == [ids[3], ids[2]]
        await client.get("/api/sessions?limit=1000", 422)

    scenario(tmp_path, steps)


def test_list_is_hidden_while_recording_is_off(tmp_path: Path) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        recording_id = add_recording(gateway)
        assert "recording.enabled" in (await client.get("/api/sessions", 404))["detail"]
        assert (await client.get(f"/api/sessions/{recording_id}"))["session_id"] == recording_id

    scenario(tmp_path, steps, is_enabled=False)


def test_replays_are_named_once_they_are_complete(tmp_path: Path) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        recording_id = add_recording(gateway)
        folder = gateway.recordings.store.folder_of(recording_id)
        (folder / "frontend_replay.webm").write_bytes(WAV)
        path = f"/api/sessions/{recording_id}/replays"
        assert await client.get(path) == {"is_complete": False, "replays": ["frontend_replay.webm"]}
        (folder / "timeline.bin").unlink()
        replays = ["merged_replay.wav", "frontend_replay.webm"]
        assert await client.get(path) == {"is_complete": True, "replays": replays}
        await client.get("/api/sessions/20260501_101500_x_none/replays", 404)

    scenario(tmp_path, steps)


def test_browsers_get_pages_where_programs_get_json(tmp_path: Path) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}

    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        moved = await client.request("GET", "/sessions?lang=zh", 302, headers=browser)
        assert (moved.headers["location"], moved.headers["vary"]) == ("/recordings?lang=zh", "Accept")
        assert await client.get("/sessions") == {"total": 0, "sessions": []}
        page = await client.request("GET", f"/s/{add_recording(gateway)}", headers=browser)
        assert "viewer.js" in page.text and "default-src 'self'" in page.headers["content-security-policy"]
        for unknown in ("/s/20260501_101500_x_none", "/s/%2e%2e%2fx", "/s/%00"):
            missing = await client.request("GET", unknown, 404, headers=browser)
            assert missing.headers["content-type"].startswith("text/html"), unknown
        assert "Session not found" in (await client.get("/s/none", 404))["detail"]

    scenario(tmp_path, steps)


def test_a_file_that_is_replaced_is_sent_whole(tmp_path: Path) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        recording_id = add_recording(gateway)
        file = gateway.recordings.store.folder_of(recording_id) / "recording.json"
        contents = [{"mode": "duplex", "notes": "x" * n} for n in (1, 100_000)]
        is_over = threading.Event()

        def replace() -> None:
            for n in itertools.count():
                write_atomically(file, json.dumps(contents[n % 2]).encode())
                if is_over.is_set():
                    return

        replacing = asyncio.create_task(asyncio.to_thread(replace))
        try:
            for _ in range(200):
                answer = await client.request("GET", f"/api/sessions/{recording_id}/recording")
                assert len(answer.content) == int(answer.headers["content-length"])
                assert answer.json() in [{"mode": "duplex"}, *contents]
        finally:
            is_over.set()
            await replacing

    scenario(tmp_path, steps)


def test_meta_and_recording_are_the_files(tmp_path: Path) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        recording_id = add_recording(gateway)
        assert (await client.get(f"/api/sessions/{recording_id}"))["session_id"] == recording_id
        assert await client.get(f"/api/sessions/{recording_id}/recording") == {"mode": "duplex"}
        (gateway.recordings.store.folder_of(recording_id) / "recording.json").unlink()
        await client.get(f"/api/sessions/{recording_id}/recording", 404)
        unknown = new_recording_id("omni_x", datetime(2026, 5, 1, tzinfo=UTC))
        for name in (unknown, "omni_x", "%2e%2e", "x" * 300):
            for path in ("", "/recording", "/assets/merged_replay.wav", "/download", "/comment"):
                await client.get(f"/api/sessions/{name}{path}", 404)
            await client.request("POST", f"/api/sessions/{name}/comment", 404, json={"comment": "x"})
            await client.request("DELETE", f"/api/sessions/{name}", 404)

    scenario(tmp_path, steps)


def test_media_have_types_ranges_and_head(tmp_path: Path) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        path = f"/api/sessions/{add_recording(gateway)}/assets/merged_replay.wav"
        whole = await client.request("GET", path)
        assert whole.content == WAV and whole.headers["content-type"] == "audio/wav"
        assert whole.headers["x-content-type-options"] == "nosniff" and whole.headers["accept-ranges"] == "bytes"
        part = await client.request("GET", path, 206, headers={"Range": "bytes=100-199"})
        assert part.content == WAV[100:200] and part.headers["content-range"] == f"bytes 100-199/{len(WAV)}"
        tail = await client.request("GET", path, 206, headers={"Range": "bytes=-5"})
        assert tail.content == WAV[-5:]
        await client.request("GET", path, 416, headers={"Range": "bytes=99999-"})
        head = await client.request("HEAD", path)
        assert head.content == b"" and head.headers["content-length"] == str(len(WAV))
        await client.request("HEAD", path.replace(".wav", ".mp4"), 404)

    scenario(tmp_path, steps)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("%2e%2e/meta.json", 400),
        ("user_audio/%2e%2e/%2e%2e/x.wav", 400),
        ("%2e%2e/x.wav", 400),
        ("..%5cx.wav", 400),
        ("/etc/passwd", 400),
        ("user_audio//000.wav", 400),
        ("a%00.wav", 400),
        ("x" * 300 + ".wav", 400),
        ("timeline.bin", 404),
        ("meta.json", 404),
        (".upload-x", 404),
        ("user_audio", 404),
        ("none.wav", 404),
        ("link.wav", 400),
    ],
)
def test_paths_stay_inside_the_recording(tmp_path: Path, path: str, status: int) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        recording_id = add_recording(gateway)
        outside = tmp_path / "outside.wav"
        outside.write_bytes(b"secret")
        (gateway.recordings.store.folder_of(recording_id) / "link.wav").symlink_to(outside)
        # httpx normalizes dots in a path that it is given as text.
        raw = f"/api/sessions/{recording_id}/assets/{path}".encode()
        request = client.raw.build_request("GET", "http://localhost/")
        request.url = request.url.copy_with(raw_path=raw)
        response = await client.raw.send(request)
        assert response.status_code == status, response.text[:200]

    scenario(tmp_path, steps)


def test_download_is_a_zip_without_private_files(tmp_path: Path) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        recording_id = add_recording(gateway)
        response = await client.request("GET", f"/api/sessions/{recording_id}/download")
        assert response.headers["content-disposition"] == f'attachment; filename="{recording_id}.zip"'
        with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
            assert archive.testzip() is None
            names = {name.removeprefix(f"{recording_id}/") for name in archive.namelist()}
            assert archive.read(f"{recording_id}/merged_replay.wav") == WAV
        assert names == {"meta.json", "recording.json", "merged_replay.wav", "user_audio/000.wav"}
        head = await client.request("HEAD", f"/api/sessions/{recording_id}/download")
        assert head.content == b"" and head.headers["content-type"] == "application/zip"

    scenario(tmp_path, steps)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("video/webm;codecs=vp9", "frontend_replay.webm"),
        ("video/mp4", "frontend_replay.mp4"),
        ("audio/wav", "frontend_replay.wav"),
        ("Audio/WebM", "frontend_replay.webm"),
    ],
)
def test_upload_becomes_an_asset(tmp_path: Path, kind: str, name: str) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        recording_id = add_recording(gateway)
        data = bytes(3_000_000)
        path = f"/api/sessions/{recording_id}/upload-recording"
        for content in (b"an earlier one", data):
            files = {"other": (None, "text"), "file": ("../evil.html", content, kind)}
            answer = (await client.request("POST", path, files=files)).json()
        assert answer == {"status": "ok", "path": name, "size_bytes": len(data)}
        assert (await client.request("GET", f"/api/sessions/{recording_id}/assets/{name}")).content == data
        folder = gateway.recordings.store.folder_of(recording_id)
        assert {one.name for one in folder.iterdir() if "upload-" in one.name} == {".upload-x"}

    scenario(tmp_path, steps)


def test_wrong_uploads_are_refused_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        recording_id = add_recording(gateway)
        folder = gateway.recordings.store.folder_of(recording_id)
        before = {one.name for one in folder.iterdir()}
        path = f"/api/sessions/{recording_id}/upload-recording"
        await client.request("POST", path, 400, files={"file": ("x", b"x", "text/html")})
        await client.request("POST", path, 400, files={"data": ("x", b"x", "video/webm")})
        await client.request("POST", path, 400, json={"file": "x"})
        multipart = {"Content-Type": "multipart/form-data; boundary=b"}
        await client.request("POST", path, 400, content=b"nothing", headers=multipart)
        cut = b'--b\r\nContent-Disposition: form-data; name="file"\r\nContent-Type: video/webm\r\n\r\nhalf'
        await client.request("POST", path, 400, content=cut, headers=multipart)
        await client.request(
            "POST", path, 400, content=101 * b"--b\r\n\r\nx\r\n" + cut + b"\r\n--b--", headers=multipart
        )
        files = {"file": ("x", b"x", "video/webm")}
        await client.request("POST", path.replace(recording_id, recording_id[:-1] + "x"), 404, files=files)
        await client.request("POST", path, 413, headers={**multipart, "Content-Length": str(2**30)}, content=b"")
        monkeypatch.setattr(upload, "MAX_UPLOAD_BYTES", 1000)

        async def endless() -> AsyncIterator[bytes]:
            yield cut
            for _ in range(10):
                yield bytes(500)

        await client.request("POST", path, 413, content=endless(), headers=multipart)
        assert {one.name for one in folder.iterdir()} == before

    scenario(tmp_path, steps)


def test_comment_is_saved_trimmed_and_deleted(tmp_path: Path) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        path = f"/api/sessions/{add_recording(gateway)}/comment"

        async def post(comment: object, status: int = 200) -> Any:
            return (await client.request("POST", path, status, json={"comment": comment})).json()

        assert await client.get(path) == {"comment": ""}
        assert await post("  gut 好 \n") == {"status": "ok", "len": 5}
        assert await client.get(path) == {"comment": "gut 好"}
        assert (await post("x" * COMMENT_MAX))["len"] == COMMENT_MAX
        await post("x" * (COMMENT_MAX + 1), 413)
        for wrong in (5, None, ["x"]):
            await post(wrong, 400)
        assert await post(" ") == {"status": "ok", "len": 0} and await client.get(path) == {"comment": ""}

    scenario(tmp_path, steps)


def test_user_deletes_a_recording(tmp_path: Path) -> None:
    async def steps(gateway: Gateway, client: AsgiClient) -> None:
        path = f"/api/sessions/{add_recording(gateway)}"
        other = add_recording(gateway)
        assert (await client.request("DELETE", path)).json() == {"success": True}
        await client.request("DELETE", path, 404)
        await client.get(path, 404)
        assert gateway.recordings.store.ids() == [other] and len(list((tmp_path / "sessions").iterdir())) == 1

    scenario(tmp_path, steps)


def test_traces_are_appended_and_roll_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_log, "MAX_BYTES", 1000)

    async def run() -> None:
        gateway = recording_gateway(tmp_path)
        object.__setattr__(gateway, "traces", trace_log.TraceLog(tmp_path / "logs"))
        async with asgi_client(build_app(gateway)) as client:
            for number in range(20):
                body = {"session_id": "x", "n": number, "events": ["a"] * 20}
                assert (await client.request("POST", "/api/_debug/record_trace", json=body)).json() == {"ok": True}
            await client.request("POST", "/api/_debug/record_trace", 422, json=[1])

    asyncio.run(run())
    files = sorted((tmp_path / "logs").iterdir())
    assert [one.name for one in files] == ["mobile-record-trace.1.jsonl", "mobile-record-trace.jsonl"]
    assert all(one.stat().st_size <= 1000 for one in files)
    assert json.loads(files[1].read_text().splitlines()[-1])["n"] == 19
