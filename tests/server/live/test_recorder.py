"""Recorded sessions of every kind: the id in messages, and the messages in the recording."""

import json
from pathlib import Path

import pytest

from server.recording.files import META, read_json
from server.recording.ids import is_recording_id
from server.recording.renderer import Renderer
from server.recording.timeline import FILE_NAME, RecordSource, TimelineFile
from tests.server.live_gateway import CHUNK, PREPARE, STOP, Client, Json, run, running_gateway, wait_until
from tests.server.reference_worker import reference_worker

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PREFILL, GENERATE = {"type": "prefill", **CHAT}, {"type": "generate"}
ID = "recording_session_id"
TO_WORKER, TO_CLIENT = RecordSource.CLIENT, RecordSource.WORKER


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the recordings that have ended. They are not completed."""
    ids: list[str] = []
    monkeypatch.setattr(Renderer, "submit", lambda _, recording_id: ids.append(recording_id))
    return ids


async def last_of(client: Client, *kinds: str) -> Json:
    """Receive messages of these types. Returns: the last one."""
    for kind in kinds:
        message = await client.receive(kind)
    return message


def recorded(folder: Path, recording_id: str) -> tuple[str, list[tuple[RecordSource, str]]]:
    """The app type of a recording, and source and type of each message."""
    meta = read_json(folder / "sessions" / recording_id / META)
    assert meta is not None
    with TimelineFile(folder / "sessions" / recording_id / FILE_NAME, create=False) as file:
        return meta["app_type"], [(one.source, json.loads(one.data).get("type", "")) for one in file.records()]


def test_sessions_of_all_kinds_are_recorded(tmp_path: Path, ended: list[str]) -> None:
    async def scenario() -> None:
        async with (
            reference_worker() as worker,
            running_gateway(worker.port, is_recording=True, data_dir=tmp_path) as gateway,
        ):
            await gateway.wait_for_slot()

            # Full duplex: `prepared` has the id.
            client = await gateway.connect("adx_1")
            await client.receive("queue_done")
            await client.send(PREPARE, CHUNK, {"type": "client_diagnostic"}, STOP)
            prepared = await client.receive("prepared")
            assert is_recording_id(prepared[ID]) and "adx_1" in prepared[ID], prepared
            result = await last_of(client, "result", "stopped")
            assert ID not in result, "expected other messages to be unchanged"
            await gateway.wait_idle()
            await wait_until(lambda: ended == [prepared[ID]], "the end of the recording")
            kind, messages = recorded(tmp_path, ended[0])
            assert kind == "audio_duplex"
            assert [one for source, one in messages if source is TO_WORKER] == ["prepare", "audio_chunk", "stop"]
            assert [one for source, one in messages if source is TO_CLIENT] == ["prepared", "result", "stopped"]

            # Chat over a WebSocket: `done` has the id.
            client = await gateway.connect("", path="/ws/chat")
            await client.send(CHAT)
            done = await last_of(client, "queue_done", "prefill_done", "chunk", "done")
            await gateway.wait_idle()
            await wait_until(lambda: ended[1:] == [done[ID]], "the end of the recording")
            answer = [(TO_CLIENT, kind) for kind in ("prefill_done", "chunk", "done")]
            assert recorded(tmp_path, done[ID]) == ("chat", [(TO_WORKER, ""), *answer])

            # Chat over HTTP.
            body = (await gateway.http.post("/api/chat", json=CHAT)).json()
            assert body["text"] == "hello" and type(body["queue_wait_ms"]) is int, body
            await wait_until(lambda: ended[2:] == [body[ID]], "the end of the recording")
            assert recorded(tmp_path, body[ID]) == ("chat", [(TO_WORKER, ""), (TO_CLIENT, "")])

            # The turns of a streaming session are one recording.
            client = await gateway.connect("s1", path="/ws/streaming/")
            ids = set()
            for _ in range(2):
                await client.send(PREFILL, GENERATE)
                ids.add((await last_of(client, "queue_done", "prefill_done"))[ID])
                ids.add((await last_of(client, "chunk", "chunk", "done"))[ID])
            await client.close()
            await gateway.wait_idle()
            await wait_until(lambda: ended[3:] == list(ids), "one recording of both turns")
            kind, messages = recorded(tmp_path, ended[3])
            assert kind == "streaming"
            assert [one for source, one in messages if source is TO_WORKER] == ["prefill", "generate"] * 2

    run(scenario)


def test_session_without_messages_is_not_recorded(tmp_path: Path, ended: list[str]) -> None:
    async def scenario() -> None:
        async with (
            reference_worker() as worker,
            running_gateway(worker.port, is_recording=True, data_dir=tmp_path) as gateway,
        ):
            await gateway.wait_for_slot()
            client = await gateway.connect()
            await client.receive("queue_done")
            await client.close()
            await gateway.wait_idle()
            assert not gateway.gateway.recordings.n_active
        assert not ended and not list((tmp_path / "sessions").glob("*"))

    run(scenario)


def test_nothing_is_recorded_by_default(tmp_path: Path, ended: list[str]) -> None:
    async def scenario() -> None:
        async with reference_worker() as worker, running_gateway(worker.port, data_dir=tmp_path) as gateway:
            await gateway.wait_for_slot()
            client = await gateway.connect()
            await client.send(PREPARE)
            assert ID not in await last_of(client, "queue_done", "prepared")
            await client.close()
            assert ID not in (await gateway.http.post("/api/chat", json=CHAT)).json()
        assert not ended and not list(tmp_path.rglob("*"))

    run(scenario)
