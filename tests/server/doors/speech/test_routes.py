"""Speech over HTTP in front of a scripted worker: formats, streams, errors before and after the first byte, the end."""

import asyncio
import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from server.doors.core.sound_formats import FORMAT_NAMES, MEDIA_TYPES, encoded
from tests.server.doors.core.test_sound_formats import decoded
from tests.server.doors.stub_worker import (
    DONE,
    PREFILLED,
    RATE,
    SPOKEN,
    TEXT,
    TONE,
    Step,
    chunk,
    forever,
    run,
    stub_gateway,
    until_idle,
)

PATH = "/v1/audio/speech"
REQUEST = {"model": "tts-1", "input": TEXT, "voice": "alloy"}
FULL = {"type": "error", "code": "context_full", "error": "conversation: expected less"}
BUSY = {"type": "error", "code": "busy", "error": "worker: expected a free slot, got all 2 in use"}


async def ask(http: httpx.AsyncClient, status: int = 200, **fields: Any) -> httpx.Response:
    response = await http.post(PATH, json={**REQUEST, **fields})
    assert response.status_code == status, response.text[:300]
    return response


def events_of(text: str) -> list[dict[str, Any]]:
    """The objects of an event stream."""
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: ")]


def test_every_format_has_the_whole_sound_and_its_media_type() -> None:
    async def scenario() -> None:
        async with stub_gateway(SPOKEN) as (gateway, worker):
            for name in FORMAT_NAMES:
                response = await ask(gateway.http, response_format=name)
                assert response.headers["content-type"] == MEDIA_TYPES[name]
                assert response.headers["transfer-encoding"] == "chunked" and response.headers["x-request-id"]
                samples, rate = decoded(response.content, name)
                assert abs(len(samples) / rate - len(TONE) / RATE) < 0.1 and np.abs(samples).max() > 0.3
            path, given = worker.requests[0]
            assert path == "/ws/speech" and given["text"] == TEXT
            await until_idle(gateway, worker, 1.0)

    run(scenario)


def test_event_stream_has_slices_of_the_same_file() -> None:
    async def scenario() -> None:
        async with stub_gateway(SPOKEN) as (gateway, _):
            response = await ask(gateway.http, stream_format="sse", response_format="flac")
            assert response.headers["content-type"].startswith("text/event-stream")
            *deltas, done = events_of(response.text)
            assert {one["type"] for one in deltas} == {"speech.audio.delta"} and len(deltas) >= 2
            whole = b"".join(base64.b64decode(one["audio"]) for one in deltas)
            assert whole == (await ask(gateway.http, response_format="flac")).content
            assert done == {
                "type": "speech.audio.done",
                "usage": {"input_tokens": 4, "output_tokens": 50, "total_tokens": 54},
                "finish_reason": "stop",
            }

    run(scenario)


def test_first_bytes_come_before_the_last_sound() -> None:
    go_on = asyncio.Event()

    async def wait(_: object) -> None:
        await go_on.wait()

    async def scenario() -> None:
        steps: list[Step] = [PREFILLED, chunk(TEXT, TONE[:RATE]), wait, chunk(None, TONE[RATE:]), DONE]
        async with (
            stub_gateway(steps) as (gateway, _),
            gateway.http.stream("POST", PATH, json={**REQUEST, "response_format": "pcm"}) as response,
        ):
            parts = response.aiter_raw()
            data = b""
            while len(data) < 2 * RATE:
                data += await anext(parts)
            go_on.set()
            async for part in parts:
                data += part
        assert data == encoded(TONE, "pcm")

    run(scenario)


def test_client_that_leaves_frees_the_slot() -> None:
    async def scenario() -> None:
        async with stub_gateway([PREFILLED, chunk(TEXT, TONE), forever]) as (gateway, worker):
            for fields in ({"response_format": "pcm"}, {"stream_format": "sse"}):
                async with gateway.http.stream("POST", PATH, json={**REQUEST, **fields}) as response:
                    await anext(response.aiter_raw())
                    assert worker.n_open == 1
                await until_idle(gateway, worker, 0.5)

    run(scenario)


def test_client_that_leaves_before_the_first_byte_frees_the_slot() -> None:
    async def scenario() -> None:
        async with stub_gateway([PREFILLED, forever]) as (gateway, worker):
            asking = asyncio.create_task(ask(gateway.http))
            while not worker.n_open:
                await asyncio.sleep(0.005)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until_idle(gateway, worker, 0.5)

    run(scenario)


@pytest.mark.parametrize(
    ("step", "status", "param", "code"),
    [
        (FULL, 400, "input", "context_length_exceeded"),
        ({"type": "error", "code": "bad_message", "error": "text: expected text"}, 400, "input", "invalid_value"),
        ({"type": "error", "code": "engine", "error": "engine: expected one that runs"}, 500, None, "internal_error"),
        (None, 500, None, "internal_error"),
    ],
)  # fmt: skip
def test_error_before_the_first_byte_is_a_response(
    step: dict[str, Any] | None, status: int, param: str | None, code: str
) -> None:
    async def break_off(connection: Any) -> None:
        connection.transport.abort()

    async def scenario() -> None:
        steps: list[Step] = [PREFILLED, break_off if step is None else step]
        async with stub_gateway(steps) as (gateway, worker):
            for fields in ({}, {"stream_format": "sse"}):
                response = await ask(gateway.http, status, **fields)
                error = response.json()["error"]
                assert (error["param"], error["code"]) == (param, code)
                assert response.headers["x-should-retry"] == "false"
            await until_idle(gateway, worker, 1.0)

    run(scenario)


def test_error_after_the_first_byte_breaks_the_file_off_and_is_an_event_of_a_stream() -> None:
    failure = {"type": "error", "code": "engine", "error": "engine: expected one that runs, got a failure"}

    async def scenario() -> None:
        async with stub_gateway([PREFILLED, chunk(TEXT, TONE), failure]) as (gateway, _):
            with pytest.raises(httpx.RemoteProtocolError):
                await ask(gateway.http, response_format="pcm")
            *deltas, last = events_of((await ask(gateway.http, stream_format="sse")).text)
            assert deltas and last["error"]["type"] == "server_error"

    run(scenario)


def test_worker_without_a_slot_is_tried_again() -> None:
    async def scenario() -> None:
        async with stub_gateway([BUSY], SPOKEN) as (gateway, worker):
            assert (await ask(gateway.http)).content
            assert len(worker.requests) == 2

    run(scenario)


def test_refused_requests_take_no_slot() -> None:
    async def scenario() -> None:
        async with stub_gateway(SPOKEN) as (gateway, worker):
            for fields, status, param in (
                ({"voice": "unknown voice"}, 400, "voice"),
                ({"speed": 9}, 400, "speed"),
                ({"model": "llama"}, 404, "model"),
                ({"ref_audio": "data:audio/wav;base64,AAAA"}, 400, "ref_audio"),
            ):
                error = (await ask(gateway.http, status, **fields)).json()["error"]
                assert error["param"] == param
            gateway.gateway.apps.set_enabled("turnbased", False)
            assert (await ask(gateway.http, 403)).json()["error"]["type"] == "permission_error"
            assert not worker.requests

    run(scenario)


def test_all_voices_of_the_api_and_registered_ones_speak() -> None:
    async def scenario() -> None:
        async with stub_gateway(SPOKEN) as (gateway, worker):
            for voice in ("alloy", "cedar", {"id": "marin"}, "default"):
                await ask(gateway.http, voice=voice, response_format="pcm")
                assert worker.requests[-1][1]["tts"] == {}
            [registered, *_] = gateway.gateway.voices.all()
            await ask(gateway.http, voice=registered.id, response_format="pcm")

    run(scenario)
