"""Transcripts of what the user says, in both lanes: events, what the worker gets, failures, and the ends."""

import base64
from typing import Any

import numpy as np
import pytest

from server.doors.core import spare_turn
from tests.server.doors.realtime.realtime_client import Json, RealtimeClient, realtime, silence, speech
from tests.server.doors.stub_worker import DONE, PREFILLED, TEXT, Step, StubWorker, chunk, forever, stub_gateway
from tests.server.live_gateway import run, wait_until

KIND = "conversation.item.input_audio_transcription"
WRITTEN: list[Step] = [PREFILLED, chunk("Hello"), chunk(" there."), DONE]
UNITS: list[Step] = [forever]  # of a worker that answers no unit
WHISPER = {"model": "whisper-1", "language": "en", "prompt": "Duologue"}


async def transcribing(client: RealtimeClient, **audio_input: Any) -> Json | None:
    """Ask for transcripts. Returns: `transcription` of the session."""
    shown = await client.update(audio={"input": {"transcription": WHISPER, **audio_input}})
    found: Json | None = shown["audio"]["input"]["transcription"]
    return found


def sound_of(worker: StubWorker) -> np.ndarray:
    """The sound in the only chat request, [n] float32 at 16 kHz."""
    [request] = [given for path, given in worker.requests if path == "/ws/chat"]
    return np.frombuffer(base64.b64decode(request["messages"][0]["content"][1]["data"]), "<f4")


def test_a_turn_of_the_user_is_transcribed_after_its_end() -> None:
    async def scenario() -> None:
        async with stub_gateway(UNITS, WRITTEN) as (gateway, worker), realtime(gateway.port) as client:
            assert await transcribing(client, turn_detection={"type": "server_vad"}) == WHISPER
            await client.append(silence(12.0) + speech() + silence(1.0))  # more than is kept before speech
            completed = await client.until(f"{KIND}.completed")
            item_id = completed["item_id"]
            assert completed["transcript"] == TEXT and completed["content_index"] == 0
            of_item = [
                event for event in client.log if item_id in (event.get("item_id"), (event.get("item") or {}).get("id"))
            ]
            assert [event["type"] for event in of_item] == [
                "input_audio_buffer.speech_started",
                "input_audio_buffer.speech_stopped",
                "input_audio_buffer.committed",
                "conversation.item.added",
                "conversation.item.done",
                f"{KIND}.delta",
                f"{KIND}.delta",
                f"{KIND}.completed",
            ]
            assert "".join(event["delta"] for event in of_item if event["type"] == f"{KIND}.delta") == TEXT
            span_ms = of_item[1]["audio_end_ms"] - of_item[0]["audio_start_ms"]
            assert completed["usage"] == {"type": "duration", "seconds": span_ms / 1000}
            sound = sound_of(worker)
            assert len(sound) == 16 * span_ms and np.abs(sound[8000:]).max() > 0.05, "expected the user's speech"
            await client.send("conversation.item.retrieve", item_id=item_id)
            item = (await client.until("conversation.item.retrieved"))["item"]
            assert item["content"] == [{"type": "input_audio", "transcript": TEXT}]
            types = pytest.importorskip("openai.types.realtime")
            for event in of_item[-3:]:
                kind = event["type"].removeprefix(KIND + ".").capitalize()
                getattr(types, f"ConversationItemInputAudioTranscription{kind}Event").model_validate(event)

    run(scenario)


def test_a_committed_item_is_transcribed_and_answered_from_its_sound() -> None:
    async def scenario() -> None:
        async with stub_gateway(WRITTEN) as (gateway, worker), realtime(gateway.port) as client:
            await transcribing(client, turn_detection=None)
            await client.append(speech())
            await client.send("input_audio_buffer.commit")
            assert (await client.until(f"{KIND}.completed"))["transcript"] == TEXT
            assert len(sound_of(worker)) == pytest.approx(len(speech()) / 3, abs=200)
            await client.send("response.create", response={"output_modalities": ["text"]})
            assert (await client.until("response.done"))["response"]["status"] == "completed"
            assert worker.requests[0][1]["priority"] == "low" and "priority" not in worker.requests[1][1]
            [_, question] = worker.requests[1][1]["messages"]
            assert [part["type"] for part in question["content"]] == ["audio"], "expected no words beside the sound"

    run(scenario)


def test_without_a_slot_the_transcription_fails_and_the_conversation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_turn, "MAX_WAIT_S", 0.1)

    async def scenario() -> None:
        async with stub_gateway(UNITS, slots=1) as (gateway, worker), realtime(gateway.port) as client:
            await transcribing(client)
            await client.append(speech())
            await client.send("input_audio_buffer.commit")
            failed = await client.until(f"{KIND}.failed")
            committed = next(event for event in client.log if event["type"] == "input_audio_buffer.committed")
            assert failed["item_id"] == committed["item_id"] and failed["content_index"] == 0
            assert failed["error"]["code"] == "no_free_slot" and failed["error"]["type"] == "server_error"
            assert "free" in failed["error"]["message"]
            await client.update(instructions="Go on.")
            assert [path for path, _ in worker.requests] == ["/ws/duplex"]

    run(scenario)


def test_it_ends_with_its_item_and_with_the_session() -> None:
    async def scenario() -> None:
        async with stub_gateway([PREFILLED, chunk("Hello"), forever]) as (gateway, worker):
            async with realtime(gateway.port) as client:
                await transcribing(client, turn_detection=None)
                for _ in range(2):
                    await client.append(speech())
                    await client.send("input_audio_buffer.commit")
                    item_id = (await client.until(f"{KIND}.delta"))["item_id"]
                    assert worker.n_open == 1
                    if len(worker.requests) == 1:
                        await client.send("conversation.item.delete", item_id=item_id)
                        await client.until("conversation.item.deleted")
                        await wait_until(lambda: not worker.n_open, "the end of the transcription")
                assert not [event for event in client.log if event["type"] in (f"{KIND}.failed", f"{KIND}.completed")]
            await gateway.wait_idle()

    run(scenario)


def test_a_server_without_transcriptions_shows_none_and_makes_none() -> None:
    async def scenario() -> None:
        async with stub_gateway(WRITTEN) as (gateway, worker):
            gateway.gateway.transcriber.is_enabled = False
            wanted = {"session": {"type": "realtime", "audio": {"input": {"transcription": WHISPER}}}}
            made = (await gateway.http.post("/v1/realtime/client_secrets", json=wanted)).json()
            assert made["session"]["audio"]["input"]["transcription"] is None
            async with realtime(gateway.port) as client:
                assert await transcribing(client, turn_detection=None) is None
                await client.append(speech())
                await client.send("input_audio_buffer.commit")
                await client.until("conversation.item.done")
                await client.update(instructions="Go on.")
                assert not worker.requests and not [kind for kind in client.kinds() if kind.startswith(KIND)]

    run(scenario)
