"""Every event of a session as the parsers of stock clients read it, where their packages are installed."""

import json

import pytest

from benchmarks.serve.fake_worker import FakeWorker
from tests.server.doors.realtime.realtime_client import Json, realtime, silence, speech
from tests.server.live_gateway import run, running_gateway


@pytest.fixture(scope="module")
def log() -> list[Json]:
    """The events of a session that uses most of the API."""
    found: list[Json] = []

    async def scenario() -> None:
        async with FakeWorker(n_listen=1000, n_speak=3) as worker, running_gateway(worker) as gateway:
            async with realtime(gateway.port) as client:
                detection = {"type": "server_vad", "threshold": 0.4}
                tool = {"type": "function", "name": "look", "description": "", "parameters": {"type": "object"}}
                await client.update(tools=[tool], tool_choice={"type": "function", "name": "look"})
                await client.update(audio={"input": {"turn_detection": detection}, "output": {"voice": {"id": "ash"}}})
                item = {
                    "id": "a",
                    "type": "message",
                    "role": "system",
                    "content": [{"type": "input_text", "text": "Hi"}],
                }
                await client.send("conversation.item.create", item=item)
                call = {"id": "c", "type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
                await client.send("conversation.item.create", item=call)
                output = {"id": "o", "type": "function_call_output", "call_id": "call_1", "output": "{}"}
                await client.send("conversation.item.create", item=output)
                await client.send("conversation.item.retrieve", item_id="c")
                await client.send("conversation.item.delete", item_id="o")
                await client.append(speech() + silence(1.0))
                await client.until("response.output_audio.delta")
                item_id = client.log[-1]["item_id"]
                await client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=100)
                await client.send("response.cancel")
                await client.until("rate_limits.updated")
                await client.send("response.create", response={"output_modalities": ["text"], "max_output_tokens": 90})
                await client.until("rate_limits.updated")
                await client.send("input_audio_buffer.clear")
                await client.send("response.cancel", event_id="last")
                await client.until("error")
            found.extend(client.log)

    run(scenario)
    return found


def test_the_log_covers_the_events(log: list[Json]) -> None:
    kinds = {event["type"] for event in log}
    assert len(kinds) >= 25, f"expected most of the server's events, got {sorted(kinds)}"


def test_pipecat_reads_every_event(log: list[Json]) -> None:
    events = pytest.importorskip("pipecat.services.openai.realtime.events", exc_type=ImportError)
    for event in log:
        parsed = events.parse_server_event(json.dumps(event))
        assert parsed.type == event["type"] and parsed.event_id


def test_the_sdk_reads_every_event(log: list[Json]) -> None:
    realtime_types = pytest.importorskip("openai.types.realtime")
    from pydantic import TypeAdapter

    adapter = TypeAdapter(realtime_types.RealtimeServerEvent)
    for event in log:
        assert adapter.validate_python(event).type == event["type"]
