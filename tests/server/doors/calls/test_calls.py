"""Calls over WebRTC on the loopback address, with a worker that follows a cycle of listening and speaking."""

import asyncio
import io
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import websockets
from openai import AsyncOpenAI
from PIL import Image

from benchmarks.doors.call_load import CALLS
from server.doors.calls.call import WebRtcCall
from server.doors.live.sound.resample import pcm16_of
from server.doors.realtime.session import RealtimeSession
from server.live.live_sessions import LiveSession
from server.peers.frames import FrameKind, LinkFrame
from tests.server.access.keyed_gateway import bearer
from tests.server.doors.calls.call_client import CallClient, calling
from tests.server.doors.calls.served_calls import KEY, LOOPBACK, ORIGIN, OTHER_KEY, Served, follow, serve_calls
from tests.server.doors.realtime.realtime_client import speech
from tests.server.garbage import without_garbage
from tests.server.live_gateway import ANSWER_S, wait_until

Json = dict[str, Any]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    yield from serve_calls(max_calls=2)


def tone(hz: float, seconds: float) -> bytes:
    """PCM16 at 24 kHz."""
    return pcm16_of((0.3 * np.sin(2 * np.pi * hz * np.arange(round(24_000 * seconds)) / 24_000)).astype(np.float32))


def loudest(samples: np.ndarray, rate: int) -> float:
    """Frequency with the most energy, in Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax() * rate / len(samples))


def sounding(heard: np.ndarray) -> np.ndarray:
    """The 20 ms pieces of a track at 48 kHz that are louder than noise, joined."""
    pieces = heard[: len(heard) // 960 * 960].reshape(-1, 960)
    return pieces[np.abs(pieces).max(axis=1) > 1000].reshape(-1)


def is_silent(heard: np.ndarray) -> bool:
    return len(heard) > 0 and int(np.abs(heard).max()) <= 1000


def test_sound_goes_both_ways_and_the_channel_carries_events(served: Served) -> None:
    async def scenario() -> None:
        async with (
            without_garbage(LiveSession, RealtimeSession, WebRtcCall),
            calling(served.http, {"type": "realtime", "instructions": "Be brief."}, **KEY) as client,
        ):
            assert client.log[0]["type"] == "session.created"
            assert client.log[0]["session"]["instructions"] == "Be brief."
            client.microphone.say(tone(1000, 2.5))
            await client.until("output_audio_buffer.stopped")
            kinds = client.kinds()
            assert "response.output_audio.delta" not in kinds and "error" not in kinds
            places = [kinds.index(kind) for kind in ORDER]
            assert places == sorted(places), kinds
            [response_id] = {event["response_id"] for event in client.log if "output_audio_buffer." in event["type"]}
            done = next(event["response"] for event in client.log if event["type"] == "response.done")
            assert done["id"] == response_id and done["status"] == "completed"
            heard = sounding(client.heard)
            heard_s = len(heard) / 48_000
            assert 1.9 < heard_s < 2.1, f"expected the 2 s that were spoken, got {heard_s:.2f} s"
            assert abs(loudest(heard, 48_000) - 440) < 5
            rms = float(np.sqrt(np.mean((heard / 32768) ** 2)))
            assert 0.12 < rms < 0.16, f"expected a tone of amplitude 0.2, got {rms=:.3f}"
            assert abs(loudest(served.chunks[0].samples()[4000:], 16_000) - 1000) < 5

    served.run(scenario, n_listen=1, n_speak=2)


ORDER = [
    "session.created",
    "response.created",
    "response.output_audio_transcript.delta",
    "output_audio_buffer.started",
    "response.done",
    "output_audio_buffer.stopped",
]


def test_a_picture_of_the_video_reaches_the_unit(served: Served) -> None:
    async def scenario() -> None:
        async with calling(served.http, with_video=True, **KEY):
            await wait_until(lambda: any(chunk.frame_base64_list for chunk in served.chunks), "a picture in a unit")
            picture, *_ = next(chunk.frame_base64_list for chunk in served.chunks if chunk.frame_base64_list)
            image = Image.open(io.BytesIO(bytes(picture)))
            red, green, blue = np.asarray(image).reshape(-1, 3).mean(axis=0)
            assert image.format == "JPEG" and image.size == (640, 480)
            assert green > 100 and red < 50 and blue < 50, f"expected green, got {red=:.0f} {green=:.0f} {blue=:.0f}"

    served.run(scenario)


def test_speech_ends_the_playback_and_truncates_the_item(served: Served) -> None:
    async def scenario() -> None:
        async with calling(served.http, **KEY) as client:
            await client.until("output_audio_buffer.started")
            client.microphone.say(speech())
            truncated = await client.until("conversation.item.truncated")
            cleared, done = await client.until("output_audio_buffer.cleared"), await client.until("response.done")
            response = done["response"]
            assert response["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
            assert cleared["response_id"] == response["id"]
            assert truncated["item_id"] == response["output"][0]["id"]
            # What was sent on the track is what the item keeps, to the packet.
            await wait_until(lambda: is_silent(client.heard[-9_600:]), "the packets under way")
            heard_ms = len(sounding(client.heard)) / 48
            assert abs(truncated["audio_end_ms"] - heard_ms) < 60, f"expected {heard_ms:.0f}, got {truncated}"
            await client.send("conversation.item.retrieve", item_id=truncated["item_id"])
            item = (await client.until("conversation.item.retrieved"))["item"]
            said = response["output"][0]["content"][0]["transcript"]
            kept = item["content"][0]["transcript"]
            assert said.startswith(kept) and len(kept) < len(said), f"expected a part of {said!r}, got {kept!r}"

    served.run(scenario, n_listen=0, n_speak=1000)


def test_the_client_may_clear_the_playback(served: Served) -> None:
    async def scenario() -> None:
        async with calling(served.http, {"audio": {"input": {"turn_detection": None}}}, **KEY) as client:
            await client.send("output_audio_buffer.clear")
            assert (await client.until("output_audio_buffer.cleared"))["response_id"] == ""
            await client.send("input_audio_buffer.append", audio="AAAA")
            assert "track" in (await client.until("error"))["error"]["message"]
            client.microphone.say(tone(500, 0.4))
            async with asyncio.timeout(ANSWER_S):
                while not any(event["type"] == "input_audio_buffer.committed" for event in client.log):
                    await client.send("input_audio_buffer.commit")  # refused while little sound has arrived
                    await asyncio.sleep(0.1)

    served.run(scenario)


def test_a_call_is_hung_up(served: Served) -> None:
    async def scenario() -> None:
        async with calling(served.http, **KEY) as client:
            path = f"{CALLS}/{client.call_id}/hangup"
            assert (await served.http.post(path)).status_code == 401
            assert (await served.http.post(path, headers=OTHER_KEY)).status_code == 404
            assert (await served.http.post(path, headers=KEY)).status_code == 200
            await wait_until(lambda: client.connection.connectionState == "closed", "the connection's end")
            await served.gateway.wait_idle()
            again = await served.http.post(path, headers=KEY)
            assert again.status_code == 404 and again.json()["error"]["param"] == "call_id"
            assert (await served.http.post(f"{CALLS}/{client.call_id}/refer", headers=KEY)).status_code == 404

    served.run(scenario)


async def next_of(socket: websockets.ClientConnection, kind: str) -> Json:
    async with asyncio.timeout(10):
        while (event := json.loads(await socket.recv()))["type"] != kind:
            pass
    return event


def test_sockets_follow_a_call(served: Served) -> None:
    async def scenario() -> None:
        async with calling(served.http, **KEY) as client:
            with pytest.raises(websockets.InvalidStatus) as refused:
                await follow(served, client, OTHER_KEY)
            assert refused.value.response.status_code == 404
            first, second = await follow(served, client, KEY), await follow(served, client, KEY)
            for socket in (first, second):
                assert (await next_of(socket, "session.created"))["session"]["id"] == client.log[0]["session"]["id"]
            await first.send(json.dumps({"type": "session.update", "session": {"instructions": "Be quiet."}}))
            updated = await client.until("session.updated")
            assert updated["session"]["instructions"] == "Be quiet."
            assert await next_of(first, "session.updated") == updated == await next_of(second, "session.updated")
            await first.close()
            await client.send("session.update", session={"instructions": "Be loud."})
            assert (await next_of(second, "session.updated"))["session"]["instructions"] == "Be loud."
            await served.http.post(f"{CALLS}/{client.call_id}/hangup", headers=KEY)
            await second.wait_closed()
            assert second.close_code == 1000

    served.run(scenario)


def test_the_stock_client_begins_a_call(served: Served) -> None:
    """The form that the SDK sends, with an ephemeral secret, and the body that a browser sends."""

    async def scenario() -> None:
        secret = await served.http.post("/v1/realtime/client_secrets", headers={**KEY, "Origin": ORIGIN})
        assert secret.headers["access-control-allow-origin"] == ORIGIN
        value = secret.json()["value"]
        base = f"http://{LOOPBACK}:{served.gateway.port}/v1"
        async with AsyncOpenAI(api_key=value, base_url=base) as stock:
            client = CallClient(with_video=False)
            session = {"type": "realtime", "model": "gpt-realtime"}
            answer = await stock.realtime.calls.create(sdp=await client.offer(), session=session)
            await client.accept(answer.text, answer.response.headers["location"])
            async with stock.realtime.connect(call_id=client.call_id) as followed:
                event = await followed.recv()
                assert event.type == "session.created" and event.session.id == client.log[0]["session"]["id"]
            await client.connection.close()
        client = CallClient(with_video=False)
        headers = {**bearer(value), "Content-Type": "application/sdp", "Origin": ORIGIN}
        offer = await client.offer()
        answer = await served.http.post(CALLS, params={"model": "gpt-realtime"}, content=offer, headers=headers)
        assert answer.status_code == 201 and answer.headers["access-control-allow-origin"] == ORIGIN
        assert "location" in answer.headers["access-control-expose-headers"]
        await client.accept(answer.text, answer.headers["location"])
        await client.connection.close()

    served.run(scenario)


def test_offers_are_refused_with_the_reason(served: Served) -> None:
    async def scenario() -> None:
        sdp = {**KEY, "Content-Type": "application/sdp"}
        video_only = "v=0\r\no=- 1 1 IN IP4 0.0.0.0\r\ns=-\r\nt=0 0\r\nm=video 9 UDP/TLS/RTP/SAVPF 96\r\n"
        for headers, content, status, word in (
            ({"Content-Type": "application/sdp"}, "v=0", 401, "key"),
            (sdp, "", 400, "sdp"),
            (sdp, "hello", 400, "sdp"),
            (sdp, "v=0\r\nm=audio x y z\r\n", 400, "sdp"),
            (sdp, video_only, 400, "one audio section"),
            (sdp, video_only.replace("video", "audio"), 400, "fingerprint"),
            (sdp, video_only + "a=ssrc:1 cname:x\r\n" * 2000, 400, "lines"),
            ({**KEY, "Content-Type": "text/plain"}, "v=0", 400, "content-type"),
        ):
            answer = await served.http.post(CALLS, content=content, headers=headers)
            error = answer.json()["error"]
            assert answer.status_code == status and word in error["message"], (content, answer.text)
        unknown = await served.http.post(CALLS, params={"model": "no"}, content=video_only, headers=sdp)
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
        for session, param in (
            ("[]", "session"),
            ('{"type": "transcription"}', "session.type"),
            ('{"audio": {"output": {"voice": "no_such_voice"}}}', "voice"),
        ):
            form = {"sdp": (None, video_only), "session": (None, session)}
            answer = await served.http.post(CALLS, files=form, headers=KEY)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text

    served.run(scenario)


def test_a_server_without_webrtc_says_what_is_missing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.calls.processes.NEEDED", "no_such_package")

    async def scenario() -> None:
        answer = await served.http.post(CALLS, content="v=0", headers={**KEY, "Content-Type": "application/sdp"})
        error = answer.json()["error"]
        assert answer.status_code == 501 and error["code"] == "not_implemented" and "extra `webrtc`" in error["message"]
        assert (await served.http.get("/v1/models", headers=KEY)).status_code == 200

    served.run(scenario)


def test_pages_of_allowed_origins_may_call(served: Served) -> None:
    async def scenario() -> None:
        names = "authorization,content-type,x-openai-agents-sdk,x-stainless-lang"
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
        allowed = await served.http.options(CALLS, headers={**asks, "Origin": ORIGIN})
        assert allowed.status_code == 204 and allowed.headers["access-control-allow-origin"] == ORIGIN
        assert allowed.headers["access-control-allow-headers"] == names
        other = await served.http.options(CALLS, headers={**asks, "Origin": "https://evil.example"})
        assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
        elsewhere = await served.http.options("/v1/models", headers={**asks, "Origin": ORIGIN})
        assert "access-control-allow-origin" not in elsewhere.headers

    served.run(scenario)


def test_a_dead_process_ends_its_calls_alone(served: Served) -> None:
    async def scenario() -> None:
        async with calling(served.http, **KEY) as client:
            socket = await follow(served, client, KEY)
            [process] = served.gateway.gateway.peers.all
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            await socket.wait_closed()
            assert socket.close_code == 1011
            await served.gateway.wait_idle()
        async with calling(served.http, **KEY) as client:
            assert client.kinds() == ["session.created"]
            metrics = (await served.http.get("/metrics", headers=KEY)).text
            assert "duologue_gateway_call_processes_lost_total 1.0" in metrics
            assert "duologue_gateway_open_calls 1.0" in metrics

    served.run(scenario)


def test_an_error_of_a_call_ends_it_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        [process] = served.gateway.gateway.peers.all
        async with calling(served.http, **KEY) as failing, calling(served.http, **KEY) as other:
            first, _ = process._calls.values()
            monkeypatch.setattr(first, "on_frame", fail)
            await wait_until(lambda: failing.connection.connectionState == "closed", "the end of the call")
            await other.send("session.update", session={"instructions": "Go on."})
            await other.until("session.updated")

    served.run(scenario)


def test_a_client_with_too_many_waiting_events_is_gone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.calls.call.MAX_WAITING_CHARS", 1000)

    async def scenario() -> None:
        [process] = served.gateway.gateway.peers.all
        async with calling(served.http, **KEY) as flooding:
            [call] = process._calls.values()
            assert isinstance(call, WebRtcCall)
            event = LinkFrame(FrameKind.EVENT, 1, b"x" * 600)
            call.on_frame(event)
            assert not call._gone.is_set(), "expected an event to be accepted"
            call.on_frame(event)
            call.on_frame(event)
            assert call._gone.is_set(), "expected at most 1000 characters before the next event"
            await wait_until(lambda: flooding.connection.connectionState == "closed", "the end of the call")

    served.run(scenario)


def test_a_full_process_refuses_further_calls(served: Served) -> None:
    async def scenario() -> None:
        async with calling(served.http, **KEY), calling(served.http, **KEY):
            client = CallClient(with_video=False)
            headers = {**KEY, "Content-Type": "application/sdp"}
            refused = await served.http.post(CALLS, content=await client.offer(), headers=headers)
            assert refused.status_code == 503 and "retry-after" in refused.headers
            await client.connection.close()

    served.run(scenario)
