"""Sessions with `mode` over real sockets, with a worker that follows a cycle, or a script of turns."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import websockets

from benchmarks.serve.fake_worker import FakeWorker
from server.doors.live.door_context import SessionLimits
from server.live.live_sessions import LiveSession
from tests.server.doors.dialects.minicpm_o.mode_client import SECOND, connect, samples_of, wav_text
from tests.server.doors.stub_worker import PREFILLED, SPOKEN, TEXT, TONE, forever, stub_gateway, until_idle
from tests.server.garbage import without_garbage
from tests.server.live.pictures import paced_pixels, png_text
from tests.server.live_gateway import ANSWER_S, RunningGateway, run, running_gateway


@asynccontextmanager
async def gateway_with(**cycle: int) -> AsyncIterator[RunningGateway]:
    """A gateway with one worker, which must be idle afterwards. cycle: of the worker's units."""
    async with FakeWorker(**cycle) as worker, running_gateway(worker) as gateway:
        yield gateway
        await gateway.wait_idle()


def test_the_newer_form_has_one_kind_of_output_in_each_event() -> None:
    async def scenario() -> None:
        async with gateway_with(n_listen=1, n_speak=2) as gateway:
            client = await connect(gateway.port, "mode=video&session_id=robot_7")
            created = await client.created(system_prompt="Be brief.", config={"length_penalty": 1.1})
            assert (created["session_id"], created["mode"]) == ("robot_7", "video")
            listened = await client.unit(input_id=5)
            assert (listened["kind"], listened["input_id"], listened["chunk_index"]) == ("listen", 5, 1)
            assert listened["metrics"]["kv_cache_length"] == 1 and listened["session_id"] == "robot_7"
            parts = []
            for _ in range(2):
                parts += [await client.unit(), await client.receive("response.output.delta")]
            assert [part["kind"] for part in parts] == ["text", "audio", "text", "audio"]
            assert all(("chunk_index" in part, "usage" in part) == (part["kind"] == "text",) * 2 for part in parts)
            assert parts[0]["text"] and len(samples_of(parts[1]["audio"])) == 24_000
            assert [part.get("end_of_turn") for part in parts] == [None, False, None, True]
            again = await client.unit(force_speak=True)
            ids = [event["response_id"] for event in (listened, *parts, again)]
            assert len(set(ids[:-1])) == 1 and ids[-1] != ids[0], "expected one id a turn"
            await client.receive("response.output.delta")
            await client.send("session.close", reason="user_stop")
            assert await client.closed() == ("stopped", 1000)

    run(scenario)


def test_the_form_of_april_has_one_event_for_each_unit_and_takes_wav_voices(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = paced_pixels(monkeypatch, "server.doors.dialects.minicpm_o.units")

    async def scenario() -> None:
        async with gateway_with(n_listen=1, n_speak=1) as gateway:
            client = await connect(gateway.port, "mode=audio")
            await client.queue_done()
            voice = {"ref_audio": wav_text(1.0), "tts_ref_audio": SECOND}
            await client.send("session.update", session={"instructions": "Be brief.", **voice})
            created = await client.receive("session.created")
            assert created["prompt_length"] == len("Be brief.") and "rt_" in created["session_id"]
            await client.send("input_audio_buffer.append", audio=SECOND)
            assert (await client.receive("response.listen"))["kv_cache_length"] == 1
            await client.send("input_audio_buffer.append", audio=SECOND, video_frames=[png_text(6, 7)])
            spoken = await client.receive("response.output_audio.delta")
            assert paced == [42]
            assert spoken["text"] and spoken["end_of_turn"] and spoken["kv_cache_length"] == 2
            assert len(samples_of(spoken["audio"])) == 24_000
            await client.send("input_audio_buffer.append", audio=SECOND, force_listen=True)
            await client.receive("response.listen")
            await client.socket.close()

    run(scenario)


def test_a_bad_message_gets_an_error_and_the_session_goes_on() -> None:
    async def scenario() -> None:
        async with gateway_with(n_listen=9, n_speak=1) as gateway:
            client = await connect(gateway.port, "mode=audio")
            await client.queue_done()
            for bad, code in (
                ("{", "bad_json"),
                (b"\0", "bad_message"),
                (json.dumps({"type": "hello"}), "unknown_type"),
                (json.dumps({"type": "input.append", "input": {"audio": SECOND}}), "not_prepared"),
                (json.dumps({"type": "session.init", "payload": {"voice": {"ref_audio": "?"}}}), "bad_base64"),
            ):
                await client.socket.send(bad)
                error = (await client.receive("error"))["error"]
                assert (error["code"], error["type"]) == (code, "invalid_request_error"), error["message"]
            await client.send("session.init")
            await client.receive("session.created")
            for given, code in (({"audio": "?"}, "bad_base64"), ({}, "bad_message"), ({"audio": ""}, "bad_audio")):
                await client.send("input.append", input=given)
                assert (await client.receive("error"))["error"]["code"] == code
            assert (await client.unit())["chunk_index"] == 1
            await client.send("session.close")
            await client.closed()

    run(scenario)


def test_a_waiting_client_learns_its_place_and_its_early_messages_are_kept() -> None:
    async def scenario() -> None:
        async with gateway_with(slots=1) as gateway:
            first = await connect(gateway.port, "mode=audio")
            await first.created()
            second = await connect(gateway.port, "mode=audio")
            queued = await second.receive("session.queued")
            assert queued["position"] == 1 and queued["ticket_id"] and queued["queue_length"] == 1
            await second.send("session.init")
            await first.send("session.close")
            assert await first.closed() == ("stopped", 1000)
            async with asyncio.timeout(ANSWER_S):
                while json.loads(await second.socket.recv())["type"] != "session.queue_done":
                    pass
            await second.receive("session.created")
            third = await connect(gateway.port, "mode=audio")
            await third.receive("session.queued")
            await third.socket.close()
            await second.send("session.close")
            await second.closed()

    run(scenario)


def test_a_client_that_only_chatters_loses_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.dialects.minicpm_o.socket.START_S", 0.3)
    monkeypatch.setattr("server.doors.dialects.minicpm_o.socket.POLL_S", 0.05)

    async def scenario() -> None:
        async with gateway_with() as gateway:
            client = await connect(gateway.port, "mode=audio")
            await client.queue_done()
            for _ in range(3):
                await client.socket.send("{")
                await client.receive("error")
                await asyncio.sleep(0.05)
            assert await client.closed() == ("timeout", 1000)

    run(scenario)


def test_a_lost_worker_and_an_unknown_mode_are_reported() -> None:
    async def scenario() -> None:
        async with FakeWorker() as worker, running_gateway(worker) as gateway:
            with pytest.raises(websockets.InvalidStatus) as refused:
                await connect(gateway.port, "mode=text")
            body = json.loads(refused.value.response.body)
            assert refused.value.response.status_code == 400 and body["error"]["param"] == "mode"
            client = await connect(gateway.port, "mode=audio")
            await client.created()
            worker.crash()
            assert (await client.receive("error"))["error"]["type"] == "server_error"
            assert await client.closed() == ("error", 1011)
            await gateway.wait_idle()

    run(scenario)


def test_chat_mode_answers_conversations_one_after_the_other() -> None:
    async def scenario() -> None:
        async with stub_gateway(SPOKEN) as (gateway, worker):
            client = await connect(gateway.port, "mode=chat")
            created = await client.created(system_prompt="Be brief.", voice={"ref_audio": SECOND})
            assert created["mode"] == "chat"
            messages = [{"role": "user", "content": "Good morning."}]
            await client.send("input.append", input={"messages": messages, "tts": {"enabled": True}, "unknown": 1})
            deltas = [await client.receive("response.output.delta") for _ in range(4)]
            assert "".join(one["text"] for one in deltas if one["kind"] == "text") == TEXT
            sound = np.concatenate([samples_of(one["audio"]) for one in deltas if one["kind"] == "audio"])
            np.testing.assert_array_equal(sound, TONE)
            done = await client.receive("response.done")
            assert (done["text"], done["reason"], done["metrics"]["n_tts_tokens"]) == (TEXT, "turn_end", 50)
            assert "audio" not in done and done["response_id"] == deltas[0]["response_id"]
            path, request = worker.requests[0]
            assert path == "/ws/chat" and "unknown" not in request
            assert request["messages"] == [{"role": "system", "content": "Be brief."}, *messages]
            assert request["tts"] == {"enabled": True, "ref_audio_data": SECOND}
            await client.send("input.append", input={"messages": messages, "streaming": False})
            done = await client.receive("response.done")
            np.testing.assert_array_equal(samples_of(done["audio"]), TONE)
            await client.send("input.append", input={"messages": []})
            assert (await client.receive("error"))["error"]["code"] == "bad_message"
            await client.send("session.close")
            assert await client.closed() == ("stopped", 1000)

    run(scenario)


def test_closing_a_chat_frees_its_slot() -> None:
    async def scenario() -> None:
        async with stub_gateway([PREFILLED, forever]) as (gateway, worker):
            client = await connect(gateway.port, "mode=chat")
            await client.created()
            await client.send("input.append", input={"messages": [{"role": "user", "content": "Go on."}]})
            while not worker.requests:
                await asyncio.sleep(0.01)
            await client.send("session.close")
            assert await client.closed() == ("stopped", 1000)
            await until_idle(gateway, worker, 1.0)

    run(scenario)


def test_a_mode_may_have_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.dialects.minicpm_o.socket.POLL_S", 0.05)

    async def scenario() -> None:
        limits = SessionLimits(video_mode_s=0.3)
        async with (
            FakeWorker() as worker,
            running_gateway(worker, session_limits=limits) as gateway,
            without_garbage(LiveSession),
        ):
            audio, video = [await connect(gateway.port, f"mode={mode}") for mode in ("audio", "video")]
            await video.created()
            assert await video.closed() == ("timeout", 1000)
            await audio.created()
            await audio.socket.close()
            await gateway.wait_idle()

    run(scenario)


def test_a_shutdown_waits_for_the_end_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.doors.dialects.minicpm_o.socket.POLL_S", 0.05)

    async def scenario() -> None:
        async with gateway_with(n_listen=0, n_speak=2) as gateway:
            client = await connect(gateway.port, "mode=audio")
            await client.created()
            await client.unit()
            assert not (await client.receive("response.output.delta"))["end_of_turn"]
            gateway.gateway.live.drain()
            await asyncio.sleep(0.2)
            await client.unit()
            assert (await client.receive("response.output.delta"))["end_of_turn"]
            assert await client.closed() == ("server_shutdown", 1001)

    run(scenario)
