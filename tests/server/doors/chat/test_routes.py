"""Chat completions in front of a scripted worker: whole answers, streams, sound, calls, errors, the end."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from models.checkpoint.embedded import DEFAULT
from server.doors.chat import routes
from server.doors.core.picture_urls import PictureUrls
from server.doors.core.sound_formats import encoded
from server.live.live_sessions import LiveSession
from tests.server.doors.core.test_sound_formats import decoded
from tests.server.doors.speech.test_routes import events_of
from tests.server.doors.stub_worker import (
    DONE,
    PREFILLED,
    RATE,
    SPOKEN,
    TONE,
    Step,
    chunk,
    forever,
    run,
    stub_gateway,
    until_idle,
)
from tests.server.garbage import without_garbage

PATH = "/v1/chat/completions"
HI = {"model": DEFAULT.name, "messages": [{"role": "user", "content": "Hi"}]}
WRITTEN: list[Step] = [PREFILLED, chunk("Hello"), chunk(" there."), DONE]
TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]}
CALLED: list[Step] = [
    PREFILLED,
    chunk('<tool_call>\n{"name": "weather", "argu'),
    chunk('ments": {}}\n</tool_call>'),
    DONE,
]
AUDIO = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}


async def ask(http: httpx.AsyncClient, status: int = 200, **fields: Any) -> httpx.Response:
    response = await http.post(PATH, json={**HI, **fields})
    assert response.status_code == status, response.text[:300]
    return response


def deltas_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The deltas of a stream, whose form is checked."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    chunks = events_of(response.text.removesuffix("data: [DONE]\n\n"))
    assert len({one["id"] for one in chunks}) == 1
    assert {one["object"] for one in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    return [one["choices"][0]["delta"] for one in chunks if one["choices"]]


def test_answer_has_text_and_usage() -> None:
    async def scenario() -> None:
        async with stub_gateway(WRITTEN) as (gateway, worker):
            got = (await ask(gateway.http, model="gpt-audio")).json()
            assert (
                got["object"] == "chat.completion"
                and got["model"] == DEFAULT.name
                and got["id"].startswith("chatcmpl-")
            )
            assert got["choices"] == [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello there.", "refusal": None},
                    "finish_reason": "stop",
                    "logprobs": None,
                }
            ]
            usage = got["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (30, 54, 84)
            assert usage["prompt_tokens_details"]["audio_tokens"] == 12
            path, given = worker.requests[0]
            assert path == "/ws/chat" and given["report_usage"] and given["messages"] == HI["messages"]

    run(scenario)


def test_stream_has_the_same_text_and_usage_if_asked() -> None:
    async def scenario() -> None:
        async with stub_gateway(WRITTEN) as (gateway, _):
            response = await ask(gateway.http, stream=True, stream_options={"include_usage": True})
            assert "".join(one.get("content") or "" for one in deltas_of(response)) == "Hello there."
            *_, last_choice, last = events_of(response.text.removesuffix("data: [DONE]\n\n"))
            assert last_choice["choices"][0]["finish_reason"] == "stop" and last_choice["usage"] is None
            assert last["choices"] == [] and last["usage"]["total_tokens"] == 84
            assert "usage" not in (await ask(gateway.http, stream=True)).text

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop_text(stream: bool) -> None:
    async def scenario() -> None:
        async with stub_gateway(WRITTEN) as (gateway, worker):
            response = await ask(gateway.http, stop=["o th"], stream=stream)
            if stream:
                text = "".join(one.get("content") or "" for one in deltas_of(response))
            else:
                text = response.json()["choices"][0]["message"]["content"]
            assert text == "Hell" and worker.requests[0][1]["generation"]["stop"] == ["o th"]

    run(scenario)


def test_spoken_answer_is_a_file_and_can_be_referred_to() -> None:
    async def scenario() -> None:
        async with stub_gateway(SPOKEN) as (gateway, worker):
            for name in ("wav", "mp3", "flac", "opus", "aac", "pcm16"):
                got = await ask(gateway.http, modalities=["text", "audio"], audio={"voice": "alloy", "format": name})
                message = got.json()["choices"][0]["message"]
                audio = message["audio"]
                assert message["content"] is None and audio["transcript"] == "Hello there."
                samples, rate = decoded(base64.b64decode(audio["data"]), "pcm" if name == "pcm16" else name)
                assert abs(len(samples) / rate - len(TONE) / RATE) < 0.1
            assert worker.requests[0][1]["tts"]["enabled"] and worker.requests[0][1]["introduces_voice"]
            again = [
                *HI["messages"],
                {"role": "assistant", "audio": {"id": audio["id"]}},
                {"role": "user", "content": "?"},
            ]
            await ask(gateway.http, messages=again)
            assert worker.requests[-1][1]["messages"][1] == {"role": "assistant", "content": "Hello there."}
            again[1] = {"role": "assistant", "audio": {"id": "audio_0"}}
            assert (await ask(gateway.http, 400, messages=again)).json()["error"]["param"] == "messages[1].audio.id"

    run(scenario)


def test_spoken_stream_has_pcm16_and_transcript() -> None:
    async def scenario() -> None:
        async with stub_gateway(SPOKEN) as (gateway, _):
            audio = {"voice": "alloy", "format": "pcm16"}
            response = await ask(gateway.http, stream=True, modalities=["text", "audio"], audio=audio)
            parts = [one["audio"] for one in deltas_of(response) if "audio" in one]
            assert len({part["id"] for part in parts}) == 1 and parts[-1]["expires_at"]
            assert "".join(part.get("transcript", "") for part in parts) == "Hello there."
            assert b"".join(base64.b64decode(part.get("data", "")) for part in parts) == encoded(TONE, "pcm")

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_functions(stream: bool) -> None:
    async def scenario() -> None:
        async with stub_gateway(CALLED) as (gateway, worker):
            response = await ask(gateway.http, stream=stream, **TOOLS)
            if stream:
                deltas = deltas_of(response)
                [[call]] = [one["tool_calls"] for one in deltas if "tool_calls" in one]
                assert call["index"] == 0 and '"finish_reason":"tool_calls"' in response.text
                assert not any(one.get("content") for one in deltas)
            else:
                choice = response.json()["choices"][0]
                [call] = choice["message"]["tool_calls"]
                assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            assert call["type"] == "function" and call["function"] == {"name": "weather", "arguments": "{}"}
            assert worker.requests[0][1]["tools"] == TOOLS["tools"]

    run(scenario)


def test_demanded_call_begins_the_answer() -> None:
    async def scenario() -> None:
        async with stub_gateway([PREFILLED, chunk('{"city": "a"}}\n</tool_call>'), DONE]) as (gateway, worker):
            choice = {"type": "function", "function": {"name": "weather"}}
            message = (await ask(gateway.http, **TOOLS, tool_choice=choice)).json()["choices"][0]["message"]
            [call] = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "a"}
            assert worker.requests[0][1]["answer_start"] == '<tool_call>\n{"name": "weather", "arguments": '

    run(scenario)


def test_spoken_answer_with_tools_is_written_first_and_then_voiced() -> None:
    async def scenario() -> None:
        async with stub_gateway(WRITTEN, SPOKEN, CALLED) as (gateway, worker):
            message = (await ask(gateway.http, **TOOLS, **AUDIO)).json()["choices"][0]["message"]
            assert message["audio"]["transcript"] == "Hello there." and message["audio"]["data"]
            assert [path for path, _ in worker.requests] == ["/ws/chat", "/ws/speech"]
            assert "tts" not in worker.requests[0][1] and worker.requests[1][1]["text"] == "Hello there."
            message = (await ask(gateway.http, **TOOLS, **AUDIO)).json()["choices"][0]["message"]
            assert message["tool_calls"] and "audio" not in message and len(worker.requests) == 3

    run(scenario)


def test_error_before_the_answer_is_a_response_and_after_it_an_event() -> None:
    failure = {"type": "error", "code": "engine", "error": "engine: expected one that runs, got a failure"}
    bad = {"type": "error", "code": "bad_image", "error": "messages[0].content[0].data: expected a picture, got none"}

    async def scenario() -> None:
        async with stub_gateway([bad], [bad], [PREFILLED, chunk("Hello"), failure]) as (gateway, _):
            for stream in (False, True):
                error = (await ask(gateway.http, 400, stream=stream)).json()["error"]
                assert error["param"] == "messages[0].content[0].data"
            *_, last = events_of((await ask(gateway.http, stream=True)).text)
            assert last["error"]["type"] == "server_error"
            assert (await ask(gateway.http, 500)).headers["x-should-retry"] == "false"

    run(scenario)


def test_client_that_leaves_frees_the_slot() -> None:
    async def scenario() -> None:
        async with stub_gateway([PREFILLED, chunk("Hello"), forever]) as (gateway, worker):
            async with gateway.http.stream("POST", PATH, json={**HI, "stream": True}) as response:
                await anext(response.aiter_raw())
                assert worker.n_open == 1
            await until_idle(gateway, worker, 0.5)
            async with without_garbage(LiveSession):
                asking = asyncio.create_task(ask(gateway.http))
                while not worker.n_open:
                    await asyncio.sleep(0.005)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await until_idle(gateway, worker, 0.5)

    run(scenario)


def test_waiting_stream_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "PING_S", 0.05)
    go_on = asyncio.Event()

    async def wait(_: object) -> None:
        await go_on.wait()

    async def scenario() -> None:
        async with (
            stub_gateway([wait, *WRITTEN]) as (gateway, _),
            gateway.http.stream("POST", PATH, json={**HI, "stream": True}) as response,
        ):
            parts = response.aiter_raw()
            assert await anext(parts) == b": ping\n\n"
            go_on.set()
            rest = b"".join([part async for part in parts])
        assert b"Hello" in rest and rest.endswith(b"data: [DONE]\n\n")

    run(scenario)


def test_full_queue_answers_503() -> None:
    async def scenario() -> None:
        async with stub_gateway([PREFILLED, forever], slots=1) as (gateway, worker):
            gateway.gateway.dispatcher.queue.max_size = 0
            first = asyncio.create_task(ask(gateway.http))
            while not worker.n_open:
                await asyncio.sleep(0.005)
            refused = await ask(gateway.http, 503)
            assert refused.json()["error"]["code"] == "overloaded" and int(refused.headers["retry-after"]) >= 1
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    run(scenario)


def test_pictures_behind_addresses_are_fetched_from_allowed_hosts_only() -> None:
    async def resolve(_: str) -> list[str]:
        return ["93.184.216.34"]

    def answer(_: httpx.Request) -> httpx.Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"picture"

        return httpx.Response(200, content=parts())

    def asking(url: str) -> dict[str, Any]:
        content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
        return {**HI, "messages": [{"role": "user", "content": content}]}

    pictures = PictureUrls(("a.example.org",), resolve=resolve, transport=httpx.MockTransport(answer))

    async def scenario() -> None:
        async with stub_gateway(WRITTEN, picture_urls=pictures) as (gateway, worker):
            assert (await gateway.http.post(PATH, json=asking("https://a.example.org/b.jpg"))).status_code == 200
            [(_, request)] = worker.requests
            assert base64.b64decode(request["messages"][0]["content"][1]["data"]) == b"picture"
            refused = await gateway.http.post(PATH, json=asking("https://b.example.org/b.jpg"))
            assert refused.status_code == 400 and len(worker.requests) == 1
            assert refused.json()["error"]["param"] == "messages[0].content[1].image_url.url"
            assert "a host that the operator allows, got b.example.org" in refused.json()["error"]["message"]
        async with stub_gateway(WRITTEN) as (gateway, worker):
            refused = await gateway.http.post(PATH, json=asking("https://a.example.org/b.jpg"))
            assert refused.status_code == 400 and "expected a data: URL" in refused.json()["error"]["message"]
            assert not worker.requests

    run(scenario)
