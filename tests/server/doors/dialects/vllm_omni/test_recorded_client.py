"""What vLLM-Omni's own client has sent to this server, sent again: a conversation with a lost connection in it."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import websockets

from benchmarks.serve.fake_worker import FakeWorker
from tests.server.doors.dialects.minicpm_o.mode_client import wav_text
from tests.server.doors.dialects.vllm_omni.omni_client import OmniClient
from tests.server.live_gateway import ANSWER_S, run, running_gateway

LOG = json.loads((Path(__file__).parent / "stock_client_log.json").read_text(encoding="utf-8"))


def filled(event: dict[str, Any], client: OmniClient) -> dict[str, Any]:
    """A recorded event with sound, and with the ids of this conversation."""
    event = json.loads(json.dumps(event))
    if isinstance(event.get("audio"), int):
        event["audio"] = base64.b64encode(bytes(event["audio"] // 4 * 3 - 2)).decode()
    session = event.get("session", {})
    if session.get("ref_audio") == "VOICE":
        session["ref_audio"] = f"data:audio/wav;base64,{wav_text(1.0)}"
    response_id = next((one["response_id"] for one in client.log if one["type"] == "response.created"), "")
    credentials = [one for one in client.log if "resume_token" in one and one["type"] != "session.updated"]
    values = {"response_id": response_id, "item_id": f"item_{response_id}"}
    if credentials:
        values |= {name: credentials[-1][name] for name in ("session_id", "resume_token")}
    values["last_received_server_event_seq"] = str(client.n_received)
    for name, value in values.items():
        if event.get(name) in ("RESPONSE", "ITEM", "SESSION", "TOKEN", "LAST"):
            event[name] = int(value) if name.startswith("last") else value
    return event


async def play(client: OmniClient, recorded: list[list[Any]]) -> None:
    """Send what the client has sent, each time after what it had received before."""
    n_before, expected = len(client.log), []
    for direction, event in recorded:
        if direction == "sent":
            await client.send(
                **{"kind": event["type"], **{k: v for k, v in filled(event, client).items() if k != "type"}}
            )
            continue
        expected.append(event)
        async with asyncio.timeout(ANSWER_S):
            while [one["type"] for one in client.log[n_before:]].count(event) < expected.count(event):
                await client.until(event)


def test_a_recorded_client_gets_the_same_events() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1, n_listen=0, n_speak=1000) as worker, running_gateway(worker) as gateway:
            url = f"ws://127.0.0.1:{gateway.port}/v1/realtime?duplex=1&model=gpt-realtime&autostart=0"
            first = await websockets.connect(url, compression=None, proxy=None)
            client = OmniClient(first)
            await play(client, LOG["connections"][0])
            client.abort()
            async with websockets.connect(url, compression=None, proxy=None) as second:
                client.socket = second
                await play(client, LOG["connections"][1])
            errors = [event["error"]["code"] for event in client.log if event["type"] == "error"]
            assert errors == ["item_not_found"], errors
            retrieved = next(event for event in client.log if event["type"] == "conversation.item.retrieved")
            done = next(event for event in client.log if event["type"] == "response.done")["response"]
            assert done["status"] == "cancelled" and retrieved["item"] == done["output"][0]
            await gateway.wait_idle()

    run(scenario)
