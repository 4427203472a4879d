"""Items 28 to 30 and 41 of the conformance list: what a chat client of the public implementation relies on."""

import base64
import io
import wave
from typing import Any

import httpx
import numpy as np
from PIL import Image

from tests.conformance.servers import Servers
from tests.worker.http.client_scripts import VIDEO
from tests.worker.http.small_worker import N_SLOTS

FRAMES_OF_THE_GATEWAY = ("queued", "queue_update", "queue_done")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def request(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "generation": {"max_new_tokens": 5}, **fields}


def chat(servers: Servers, **fields: Any) -> list[dict[str, Any]]:
    """The messages of one chat without those of the queue; the server closes with 1000."""
    with servers.open("/ws/chat") as client:
        client.send(**fields)
        messages = [client.receive()]
        while messages[-1]["type"] not in ("done", "error"):
            messages.append(client.receive())
        assert client.close_code() == 1000
    return [message for message in messages if message["type"] not in FRAMES_OF_THE_GATEWAY]


def test_item_28_messages_of_an_answer(servers: Servers) -> None:
    prefilled, *chunks, done = chat(servers, **request())
    assert prefilled["type"] == "prefill_done" and type(prefilled["input_tokens"]) is int
    assert chunks and all(chunk.keys() == {"type", "text_delta"} for chunk in chunks)
    assert "".join(chunk["text_delta"] for chunk in chunks) == done["text"] and "audio_data" not in done
    assert type(done["generated_tokens"]) is int and done["input_tokens"] == prefilled["input_tokens"]

    voice = b64((np.sin(np.arange(32_000) * 0.05) * 0.5).astype("<f4").tobytes())
    with servers.open("/ws/chat") as client:
        client.send(**request(tts={"enabled": True, "mode": "omni", "ref_audio_data": voice}))
        while "audio_data" not in (chunk := client.receive()):
            assert chunk["type"] != "done", "expected sound, got none"
        sound = base64.b64decode(chunk["audio_data"])
        assert len(sound) > 0 and len(sound) % 4 == 0
        servers.worker.ask("/streaming/stop", post={})  # the embedded checkpoint speaks for long
        assert client.until("done")[-1]["text"]

    prefilled, done = chat(servers, **request(streaming=False))
    assert (prefilled["type"], done["audio_data"]) == ("prefill_done", None)

    (error,) = chat(servers, messages=[])
    assert error["type"] == "error" and isinstance(error["error"], str)


def test_item_29_kinds_of_content(servers: Servers) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 30, 30)).save(picture, "JPEG")
    sound = b64(np.zeros(8_000, "<f4").tobytes())
    system = [
        {"type": "text", "text": "You are kind."},
        {"type": "audio", "data": sound, "name": "voice.wav", "duration": 0.5},
        {"type": "text", "text": "Keep this voice."},
    ]
    user = [
        {"type": "image", "data": b64(picture.getvalue())},
        {"type": "audio", "data": sound, "sample_rate": 16000},
        {"type": "audio", "data": b64(VIDEO.read_bytes()), "name": "attached.mp4"},
        {"type": "video", "data": b64(VIDEO.read_bytes()), "stack_frames": 1},
        {"type": "unknown", "data": "AAAA"},
        {"type": "text", "text": "What is it?"},
    ]
    history = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": user},
    ]
    fields = {"omni_mode": True, "image": {"max_slice_nums": 1}, "tts": {"enabled": False, "mode": "anything"}}
    done = chat(servers, messages=history, generation={"max_new_tokens": 2, "length_penalty": 1.1}, **fields)[-1]
    assert done["type"] == "done" and done["input_tokens"] > 12 * 74, f"got {done}"


def test_item_30_chat_over_http(servers: Servers) -> None:
    def ask(**fields: Any) -> tuple[int, Any]:
        address = f"http://127.0.0.1:{servers.gateway}/api/chat"
        answer = httpx.post(address, json=request(**fields), timeout=60, trust_env=False)
        return answer.status_code, answer.json()

    status, body = ask(tts={"enabled": True}, generation={"max_new_tokens": 1})
    assert (status, body["success"], body["audio_sample_rate"]) == (200, True, 24_000)
    assert isinstance(body["text"], str)
    with wave.open(io.BytesIO(base64.b64decode(body["audio_data"]))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.getnframes() > 0
    assert "recording_session_id" in body
    status, body = ask(generation={"max_new_tokens": 5000})
    assert status == 422 and isinstance(body["detail"], str)


def test_item_41_worker_of_the_test_scripts(servers: Servers) -> None:
    worker = servers.worker
    health = worker.wait_free(N_SLOTS)
    assert (health["status"], health["worker_status"], health["model_loaded"]) == ("healthy", "idle", True)
    assert worker.ask("/cache_info")[1]["status"]
    greedy = request(generation={"max_new_tokens": 5, "do_sample": False})
    first, second = (worker.ask("/chat", post=greedy)[1]["text"] for _ in range(2))
    assert first == second

    with servers.open("/ws/streaming/turns") as client:
        messages: list[dict[str, str]] = []
        for text in ("Hi", "And then?"):
            messages.append({"role": "user", "content": text})
            client.send(type="prefill", session_id="turns", messages=messages, is_last_chunk=True)
            prefilled = client.until("prefill_done")[-1]
            assert prefilled["message_count"] == len(messages) and prefilled["input_tokens"] > 0
            client.send(type="generate", session_id="turns", generate_audio=False, max_new_tokens=4)
            assert worker.health()["status"] == "healthy"
            done = client.until("done")[-1]
            assert done["token_stats"]["total_tokens"] > prefilled["input_tokens"] and done["elapsed_ms"] > 0
            messages.append({"role": "assistant", "content": done["text"]})
