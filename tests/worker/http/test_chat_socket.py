"""Chats and streamed turns on a worker: answers, cancellation, stop, refusals, health while they run."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.conformance.servers import WireClient
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.small_worker import N_SLOTS, cancels_one

LONG = {"max_new_tokens": 2000, "length_penalty": 5, "temperature": 0}  # the most likely tokens never end it

pytestmark = pytest.mark.usefixtures("all_slots_free")


def request(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "generation": {"max_new_tokens": 6}, **fields}


@contextmanager
def opened(worker: WorkerProcess, path: str = "/ws/chat") -> Iterator[WireClient]:
    with connect(f"ws://127.0.0.1:{worker.port}{path}", max_size=None, proxy=None) as connection:
        yield WireClient(connection)


def chat(worker: WorkerProcess, **fields: Any) -> list[dict[str, Any]]:
    """All messages of one chat, which ends with close code 1000."""
    with opened(worker) as client:
        client.send(**fields)
        messages = [client.receive()]
        while messages[-1]["type"] not in ("done", "error"):
            messages.append(client.receive())
        assert client.close_code() == 1000
    return messages


def test_settings_of_the_generation_are_honoured(worker: WorkerProcess) -> None:
    greedy = {"max_new_tokens": 5, "do_sample": False, "num_beams": 1}
    first, second = (chat(worker, **request(generation=greedy))[-1] for _ in range(2))
    assert first == second and first["generated_tokens"] <= 5
    cold = {"max_new_tokens": 5, "temperature": 0}
    assert chat(worker, **request(generation=cold))[-1]["text"] == first["text"]
    drawn = {chat(worker, **request(generation={"max_new_tokens": 5, "top_k": 0}))[-1]["text"] for _ in range(3)}
    assert len(drawn) > 1, f"expected several answers, got {drawn}"


def test_refused_requests_say_why(worker: WorkerProcess) -> None:
    for fields, code, text in (
        ({"messages": []}, "bad_message", "messages: expected at least one message, got none"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "bad_message", "messages[0].role"),
        (
            request(tts={"enabled": True, "ref_audio_path": "../secret"}),
            "bad_config",
            "ref_audio_path: expected one of",
        ),
        (request(tts={"enabled": True, "ref_audio_data": "AAAA"}), "bad_audio", "tts.ref_audio_data"),
        (request("x " * 5000), "context_full", "prompt and answer"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "data": "AAAA"}]}]},
            "bad_image",
            "messages[0].content[0]: expected bytes",
        ),
    ):
        (error,) = chat(worker, **fields)
        assert (error["type"], error["code"]) == ("error", code), f"got {error}"
        assert text in error["error"]
    with opened(worker) as client:
        client.connection.send("no JSON")
        assert client.receive()["code"] == "bad_json"
        assert client.close_code() == 1000


@pytest.mark.parametrize("speaks", [False, True])
def test_closed_socket_ends_the_answer(worker: WorkerProcess, speaks: bool) -> None:
    with cancels_one(worker), opened(worker) as client:
        client.send(**request(generation=LONG, tts={"enabled": speaks}))
        client.until("chunk")
        assert worker.health()["worker_status"] == "busy_chat"


def test_aborted_http_request_ends_the_answer(worker: WorkerProcess) -> None:
    body = json.dumps(request(generation=LONG)).encode()
    with cancels_one(worker), socket.create_connection(("127.0.0.1", worker.port)) as connection:
        head = (
            f"POST /chat HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        worker.wait_health(lambda health: health["worker_status"] == "busy_chat", "a busy worker")


def test_http_answers_have_statistics(worker: WorkerProcess) -> None:
    before = worker.health()["total_requests"]
    status, body = worker.ask("/chat", post=request(return_prompt=True))
    assert status == 200 and body["success"] and body["error"] is None and body["audio_path"] is None
    stats = body["token_stats"]
    assert stats["cached_tokens"] == 0
    assert stats["input_tokens"] + stats["generated_tokens"] == stats["total_tokens"]
    assert stats["generated_tokens"] == body["tokens_generated"] and body["duration_ms"] > 0
    assert body["prompt"].startswith("<|im_start|>user\nHi<|im_end|>")
    health = worker.health()
    assert health["total_requests"] == before + 1 and health["avg_inference_time_ms"] > 0


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"messages": []}, 422, "at least one message"),
        (request(generation={"max_new_tokens": 0}), 422, "from 1 to 4096"),
        (request(generation={"do_sample": False, "num_beams": 9}), 422, "from 1 to 8"),
        (request(generation={"num_beams": 3}), 422, "num_beams: expected 1 where tokens are drawn at random, got 3"),
        (request(image={"max_slice_nums": 17}), 422, "from 1 to 16"),
        (request(tts={"enabled": True, "mode": "opera"}), 422, "tts.mode"),
        (request(tts={"output_path": "/tmp/a.wav"}), 422, "tts.output_path"),
        (request(tts={"enabled": True, "ref_audio_path": "/etc/passwd"}), 422, "ref_audio_path: expected one of"),
        (request("x " * 5000), 422, "prompt and answer"),
    ],
)
def test_http_refuses_invalid_requests(worker: WorkerProcess, fields: dict[str, Any], status: int, text: str) -> None:
    got, body = worker.ask("/chat", post=fields)
    assert got == status and text in body["detail"], f"got {got} {body}"


def test_answers_without_random_tokens_are_searched_for_with_beams(worker: WorkerProcess) -> None:
    texts = {}
    for n in (None, 3, 1):
        generation = {"max_new_tokens": 12, "do_sample": False, "num_beams": n}
        status, body = worker.ask("/chat", post=request(generation=generation))
        assert status == 200 and body["success"] and body["tokens_generated"] <= 12
        texts[n] = body["text"]
    assert texts[None] == texts[3] != texts[1]
    searched = chat(worker, **request(generation={"max_new_tokens": 12, "do_sample": False}))
    assert [message["type"] for message in searched] == ["prefill_done", "chunk", "done"]
    assert searched[1]["text_delta"] == searched[2]["text"] == texts[3]


def test_searched_answers_are_voiced(worker: WorkerProcess) -> None:
    generation = {"max_new_tokens": 3, "do_sample": False}
    status, body = worker.ask("/chat", post=request(generation=generation, tts={"enabled": True}))
    assert status == 200 and body["success"] and body["audio_data"] and body["text"]


def test_stop_ends_a_search(worker: WorkerProcess) -> None:
    with opened(worker) as client:
        client.send(**request(generation={"max_new_tokens": 2000, "do_sample": False, "length_penalty": 5}))
        assert client.receive()["type"] == "prefill_done"
        assert worker.ask("/streaming/stop", post={})[0] == 200
        done = client.receive()
    assert (done["type"], done["stopped"], done["text"]) == ("done", "interrupted", "")


def test_busy_worker_answers_429_and_an_error(worker: WorkerProcess) -> None:
    with ExitStack() as stack:
        *holders, client = (
            stack.enter_context(opened(worker, path)) for path in [*["/ws/streaming"] * N_SLOTS, "/ws/chat"]
        )
        for holder in holders:
            holder.send(type="prefill", messages=request()["messages"])
            holder.until("prefill_done")
        assert worker.health()["worker_status"] == "busy_streaming"
        client.send(**request())
        status, body = worker.ask("/chat", post=request())
        error = client.receive()
    assert (status, error["type"], error["code"]) == (429, "error", "busy"), f"got {status} {body}, {error}"


def test_streamed_turns_share_the_conversation(worker: WorkerProcess) -> None:
    with opened(worker, "/ws/streaming?session_id=turns") as client:
        client.send(type="generate")
        assert client.receive()["code"] == "not_prepared"
        client.send(type="prefill", messages=[{"role": "system", "content": "Be kind."}])
        first = client.receive()
        client.send(type="prefill", messages=[{"role": "user", "content": "Hi"}], session_id="turns")
        second = client.receive()
        assert (first["type"], first["message_count"], second["message_count"]) == ("prefill_done", 1, 2)
        assert second["input_tokens"] > first["input_tokens"] > 0 == second["cached_tokens"]
        client.send(type="generate", generate_audio=False, max_new_tokens=4)
        *chunks, last, done = client.until("done")
        assert (last["is_final"], last["text_delta"]) == (True, None)
        assert "".join(chunk["text_delta"] for chunk in chunks) == done["text"]
        assert done["token_stats"]["input_tokens"] == second["input_tokens"]
        assert (done["session_id"], done["stopped"]) == ("turns", False) and done["elapsed_ms"] > 0
        worker.wait_free(N_SLOTS)  # between two turns the slot is free
        client.send(type="prefill", messages=[{"role": "user", "content": "And?"}])
        assert client.receive()["message_count"] == 4  # the answer belongs to the conversation
        history = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Again."}]
        client.send(type="prefill", messages=history)
        assert client.receive()["message_count"] == 2
        client.send(type="close")
        assert client.close_code() == 1000


def test_stop_ends_streamed_turns_and_chats(worker: WorkerProcess) -> None:
    with opened(worker, "/ws/streaming?session_id=long") as turn, opened(worker, "/ws/chat?session_id=other") as other:
        turn.send(type="prefill", messages=[{"role": "user", "content": "Hi"}])
        turn.until("prefill_done")
        turn.send(type="generate", max_new_tokens=1000, length_penalty=5)
        other.send(**request(generation=LONG))
        turn.until("chunk")
        other.until("chunk")
        assert worker.health()["worker_status"] == "busy_chat"
        assert worker.ask("/streaming/stop", post={"session_id": "unknown"})[1]["stopped"] == []
        assert worker.ask("/streaming/stop", post={"session_id": "long"}) == (
            200,
            {"success": True, "message": "1 answers are stopped", "stopped": ["long"]},
        )
        assert turn.until("done")[-1]["stopped"] is True
        assert worker.ask("/streaming/stop", post={})[1]["stopped"] == ["other"]
        assert other.until("done")[-1]["stopped"] == "interrupted"


# --- speech ----------------------------------------------------------------------------------------


def test_given_text_is_spoken_exactly(worker: WorkerProcess) -> None:
    text = "<|im_end|> 你好"
    with opened(worker, "/ws/speech") as client:
        client.send(text=text, seed=7, tts={"ref_audio_path": "default"})
        first, *chunks, done = client.until("done")
        assert client.close_code() == 1000
    assert first["type"] == "prefill_done" and {chunk["type"] for chunk in chunks} == {"chunk"}
    assert "".join(chunk.get("text_delta", "") for chunk in chunks) == done["text"] == text
    assert done["stopped"] == "stop" and done["usage"]["speech_tokens"] > 0
    assert done["usage"]["input_audio_tokens"] > 0, "expected the voice in the prompt"
    assert any(chunk.get("audio_data") for chunk in chunks)
    worker.wait_free(N_SLOTS)


def test_refused_speech_says_why(worker: WorkerProcess) -> None:
    for fields, code in (
        ({"text": ""}, "bad_message"),
        ({"text": "Hi", "tts": {"ref_audio_path": "no such voice"}}, "bad_config"),
        ({"text": "x " * 8000}, "context_full"),
    ):
        with opened(worker, "/ws/speech") as client:
            client.send(**fields)
            assert client.receive()["code"] == code
            assert client.close_code() == 1000


def test_closed_socket_ends_the_speech(worker: WorkerProcess) -> None:
    with cancels_one(worker), opened(worker, "/ws/speech") as client:
        client.send(text="word " * 500)
        client.until("chunk")
