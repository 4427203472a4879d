"""vLLM-Omni sessions over real sockets, with a worker that follows a cycle of listening and speaking."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import websockets

from benchmarks.serve.fake_worker import FakeWorker
from tests.server.doors.dialects.vllm_omni.omni_client import SOUND, TRANSCRIPT, OmniClient
from tests.server.live.pictures import paced_pixels, png_text
from tests.server.live_gateway import run, running_gateway


@asynccontextmanager
async def omni(path: str = "/v1/realtime?duplex=1&autostart=0", **cycle: int) -> AsyncIterator[OmniClient]:
    """A client of a gateway with one worker, which must be idle afterwards. cycle: of the worker's units."""
    async with FakeWorker(**cycle) as worker, running_gateway(worker) as gateway:
        async with websockets.connect(f"ws://127.0.0.1:{gateway.port}{path}", compression=None, proxy=None) as socket:
            yield OmniClient(socket)
        await gateway.wait_idle()


def test_nothing_is_sent_before_the_clients_settings() -> None:
    async def scenario() -> None:
        async with omni() as client:
            with pytest.raises(TimeoutError):
                await client.until("session.created", 0.3)
            session = await client.begin(instructions="Be brief.", output_audio_format="pcm16")
            assert client.kinds() == ["session.created", "session.updated"]
            capabilities = session["capabilities"]
            assert capabilities["implementation_level"] == "model_native_duplex"
            assert capabilities["chunk_period_ms"] == 1000 and capabilities["supports_session_resume"]
            assert session["instructions"] == "Be brief." and client.log[0]["resume_token"]
            await client.send("session.heartbeat")
            await client.until("session.heartbeat_ack")
            await client.send("session.close")
            assert (await client.until("session.closed"))["reason"] == "client_close"

    run(scenario)


def test_units_are_answered_by_listen_or_by_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = paced_pixels(monkeypatch, "server.doors.dialects.vllm_omni.session")

    async def scenario() -> None:
        async with omni(n_listen=1, n_speak=2) as client:
            await client.begin()
            await client.append(video_frames=[png_text(6, 7)])
            assert "response_id" not in await client.until("response.listen")
            assert paced == [42]
            del client.log[:-1]
            await client.append()
            await client.append()
            done = await client.until("response.done")
            kinds = client.kinds()[1:]
            begin = ["response.created", "response.output_item.added", "conversation.item.added"]
            assert kinds[:5] == [*begin, "response.content_part.added", "response.speak"]
            assert done["response"]["status"] == "completed"
            deltas = [event for event in client.log if event["type"] in (SOUND, TRANSCRIPT)]
            assert [event["type"] for event in deltas] == [TRANSCRIPT, SOUND] * (len(deltas) // 2)
            assert {event["response_id"] for event in deltas} == {done["response_id"]}
            sound = b"".join(base64.b64decode(event["delta"]) for event in deltas if event["type"] == SOUND)
            assert len(sound) == 2 * 48_000 and np.frombuffer(sound, "<i2").any()
            last = deltas[-1]
            assert (last["format"], last["sample_rate_hz"]) == ("pcm16", 24_000)
            assert last["metadata"]["audio_duration_ms"] == 2000 and last["metadata"]["epoch"] == 0
            text = "".join(event["delta"] for event in deltas if event["type"] == TRANSCRIPT)
            assert done["response"]["output"][0]["content"][0]["transcript"] == text
            await client.send("playback.ack", played_ms=1500)
            playback = (await client.until("playback.acknowledged"))["playback"]
            assert (playback["sent_ms"], playback["played_ms"]) == (2000, 1500)

    run(scenario)


def test_a_commit_ends_a_unit_and_a_response_goes_on_without_further_sound() -> None:
    async def scenario() -> None:
        async with omni(n_listen=1, n_speak=3) as client:
            await client.begin()
            await client.append(audio=base64.b64encode(bytes(16_000)).decode())
            await client.send("input_audio_buffer.commit", final=True)
            await client.until("input_audio_buffer.committed")
            await client.until("response.listen")
            await client.send("response.create", response={})
            await client.until("response.speak", 0.9)
            await client.send("barge_in")
            done = (await client.until("response.done"))["response"]
            assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "barge_in")
            await client.until("response.listen")
            assert "error" not in client.kinds()

    run(scenario)


def test_formats_texts_and_errors() -> None:
    async def scenario() -> None:
        async with omni("/v1/duplex?autostart=0", n_listen=0, n_speak=1) as client:
            await client.append()
            assert (await client.until("error"))["error"]["code"] == "session_not_created"
            await client.send("session.update", event_id="bad", session={"input_audio_format": "opus"})
            error = (await client.until("error"))["error"]
            assert (error["event_id"], error["param"]) == ("bad", "session.input_audio_format")
            output = {"format": {"type": "audio/pcmu", "rate": 8000}}
            await client.begin(audio={"output": output}, input_audio_format="pcm_f32le")
            message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]}
            await client.send("conversation.item.create", item=message)
            assert (await client.until("conversation.item.done"))["item"]["content"] == message["content"]
            await client.append(
                audio=base64.b64encode(bytes(4 * 24_100)).decode(), format="pcm_f32le", sample_rate_hz=24_000
            )
            sound = await client.until(SOUND)
            assert (sound["format"], sound["sample_rate_hz"]) == ("g711_ulaw", 8000)
            for fields, code in (
                ({"sample_rate_hz": 11_025}, "invalid_value"),
                ({"audio": "AAAA"}, "bad_audio"),
                ({"video_frames": ["?"]}, "invalid_video_frames"),
            ):
                await client.append(**fields)
                assert (await client.until("error"))["error"]["code"] == code
            await client.send("session.resume", session_id="me", resume_token="old")
            assert (await client.until("error"))["error"]["code"] == "unsupported_session_resume"
            await client.socket.send("{")
            assert (await client.until("error"))["error"]["code"] == "invalid_json"

    run(scenario)


def test_a_session_without_settings_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.dialects.vllm_omni.socket.START_S", 0.1)
    monkeypatch.setattr("server.doors.dialects.vllm_omni.socket.POLL_S", 0.05)

    async def scenario() -> None:
        async with omni() as client:
            await client.socket.send('{"type": "session.heartbeat?"}')
            await client.until("session.expired")
            await client.socket.wait_closed()
            assert client.socket.close_code == 1000

    run(scenario)


def test_without_autostart_zero_the_session_begins_at_once() -> None:
    async def scenario() -> None:
        async with omni("/v1/realtime?duplex=true") as client:
            await client.until("session.updated")
            await client.send("session.update", session={"instructions": "Be brief."})
            assert (await client.until("session.updated"))["session"]["instructions"] == "Be brief."
            await client.send("session.update", session={"ref_audio": "AAAA"})
            assert (await client.until("error"))["error"]["param"] == "voice"

    run(scenario)
