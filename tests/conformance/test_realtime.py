"""Realtime sessions with a real worker: both lanes, the change between them, and responses out of band."""

import asyncio
import json

import pytest
import websockets

from tests.conformance.servers import Servers
from tests.server.doors.realtime.realtime_client import Json, RealtimeClient, realtime, speech
from tests.server.live_gateway import run
from tests.worker.http.client_scripts import QUIET, chunk

ASIDE = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which day is it?"}]}]


async def response_of(client: RealtimeClient, **options: object) -> Json:
    """The response to `response.create`, once it is done."""
    await client.send("response.create", response={"max_output_tokens": 4, **options})
    done = (await client.until("response.done"))["response"]
    assert done["status"] in ("completed", "incomplete"), done["status_details"]
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + done["usage"]["output_tokens"] > 0
    return done


def test_both_lanes_answer_in_one_session(servers: Servers) -> None:
    async def scenario() -> None:
        async with realtime(servers.gateway) as client:
            text = [{"type": "input_text", "text": "Hello"}]
            await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": text})
            told = await response_of(client, output_modalities=["text"], instructions="Greet.")
            assert told["output"][0]["content"][0]["type"] == "output_text"

            await client.update(audio={"input": {"turn_detection": None}})
            await client.append(speech())
            await client.send("input_audio_buffer.commit")
            committed = await client.until("input_audio_buffer.committed")
            await client.send("response.create")
            await client.until("response.output_audio.delta")
            await client.send("response.cancel")
            spoken = (await client.until("response.done"))["response"]
            assert spoken["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
            heard = await response_of(client, output_modalities=["text"])
            assert heard["usage"]["input_token_details"]["audio_tokens"] > 0
            [added] = [
                event
                for event in client.log
                if event["type"] == "conversation.item.added" and event["item"]["id"] == spoken["output"][0]["id"]
            ]
            assert added["previous_item_id"] == committed["item_id"]

            aside = await response_of(client, conversation="none", input=ASIDE, output_modalities=["text"])
            assert aside["conversation_id"] is None
            await client.send("conversation.item.retrieve", item_id=aside["output"][0]["id"])
            assert (await client.until("error", with_errors=True))["error"]["code"] == "item_retrieve_invalid_item_id"

            await client.update(audio={"input": {"turn_detection": {"type": "server_vad"}}})
            again = await response_of(client, output_modalities=["text"])
            assert again["output"][0]["content"][0]["type"] == "output_text"

            ratio = {"type": "retention_ratio", "retention_ratio": 0.5}
            for truncation, speed in (("disabled", 1.5), (ratio, 0.5), ("auto", 1.0)):
                shown = await client.update(truncation=truncation, audio={"output": {"speed": speed}})
                assert (shown["truncation"], shown["audio"]["output"]["speed"]) == (truncation, speed)
                assert (await response_of(client))["output"][0]["content"][0]["type"] == "output_audio"

    run(scenario)


def test_a_transcription_runs_beside_the_units_of_another_session(servers: Servers) -> None:
    async def units(socket: websockets.ClientConnection) -> list[int]:
        """Run units, one after the other. Returns: their numbers."""
        numbers: list[int] = []
        while len(numbers) < 8:
            await socket.send(json.dumps(chunk(len(numbers))))
            result = json.loads(await socket.recv())
            assert result["type"] == "result", f"expected a result, got {result}"
            numbers.append(result["current_time"])
        return numbers

    async def scenario() -> None:
        url = f"ws://127.0.0.1:{servers.gateway}/ws/duplex/omni_beside"
        async with websockets.connect(url, max_size=None, proxy=None) as socket, realtime(servers.gateway) as client:
            await socket.send(json.dumps({"type": "prepare", "config": QUIET}))
            while json.loads(await socket.recv())["type"] != "prepared":
                pass
            await client.update(audio={"input": {"turn_detection": None, "transcription": {"language": "en"}}})
            running = asyncio.create_task(units(socket))
            await client.append(speech())
            await client.send("input_audio_buffer.commit")
            await client.send("response.create", response={"output_modalities": ["text"], "max_output_tokens": 4})
            await client.until("response.done")
            while not (ends := [event for event in client.log if event["type"].endswith("transcription.completed")]):
                await client.receive()
            assert await running == [*range(1, 9)]
            deltas = [event["delta"] for event in client.log if event["type"].endswith("transcription.delta")]
            assert "".join(deltas) == ends[0]["transcript"] != ""
            assert ends[0]["usage"]["seconds"] == pytest.approx(len(speech()) / 48_000, abs=0.1)

    run(scenario)


def test_the_stock_sdk_converses(servers: Servers) -> None:
    openai = pytest.importorskip("openai")

    async def scenario() -> None:
        client = openai.AsyncOpenAI(api_key="none", base_url=f"http://127.0.0.1:{servers.gateway}/v1")
        async with client, client.realtime.connect(model="gpt-realtime") as connection:
            await connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
            content = [{"type": "input_text", "text": "Hello"}]
            await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
            await connection.response.create(response={"output_modalities": ["text"], "max_output_tokens": 4})
            texts: list[str] = []
            async for event in connection:
                if event.type == "response.output_text.delta":
                    texts.append(event.delta)
                elif event.type == "response.done":
                    break
            assert event.response.output[0].content[0].text == "".join(texts) != ""

    run(scenario)
