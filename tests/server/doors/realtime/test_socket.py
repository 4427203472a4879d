"""Realtime sessions over real sockets, with a worker that follows a cycle of listening and speaking."""

import base64
import io
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import websockets
from PIL import Image

from benchmarks.serve.fake_worker import FakeWorker
from server.doors.realtime.session import RealtimeSession
from server.live.live_sessions import LiveSession
from tests.server.doors.realtime.realtime_client import Json, RealtimeClient, realtime, silence, speech
from tests.server.garbage import without_garbage
from tests.server.live_gateway import run, running_gateway, wait_until

SPOKEN = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio_transcript.delta",
    "response.output_audio.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
    "rate_limits.updated",
]


@asynccontextmanager
async def session(**cycle: int) -> AsyncIterator[RealtimeClient]:
    """A session of a gateway with one worker, which must be idle afterwards. cycle: of the worker's units."""
    async with FakeWorker(**cycle) as worker, running_gateway(worker) as gateway:
        async with realtime(gateway.port) as client:
            yield client
        await gateway.wait_idle()


def collapsed(kinds: list[str]) -> list[str]:
    """Types without repetitions, and deltas of sound and text in turn as one pair."""
    kinds = [kind for kind, _ in itertools.groupby(kinds)]
    found: list[str] = []
    for kind in kinds:
        if not (kind.endswith(".delta") and kind in found):
            found.append(kind)
    return found


async def spoken_turn(client: RealtimeClient) -> None:
    """Send sound until the model has spoken."""
    await client.append(silence(4.0))
    await client.until("rate_limits.updated")


def test_a_spoken_turn_sends_its_events_in_order() -> None:
    async def scenario() -> None:
        async with session(n_listen=1, n_speak=2) as client:
            await spoken_turn(client)
            assert collapsed(client.kinds("response.created")) == SPOKEN
            ids = [event["event_id"] for event in client.log]
            assert len(set(ids)) == len(ids)
            spoken = [event for event in client.log if event["type"] == "response.output_audio.delta"]
            sound = [base64.b64decode(event["delta"]) for event in spoken]
            assert sum(map(len, sound)) == 2 * 2 * 24_000 and max(map(len, sound)) <= 12_000
            [done] = [event["response"] for event in client.log if event["type"] == "response.done"]
            text = "".join(event["delta"] for event in client.log if event["type"].endswith("audio_transcript.delta"))
            assert done["status"] == "completed" and done["usage"]["input_token_details"]["audio_tokens"] > 0
            assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": text}]

    run(scenario)


def test_an_ended_session_needs_no_garbage_collection() -> None:
    async def scenario() -> None:
        async with FakeWorker(n_listen=1, n_speak=2) as worker, running_gateway(worker) as gateway:
            for is_dropped in (False, True):
                async with without_garbage(LiveSession, RealtimeSession), realtime(gateway.port) as client:
                    await spoken_turn(client)
                    if is_dropped:
                        client.socket.transport.abort()

    run(scenario)


def test_the_client_may_cancel_and_ask_again() -> None:
    async def scenario() -> None:
        async with session(n_listen=1000, n_speak=3) as client:
            refused = await client.answer("response.cancel", event_id="e1")
            assert refused["error"]["code"] == "response_cancel_not_active"
            assert refused["error"]["message"].startswith("Cancellation failed")
            assert refused["error"]["event_id"] == "e1"
            asked = {"metadata": {"client_event_id": "m1"}, "output_modalities": ["audio"]}
            created = await client.answer("response.create", response=asked)
            assert created["type"] == "response.created", created
            assert created["response"]["metadata"] == {"client_event_id": "m1"}
            again = await asked_again(client)
            assert again["error"]["code"] == "conversation_already_has_active_response"
            await client.until("response.output_audio.delta")
            await client.send("response.cancel", response_id=created["response"]["id"])
            done = (await client.until("response.done"))["response"]
            assert done["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
            assert done["output"][0]["status"] == "incomplete"
            assert done["metadata"] == {"client_event_id": "m1"}
            await client.send("response.create")
            second = (await client.until("response.created"))["response"]["id"]
            finished = (await client.until("response.done"))["response"]
            assert finished["id"] == second and finished["status"] == "completed"
            assert not [
                event
                for event in client.log[client.log.index(done_event(client, done["id"])) + 1 :]
                if event.get("response_id") == done["id"]
            ], "expected nothing of a response after its end"

    run(scenario)


async def asked_again(client: RealtimeClient) -> Json:
    """The error to a second `response.create`."""
    await client.send("response.create")
    return await client.until("error")


def done_event(client: RealtimeClient, response_id: str) -> Json:
    return next(
        event for event in client.log if event["type"] == "response.done" and event["response"]["id"] == response_id
    )


def test_silence_completes_an_answer_that_is_owed() -> None:
    """A program that asks and sends no sound gets its whole answer, at the pace of the clock."""

    async def scenario() -> None:
        async with session(n_listen=1000, n_speak=2) as client:
            begun = time.monotonic()
            await client.send("response.create")
            done = (await client.until("response.done"))["response"]
            assert done["status"] == "completed" and time.monotonic() - begun > 0.5
            assert done["output"][0]["content"][0]["transcript"] == "second 1. second 2. "

    run(scenario)


def test_speech_interrupts_a_response() -> None:
    async def scenario() -> None:
        async with session(n_listen=0, n_speak=1000) as client:
            await client.append(silence(1.0))
            await client.until("response.output_audio.delta")
            await client.append(speech())
            done = (await client.until("response.done"))["response"]
            assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
            kinds = client.kinds()
            assert kinds.index("input_audio_buffer.speech_started") < kinds.index("response.done")
            await client.append(silence(1.5))
            await client.until("conversation.item.done")
            while client.log[-1]["item"]["role"] != "user":
                await client.until("conversation.item.done")
            turn = [event for event in client.log if is_of_turn(event)]
            assert [event["type"] for event in turn] == [
                "input_audio_buffer.speech_started",
                "input_audio_buffer.speech_stopped",
                "input_audio_buffer.committed",
            ]
            assert len({event["item_id"] for event in turn}) == 1
            assert 650 <= turn[0]["audio_start_ms"] < turn[1]["audio_end_ms"] < 8000
            assert client.log[-1]["item"]["content"] == [{"type": "input_audio", "transcript": None}]

    run(scenario)


def test_speech_after_a_change_of_lanes_is_another_turn() -> None:
    """The turn that was open before the change never ends in the detector's sound."""

    async def scenario() -> None:
        async with session(n_listen=1000) as client:
            ids = []
            for detection in (None, {"type": "server_vad"}):
                await client.append(silence(0.5) + speech()[:72_000])
                ids.append((await client.until("input_audio_buffer.speech_started"))["item_id"])
                await client.update(audio={"input": {"turn_detection": detection}})
                await client.update(audio={"input": {"turn_detection": {"type": "semantic_vad"}}})
            assert len(set(ids)) == 2

    run(scenario)


def test_a_file_that_is_committed_at_once_is_one_turn() -> None:
    """The detector hears it after the commit."""

    async def scenario() -> None:
        async with session(n_listen=1000) as client:
            await client.append(speech() + silence(1.5))
            await client.send("input_audio_buffer.commit")
            await client.append(silence(1.0) + speech() + silence(1.5))
            await client.until("input_audio_buffer.speech_stopped")
            while len([event for event in client.log if is_of_turn(event)]) < 4:
                await client.receive()
            kinds = [event["type"].rpartition(".")[2] for event in client.log if is_of_turn(event)]
            assert kinds == ["committed", "speech_started", "speech_stopped", "committed"]

    run(scenario)


def is_of_turn(event: Json) -> bool:
    return event["type"].startswith("input_audio_buffer.")


def test_items_are_acknowledged_in_order_with_their_predecessors() -> None:
    async def scenario() -> None:
        async with session(n_listen=1000) as client:
            for item_id in ("a", "b"):
                await client.send("conversation.item.create", item=text_item(item_id))
            await client.send("conversation.item.create", item=text_item("c"), previous_item_id="root")
            await client.send("conversation.item.create", item=text_item("a"))
            await client.send("conversation.item.create", item=picture_item("p"))
            await client.send("conversation.item.create", item=picture_item("x", "http://127.0.0.1/secret"))
            await client.send("conversation.item.retrieve", item_id="b")
            await client.send("conversation.item.delete", item_id="b")
            await client.send("conversation.item.retrieve", item_id="b")
            await client.until("conversation.item.deleted", with_errors=True)
            await client.until("error")
            added = [event for event in client.log if event["type"] == "conversation.item.added"]
            places = [(event["previous_item_id"], event["item"]["id"]) for event in added]
            assert places == [(None, "a"), ("a", "b"), (None, "c"), ("b", "p")]
            codes = [event["error"]["code"] for event in client.log if event["type"] == "error"]
            assert codes == ["item_create_duplicate_item_id", "invalid_value", "item_retrieve_invalid_item_id"]
            [found] = [event["item"] for event in client.log if event["type"] == "conversation.item.retrieved"]
            assert found["content"] == [{"type": "input_text", "text": "Hello b"}]

    run(scenario)


def text_item(item_id: str) -> Json:
    content = [{"type": "input_text", "text": f"Hello {item_id}"}]
    return {"id": item_id, "type": "message", "role": "user", "content": content}


def picture_item(item_id: str, url: str | None = None) -> Json:
    data = io.BytesIO()
    Image.new("RGB", (32, 24), "red").save(data, "JPEG")
    url = url or f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"id": item_id, "type": "message", "role": "user", "content": [{"type": "input_image", "image_url": url}]}


def test_a_truncated_item_keeps_the_words_heard() -> None:
    async def scenario() -> None:
        async with session(n_listen=0, n_speak=2) as client:
            await spoken_turn(client)
            item = next(event["item"]["id"] for event in client.log if event["type"] == "response.output_item.done")
            cut = await client.answer("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=1000)
            while cut["type"] != "conversation.item.truncated":
                assert cut["type"] != "error", cut
                cut = await client.receive()
            assert (cut["item_id"], cut["audio_end_ms"]) == (item, 1000)
            await client.send("conversation.item.retrieve", item_id=item)
            kept = await client.until("conversation.item.retrieved")
            assert kept["item"]["content"][0]["transcript"].strip() == "second 1."
            await client.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=9000)
            assert (await client.until("error"))["error"]["code"] == "invalid_value"

    run(scenario)


def test_a_lost_worker_fails_the_response_and_the_session_goes_on() -> None:
    async def scenario() -> None:
        async with FakeWorker(n_listen=1000, n_speak=50) as first, FakeWorker(n_listen=1000, n_speak=1) as second:
            second.state = "LOADING"
            async with running_gateway(first, second) as gateway, realtime(gateway.port) as client:
                await client.send("conversation.item.create", item=text_item("a"))
                await client.send("response.create")
                await client.until("response.output_audio.delta")
                second.state = "IDLE"
                await wait_until(lambda: gateway.gateway.dispatcher.workers.n_ready == 2, "the second worker")
                first.crash()
                done = (await client.until("response.done"))["response"]
                assert done["status"] == "failed" and done["status_details"]["error"]["code"] == "worker_lost"
                await client.send("response.create")
                done = (await client.until("response.done"))["response"]
                assert done["status"] == "completed" and second.total_requests > 0

    run(scenario)


def test_handshakes_follow_the_rules_of_browsers_and_programs() -> None:
    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            offered = ["realtime", "openai-insecure-api-key.sk-secret", "openai-beta.realtime-v1"]
            async with realtime(gateway.port, subprotocols=offered) as client:
                assert client.socket.subprotocol == "realtime"
                body = await refused(gateway.port, "?model=gpt-realtime", 503)
                assert body["error"]["code"] == "overloaded"
            await gateway.wait_idle()
            body = await refused(gateway.port, "?model=llama", 404)
            assert body["error"]["code"] == "model_not_found"
            assert (await refused(gateway.port, "?intent=transcription", 400))["error"]["param"] == "intent"
            async with realtime(gateway.port, "", additional_headers={"OpenAI-Beta": "realtime=v1"}) as client:
                assert client.socket.subprotocol is None
                session = client.log[0]["session"]
                assert session["object"] == "realtime.session" and session["expires_at"] > time.time() + 3000
                assert session["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24000}

    run(scenario)


async def refused(port: int, query: str, status: int) -> Json:
    """The body of a refused handshake."""
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with realtime(port, query):
            pass
    assert caught.value.response.status_code == status
    return json.loads(caught.value.response.body)


def test_nothing_a_client_sends_ends_the_session() -> None:
    async def scenario() -> None:
        async with session(n_listen=1000) as client:
            for data in ("{", "[]", b"\x00", '{"type": "no.such"}', '{"type": "session.update", "session": 5}'):
                await client.socket.send(data)
                assert (await client.receive())["type"] == "error"
            empty = await client.answer("input_audio_buffer.commit")
            assert empty["error"]["code"] == "input_audio_buffer_commit_empty"
            assert (await client.answer("input_audio_buffer.clear"))["type"] == "input_audio_buffer.cleared"
            updated = await client.update(instructions="Be brief.")
            assert updated["instructions"] == "Be brief."

    run(scenario)


def test_a_quiet_user_is_spoken_to_after_the_idle_timeout() -> None:
    async def scenario() -> None:
        async with session(n_listen=1000, n_speak=1) as client:
            await client.update(audio={"input": {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 1000}}})
            await client.send("response.create")
            await client.until("response.done")
            triggered = await client.until("input_audio_buffer.timeout_triggered")
            assert (await client.until("conversation.item.added"))["item"]["id"] == triggered["item_id"]
            assert (await client.until("response.done"))["response"]["status"] == "completed"

    run(scenario)
