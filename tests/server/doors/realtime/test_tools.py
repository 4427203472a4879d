"""Functions in the turn lane: calls, their events, their results, and answers that are voiced afterwards."""

import json
from typing import Any

from tests.server.doors.realtime.realtime_client import Json, RealtimeClient, realtime
from tests.server.doors.realtime.session_stage import StubTurns, stage
from tests.server.doors.stub_worker import DONE, PREFILLED, SPOKEN, TEXT, chunk, stub_gateway
from tests.server.live_gateway import run, wait_until

WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
CALLED: list[Any] = [PREFILLED, chunk(CALL[:15]), chunk(CALL[15:]), {**DONE, "text": CALL}]
SAID: list[Any] = [PREFILLED, chunk("Hello"), chunk(" there."), DONE]


async def with_tools(client: RealtimeClient, **session: Any) -> Json:
    return await client.update(audio={"input": {"turn_detection": None}}, tools=[WEATHER], **session)


async def say(client: RealtimeClient, item: Json) -> None:
    await client.send("conversation.item.create", item=item)
    await client.until("conversation.item.done")


def test_a_call_its_result_and_the_spoken_answer() -> None:
    async def scenario() -> None:
        async with stub_gateway(CALLED, SAID, SPOKEN) as (gateway, worker), realtime(gateway.port) as client:
            shown = await with_tools(client)
            assert shown["tools"] == [WEATHER]
            question = {"type": "input_text", "text": "How is the weather?"}
            await say(client, {"type": "message", "role": "user", "content": [question]})
            await client.send("response.create")
            done = (await client.until("response.done"))["response"]
            assert client.kinds("response.created")[:-1] == [
                "response.created",
                "response.output_item.added",
                "conversation.item.added",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "conversation.item.done",
                "response.output_item.done",
            ]
            [item] = done["output"]
            assert done["status"] == "completed" and item["name"] == "weather" and item["status"] == "completed"
            assert json.loads(item["arguments"]) == {"city": "Köln"} and item["call_id"].startswith("call_")
            added = next(event for event in client.log if event["type"] == "response.output_item.added")
            assert added["item"]["arguments"] == "" and added["item"]["call_id"] == item["call_id"]
            path, request = worker.requests[0]
            assert path == "/ws/chat" and request["tools"][0]["function"]["name"] == "weather"
            assert not request["tts"]["enabled"], "expected text alone: speech suppresses what a call needs"

            output = {"type": "function_call_output", "call_id": item["call_id"], "output": "Rain."}
            await say(client, output)
            await client.send("response.create")
            done = (await client.until("response.done"))["response"]
            [message] = done["output"]
            assert message["content"] == [{"type": "output_audio", "transcript": TEXT}]
            sent = [event for event in client.log if event["type"] == "response.output_audio.delta"]
            assert sent, "expected sound of the answer"
            (_, asked), (path, voiced) = worker.requests[1:]
            assert asked["messages"][-2:] == [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"name": "weather", "arguments": {"city": "Köln"}}],
                },
                {"role": "tool", "content": "Rain."},
            ]
            assert path == "/ws/speech" and voiced["text"] == TEXT and voiced["messages"] == asked["messages"]
            assert done["usage"]["input_tokens"] == 30, "expected the input of one turn"

    run(scenario)


def test_a_required_call_begins_the_answer() -> None:
    """The model continues `<tool_call>`; the marker is part of the request and not of its answer."""

    async def scenario() -> None:
        rest: list[Any] = [PREFILLED, chunk(CALL.removeprefix("<tool_call>\n")), DONE]
        async with stub_gateway(rest, SAID) as (gateway, worker), realtime(gateway.port) as client:
            await with_tools(client, tool_choice="required", output_modalities=["text"])
            await client.send("response.create")
            done = (await client.until("response.done"))["response"]
            assert [item["type"] for item in done["output"]] == ["function_call"]
            assert worker.requests[0][1]["answer_start"] == "<tool_call>\n"
            await client.send("response.create", response={"tool_choice": "none"})
            done = (await client.until("response.done"))["response"]
            assert [item["type"] for item in done["output"]] == ["message"]
            assert done["output"][0]["content"] == [{"type": "output_text", "text": TEXT}]
            assert "tools" not in worker.requests[1][1]

    run(scenario)


def test_a_forced_function_is_offered_alone_and_begun() -> None:
    async def scenario() -> None:
        async with stage(turns=(turns := StubTurns()), audio={"input": {"turn_detection": None}}) as one:
            tools = [{"type": "function", "name": name} for name in ("look", "listen")]
            await one.update(tools=tools)
            for choice, offered, start in (
                ({"type": "function", "name": "listen"}, ["listen"], '<tool_call>\n{"name": "listen", "arguments": '),
                ({"type": "function", "name": "unknown"}, ["look", "listen"], "<tool_call>\n"),
                ("auto", ["look", "listen"], ""),
            ):
                await one.send("response.create", response={"tool_choice": choice, "output_modalities": ["text"]})
                await wait_until(lambda: one.session.response is None, "the answer")
                fields: Any = turns.requests[-1].fields
                assert [tool["function"]["name"] for tool in fields["tools"]] == offered
                assert fields["answer_start"] == start

    run(scenario)
