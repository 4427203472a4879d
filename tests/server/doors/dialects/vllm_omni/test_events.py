"""Events of vLLM-Omni clients over real sockets: items, signals, settings, ends."""

import asyncio
import base64

import websockets

from benchmarks.serve.fake_worker import FakeWorker
from tests.server.doors.dialects.minicpm_o.mode_client import wav_text
from tests.server.doors.dialects.vllm_omni.omni_client import SOUND, OmniClient
from tests.server.doors.dialects.vllm_omni.test_socket import omni
from tests.server.doors.realtime.realtime_client import speech
from tests.server.live_gateway import run, running_gateway

INVALID = "invalid_value"
PATH = "/v1/realtime?duplex=1&autostart=0"


def test_items_are_kept_and_signals_are_events() -> None:
    async def scenario() -> None:
        async with omni(n_listen=1000, n_speak=1) as client:
            await client.begin(turn_detection={"type": "server_vad"}, idle_timeout_s=30)
            session = client.log[0]["session"]
            assert session["turn_detection"]["silence_duration_ms"] == 500 and session["idle_timeout_s"] == 30
            assert session["overlap_policy"] == "barge_in_on_speech"
            await client.send("input.text.append", text="Hello.")
            item = (await client.until("conversation.item.done"))["item"]
            await client.send("conversation.item.retrieve", item_id=item["id"])
            assert (await client.until("conversation.item.retrieved"))["item"] == item
            payload = {"item_id": item["id"]}
            await client.send("turn.signal", event="conversation.item.delete", payload=payload)
            assert (await client.until("conversation.item.deleted"))["item_id"] == item["id"]
            await client.send("turn.signal", event="user_started")
            assert (await client.until("turn.event"))["turn_state"] == "user_speaking"
            await client.send("input.cancel")
            await client.until("input_audio_buffer.cleared")
            for event, code in (
                ({"kind": "conversation.item.delete", "item_id": item["id"]}, "item_not_found"),
                ({"kind": "conversation.item.retrieve"}, "missing_item_id"),
                ({"kind": "input_audio_buffer.commit"}, "input_audio_buffer_empty"),
                ({"kind": "response.cancel", "response_id": "resp_none"}, "response_not_active"),
                ({"kind": "session.event_ack", "server_event_seq": 10_000}, "invalid_event_ack"),
                ({"kind": "session.update", "session": {"model": "another"}}, "model_not_found"),
                (
                    {"kind": "session.update", "session": {"audio": {"output": {"sample_rate_hz": 9000}}}},
                    "invalid_value",
                ),
            ):
                await client.send(**event)
                assert (await client.until("error"))["error"]["code"] == code, event
            await client.append()
            await client.send("input_audio_buffer.commit", is_speech=False)
            committed = await client.until("input_audio_buffer.committed")
            assert committed["event"]["epoch"] == 1
            listened = await client.until("response.listen")
            assert listened["response"]["status"] == "listening" and listened["epoch"] == 1

    run(scenario)


def test_the_client_chooses_the_rate_and_asks_for_each_response() -> None:
    async def scenario() -> None:
        async with omni(n_listen=0, n_speak=1) as client:
            audio = {"output": {"sample_rate_hz": 16_000}}
            await client.begin(audio=audio, output_audio_format="pcm_f32le", extra_body={"auto_response": False})
            await client.append()
            await client.until("response.listen")
            await client.send("response.create")
            sound = await client.until(SOUND)
            assert (sound["format"], sound["sample_rate_hz"]) == ("pcm_f32le", 16_000)
            n_samples = len(sound["delta"]) * 3 // 4 // 4
            assert abs(n_samples - 8000) < 100, f"expected half a second, got {n_samples} samples"
            assert (await client.until("response.done"))["response"]["status"] == "completed"

    run(scenario)


def test_the_voice_may_be_repeated_but_not_changed() -> None:
    async def scenario() -> None:
        async with omni("/v1/realtime?duplex=1&resume=true") as client:
            await client.begin(ref_audio=wav_text(1.0))
            await client.send("session.update", session={"ref_audio": wav_text(1.0)})
            await client.until("session.updated")
            await client.send("session.update", session={"ref_audio": wav_text(2.0)})
            assert (await client.until("error"))["error"]["param"] == "voice"

    run(scenario)


def test_without_a_slot_the_client_gets_an_error() -> None:
    async def scenario() -> None:
        async with running_gateway() as gateway:
            url = f"ws://127.0.0.1:{gateway.port}{PATH}"
            async with websockets.connect(url, compression=None, proxy=None) as socket:
                client = OmniClient(socket)
                await client.send("session.update", session={})
                error = (await client.until("error"))["error"]
                assert (error["code"], error["type"]) == ("resource_exhausted", "rate_limit_error")
                await client.until("session.closed")
                await socket.wait_closed()
                assert socket.close_code == 1013

    run(scenario)


def test_a_shutdown_waits_for_the_open_response() -> None:
    async def scenario() -> None:
        async with FakeWorker(n_listen=0, n_speak=2) as worker, running_gateway(worker) as gateway:
            url = f"ws://127.0.0.1:{gateway.port}{PATH}"
            async with websockets.connect(url, compression=None, proxy=None) as socket:
                client = OmniClient(socket)
                await client.begin()
                await client.append()
                await client.until(SOUND)
                gateway.gateway.live.drain()
                await asyncio.sleep(0)
                assert (await client.until("response.done"))["response"]["status"] == "completed"
                assert (await client.until("session.closed"))["reason"] == "server_shutdown"
                await socket.wait_closed()
                assert socket.close_code == 1001
            await gateway.wait_idle()

    run(scenario)


def test_the_detector_ends_turns_and_responses() -> None:
    """With real speech: it commits the turn, and a second one ends the response."""

    async def scenario() -> None:
        async with omni(n_listen=1000, n_speak=9) as client:
            await client.begin(turn_detection={"type": "server_vad"})
            question = {"audio": base64.b64encode(speech()).decode(), "sample_rate_hz": 24_000}
            await client.append(**question)
            await client.append(audio=base64.b64encode(bytes(2 * 16_000)).decode())
            started = await client.until("input_audio_buffer.speech_started")
            stopped = await client.until("input_audio_buffer.speech_stopped")
            committed = await client.until("input_audio_buffer.committed")
            assert started["item_id"] == stopped["item_id"] == committed["item_id"]
            assert 0 <= started["audio_start_ms"] < stopped["audio_end_ms"]
            await client.until(SOUND)
            await client.append(**question)
            decision = await client.until("overlap.decision")
            assert (decision["action"], decision["reason"]) == ("barge_in", "server_vad_speech_started")
            done = (await client.until("response.done"))["response"]
            assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")

    run(scenario)
