"""The stock openai SDK against started processes: models, errors, speech, chat, and the end of what a client leaves."""

import base64
import io
import json
import time
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import openai
import pytest

from models.checkpoint.embedded import DEFAULT
from tests.conformance.servers import Servers

TEXT = "Hi."
RATE = 24_000
LIMIT_S = 90.0
ASKED: Any = [{"role": "user", "content": "Good morning."}]


@pytest.fixture(scope="module")
def client(servers: Servers) -> Iterator[openai.OpenAI]:
    base_url = f"http://127.0.0.1:{servers.gateway}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        yield client


def loudest(pcm: bytes) -> float:
    return float(np.abs(np.frombuffer(pcm, "<i2") / 32768).max())


def test_models_are_listed_and_aliases_retrieved(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == DEFAULT.name and client.models.retrieve("gpt-realtime").id == "gpt-realtime"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("llama")
    assert refused.value.code == "model_not_found" and refused.value.request_id


def test_errors_have_the_classes_of_the_sdk(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(model="tts-1", voice="unknown voice", input=TEXT)
    assert refused.value.param == "voice" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=DEFAULT.name, messages=ASKED, n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=DEFAULT.name, messages=[{"role": "user", "content": "x " * 9000}])
    assert refused.value.code == "context_length_exceeded"


def test_speech_is_a_stream_of_a_file_with_sound(client: openai.OpenAI) -> None:
    speech = client.audio.speech.create(
        model="tts-1", voice="alloy", input=TEXT, response_format="flac", stream_format="sse"
    )
    *deltas, done = (json.loads(line.removeprefix("data: ")) for line in speech.text.split("\n\n") if line)
    assert len(deltas) > 1, "expected several parts"
    file = b"".join(base64.b64decode(one["audio"]) for one in deltas)
    with av.open(io.BytesIO(file)) as container:
        stream = container.streams.audio[0]
        samples = np.concatenate([frame.to_ndarray().reshape(-1) for frame in container.decode(stream)])
        assert stream.rate == RATE
    assert loudest(samples.astype("<i2").tobytes()) > 0.01
    n_speech = done["usage"]["output_tokens"]
    assert done["type"] == "speech.audio.done" and abs(len(samples) / RATE - n_speech / 25) < 0.5


def test_chat_answers_whole_and_in_parts(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "gpt-audio", "messages": ASKED, "temperature": 0, "max_completion_tokens": 8}
    answer = client.chat.completions.create(**given)
    choice = answer.choices[0]
    assert choice.finish_reason in ("stop", "length") and answer.usage is not None
    assert answer.usage.completion_tokens <= 8 and answer.usage.total_tokens > answer.usage.prompt_tokens
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content and chunks[-1].usage == answer.usage


def test_chat_speaks_and_takes_pictures_sound_and_tools(client: openai.OpenAI, servers: Servers) -> None:
    picture = io.BytesIO()
    with av.open(picture, "w", format="image2pipe") as container:
        stream = container.add_stream("png", rate=1, width=64, height=64, pix_fmt="rgb24")
        frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 90, np.uint8), format="rgb24")
        container.mux([*stream.encode(frame), *stream.encode(None)])
    sound = io.BytesIO()
    with av.open(sound, "w", format="mp3") as container:
        voice = container.add_stream("libmp3lame", rate=RATE, layout="mono")
        tone = (9000 * np.sin(np.arange(RATE) / 20)).astype(np.int16)[None]
        audio = av.AudioFrame.from_ndarray(tone, format="s16", layout="mono")
        audio.sample_rate = RATE
        container.mux([*voice.encode(audio), *voice.encode(None)])
    parts: Any = [
        {"type": "text", "text": "What is this?"},
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"},
        },
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound.getvalue()).decode(), "format": "mp3"}},
    ]
    answer = client.chat.completions.create(
        model=DEFAULT.name,
        messages=[{"role": "user", "content": parts}],
        max_completion_tokens=3,
        modalities=["text", "audio"],
        audio={"voice": "marin", "format": "pcm16"},
    )
    message, usage = answer.choices[0].message, answer.usage
    assert message.content is None and message.audio is not None and usage is not None
    assert usage.prompt_tokens_details is not None and usage.completion_tokens_details is not None
    assert (usage.prompt_tokens_details.audio_tokens or 0) > 5
    if message.audio.transcript:
        assert loudest(base64.b64decode(message.audio.data)) > 0.01
        assert (usage.completion_tokens_details.audio_tokens or 0) > 0
    schema: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    again = client.chat.completions.create(
        model=DEFAULT.name,
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "audio": {"id": message.audio.id}}, *ASKED],
        tools=[schema],
        max_completion_tokens=3,
    )
    assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_left_speech_and_chat_free_their_slots(client: openai.OpenAI, servers: Servers) -> None:
    total = servers.worker.health()["slots"]["total"]
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input="word " * 300, response_format="pcm"
    ) as response:
        next(response.iter_bytes(1))
    with client.chat.completions.create(model=DEFAULT.name, messages=ASKED, max_tokens=4000, stream=True) as chunks:
        next(iter(chunks))
    end = time.monotonic() + 5
    while servers.worker.health()["slots"]["free"] < total:
        assert time.monotonic() < end, "expected all slots to be free within 5 s"
        time.sleep(0.02)
