"""Functions in the duplex lane: calls that the model writes beside its speech, and their outputs."""

import json
from typing import Any

import pytest

from server.dispatch.workers import Worker, WorkerAddress
from server.doors.live.truncation import SlotWindow, Truncation
from server.doors.realtime.engine_settings import EngineSettings
from server.doors.realtime.session_config import RealtimeConfig
from tests.server.doors.realtime.session_stage import SessionStage, stage
from tests.server.live_gateway import run
from worker.config.session import EngineConfig, SessionConfig, WindowConfig
from worker.protocol.messages import Adjust, Prepare
from worker.protocol.text_messages import InsertText

WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": {"type": "object"}}
CALL = '\n{"name": "weather", "arguments": {"city": "Köln"}}\n'
CALLED = [
    "response.output_item.added",
    "conversation.item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "conversation.item.done",
    "response.output_item.done",
]


def prompt_of(one: SessionStage) -> str:
    return next(
        message.system_prompt
        for message in reversed(one.units.sent)
        if isinstance(message, Prepare | Adjust) and message.system_prompt is not None
    )


def inserted(one: SessionStage) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in one.units.sent if isinstance(message, InsertText)]


def test_a_call_while_the_model_listens_is_a_response_of_its_own() -> None:
    async def scenario() -> None:
        async with stage(has_side_lane=True, tools=[WEATHER]) as one:
            await one.append(1.0)
            one.listen(beside=[CALL])
            assert one.kinds("response", "conversation") == ["response.created", *CALLED, "response.done"]
            done = one.last("response.done")["response"]
            [item] = done["output"]
            assert (done["status"], item["name"], item["status"]) == ("completed", "weather", "completed")
            assert json.loads(item["arguments"]) == {"city": "Köln"}

            output = {"type": "function_call_output", "call_id": item["call_id"], "output": "Rain."}
            await one.send("conversation.item.create", item=output)
            await one.append(1.0)
            assert inserted(one) == [("tool", "Rain.")], "expected the output before the next unit"
            assert one.units.sent[-1] is one.chunks[-1]
            one.speak("It rains. ", ends=True)
            [message] = one.last("response.done")["response"]["output"]
            assert message["content"][0]["transcript"] == "It rains. "

    run(scenario)


def test_the_model_talks_on_while_it_calls() -> None:
    """The call is an item beside the message, whose text and sound go on after it."""

    async def scenario() -> None:
        async with stage(has_side_lane=True, tools=[WEATHER]) as one:
            await one.append(1.0)
            one.speak("Let me see. ", beside=[CALL])
            assert one.kinds("response.done") == [], "expected the turn to go on"
            call = one.last("response.function_call_arguments.done")
            assert (call["output_index"], json.loads(call["arguments"])) == (1, {"city": "Köln"})
            one.pass_time(1.0)
            await one.append(1.0)
            one.speak("One moment. ", ends=True)
            message, item = one.last("response.done")["response"]["output"]
            assert message["content"][0]["transcript"] == "Let me see. One moment. "
            assert (item["type"], item["call_id"]) == ("function_call", call["call_id"])
            deltas = [event for event in one.log if event["type"] == "response.output_audio_transcript.delta"]
            assert {event["output_index"] for event in deltas} == {0}

    run(scenario)


def test_a_message_after_a_call_has_a_place_of_its_own() -> None:
    async def scenario() -> None:
        async with stage(
            {"type": "semantic_vad", "create_response": False}, has_side_lane=True, tools=[WEATHER]
        ) as one:
            await one.append(0.5)
            await one.send("response.create")
            one.speak("", beside=[CALL, CALL])  # its sound opens the message first
            assert one.last("response.output_audio.delta")["output_index"] == 0
            one.pass_time(1.0)
            await one.append(1.0)
            one.listen()
            kinds = [item["type"] for item in one.last("response.done")["response"]["output"]]
            assert kinds == ["message", "function_call", "function_call"]

            one.listen()  # the unit that runs since
            await one.send("response.create")
            one.listen(beside=[CALL])
            kinds = [item["type"] for item in one.last("response.done")["response"]["output"]]
            assert kinds == ["function_call"], "expected no empty message beside the call"

    run(scenario)


@pytest.mark.parametrize(("text", "why"), [("\nweather\n", "expected JSON"), ('{"arguments": {}}', "expected JSON")])
def test_what_is_no_call_is_answered_to_the_model(text: str, why: str) -> None:
    async def scenario() -> None:
        async with stage(has_side_lane=True, tools=[WEATHER]) as one:
            await one.append(1.0)
            one.listen(beside=[text])
            assert one.kinds("response") == []
            await one.append(1.0)
            [(role, answer)] = inserted(one)
            assert role == "tool" and why in json.loads(answer)["error"]

    run(scenario)


def test_a_cancelled_response_makes_no_call() -> None:
    async def scenario() -> None:
        async with stage(has_side_lane=True, tools=[WEATHER]) as one:
            await one.append(1.0)
            await one.send("response.create")
            await one.send("response.cancel")
            one.speak("Let me see. ", beside=[CALL])
            assert one.kinds("response.function_call_arguments") == []
            await one.append(1.0)
            assert inserted(one) == [("tool", '{"error": "cancelled"}')]

    run(scenario)


def test_the_model_learns_of_functions_only_with_a_side_lane() -> None:
    async def scenario(has_side_lane: bool) -> None:
        async with stage(has_side_lane=has_side_lane, tools=[WEATHER], instructions="Be kind.") as one:
            assert one.last("session.updated")["session"]["tools"] == [WEATHER]
            await one.append(1.0)
            described = '{"name":"weather","description":"The weather.","parameters":{"type":"object"}}'
            expected = f"Be kind.\n\nYou may call these functions:\n{described}" if has_side_lane else "Be kind."
            assert prompt_of(one) == expected
            assert one.settings.get("max_side_tokens_per_chunk") == (32 if has_side_lane else None)
            one.listen()
            await one.update(tool_choice="none")
            await one.append(1.0)
            assert prompt_of(one) == "Be kind."
            assert one.settings.get("max_side_tokens_per_chunk") == (0 if has_side_lane else None)

    for has_side_lane in (True, False):
        run(lambda given=has_side_lane: scenario(given))


@pytest.mark.parametrize("mode", ["auto", "disabled"])
def test_units_with_calls_fit_into_the_slot(mode: Any) -> None:
    config = RealtimeConfig("duo", tools=(WEATHER,), truncation=Truncation(mode))
    window = WindowConfig(high_tokens=1890, low_tokens=1880)  # as much as a unit without calls leaves
    engine = EngineConfig(llm_len=2000, session=SessionConfig(window=window))
    wanted = EngineSettings.of(config, None, slot=SlotWindow(2000, engine.session), has_side_lane=True).settings
    assert wanted["max_side_tokens_per_chunk"] == 32
    given, _ = SessionConfig.of(engine.session, wanted)
    engine.check_session(given)  # raises if the window and a unit do not fit


def test_a_new_context_knows_the_calls_before_it() -> None:
    async def scenario() -> None:
        async with stage(has_side_lane=True, tools=[WEATHER]) as one:
            await one.append(1.0)
            one.listen(beside=[CALL])
            [item] = one.last("response.done")["response"]["output"]
            output = {"type": "function_call_output", "call_id": item["call_id"], "output": "Rain."}
            await one.send("conversation.item.create", item=output)
            called = ("system", 'You have called weather with {"city": "Köln"}')
            got = [(text.role, text.text) for text in one.session.history()]
            assert got == [called, ("tool", "Rain.")]

    run(scenario)


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        ({"model": {"side_lane": True}}, True),
        ({"model": {"side_lane": None}}, False),
        ({"model": []}, False),
        ({}, False),
    ],
)
def test_a_worker_says_whether_its_model_has_a_side_lane(health: dict[str, Any], expected: bool) -> None:
    worker = Worker(0, WorkerAddress("127.0.0.1", 1))
    worker.health = health
    assert worker.has_side_lane is expected
