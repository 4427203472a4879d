"""GPT-Live sessions over WebRTC on the loopback address."""

from typing import Any, cast

import aioice.ice
import httpx
import numpy as np
import pytest
from aiortc import RTCSessionDescription
from openai import AsyncOpenAI

from benchmarks.serve.fake_replies import FakeConversation
from benchmarks.serve.fake_worker import FakeWorker
from server.doors.calls.call import WebRtcCall
from server.doors.gpt_live.session import GptLiveSession
from server.live.live_sessions import LiveSession
from tests.server.doors.calls.call_client import CallClient, Json
from tests.server.doors.realtime.realtime_client import speech
from tests.server.garbage import without_garbage
from tests.server.live_gateway import RunningGateway, run, running_gateway, wait_until
from worker.config.webrtc import WebRtcConfig
from worker.protocol.messages import AudioChunk

LOOPBACK, PATH = "127.0.0.1", "/v1/live/sessions"
SESSION: Json = {"model": "gpt-live-1", "instructions": "Be brief.", "audio": {"output": {"voice": "marin"}}}


async def begin(gateway: RunningGateway, client: CallClient, **session: object) -> httpx.Response:
    transport = {"type": "webrtc", "sdp": await client.offer()}
    return await gateway.http.post(PATH, json={"session": {**SESSION, **session}, "transport": transport})


def test_a_call_is_a_live_session(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, units = list[AudioChunk](), FakeConversation._unit

    async def recorded(conversation: FakeConversation, chunk: AudioChunk, received: float) -> None:
        chunks.append(chunk)
        await units(conversation, chunk, received)

    monkeypatch.setattr(FakeConversation, "_unit", recorded)
    monkeypatch.setattr(aioice.ice, "get_host_addresses", lambda use_ipv4, use_ipv6: [LOOPBACK])

    async def scenario() -> None:
        webrtc = WebRtcConfig(addresses=(LOOPBACK,), max_calls=2)
        async with (
            FakeWorker(n_listen=1000, n_speak=3) as worker,
            running_gateway(worker, webrtc=webrtc) as gateway,
            without_garbage(LiveSession, GptLiveSession, WebRtcCall),
        ):
            client = CallClient(with_video=False)
            try:
                for fields, param in (
                    ({"temperature": 1}, "session.temperature"),
                    ({"model": "another"}, "session.model"),
                    ({"audio": {"format": {"type": "audio/pcmu"}}}, "session.audio.format"),
                ):
                    refused = await begin(gateway, client, **fields)
                    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
                sdk = AsyncOpenAI(base_url=f"http://{LOOPBACK}:{gateway.port}/v1", api_key="none")
                transport = {"type": "webrtc", "sdp": await client.offer()}
                answer = await sdk.live.create(session=cast(Any, SESSION), transport=cast(Any, transport))
                description = RTCSessionDescription(answer.transport.sdp, "answer")
                await client.connection.setRemoteDescription(description)
                session = (await client.until("session.started"))["session"]
                assert session["id"] == answer.session.id and "format" not in session["audio"]

                await client.send("session.input_audio.append", audio="AAAA")
                assert (await client.until("error"))["error"]["code"] == "unsupported_event"
                await client.send("session.commentary.append", content="Say hello.", delegation_id=None)
                await client.until("session.output_transcript.delta")
                await wait_until(lambda: np.abs(client.heard[-48_000:]).max(initial=0) > 1000, "a voice")
                assert "session.output_audio.delta" not in client.kinds()
                client.microphone.say(speech())
                await wait_until(
                    lambda: any(np.abs(chunk.samples()).max() > 0.05 for chunk in chunks), "the user's voice"
                )
                await sdk.live.sessions.hangup(session["id"])
                assert (await client.until("session.closed"))["reason"] == "close_requested"
                await gateway.wait_idle()
                assert (await gateway.http.post(f"{PATH}/{session['id']}/hangup")).status_code == 404
            finally:
                await client.connection.close()

    run(scenario)
