"""What a session makes of its settings, its items and its worker's refusals, without sockets."""

import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from server.doors.core.picture_urls import PictureUrls
from server.doors.live.event_error import EventRefusedError
from server.doors.live.sound.wire_sound import SoundOutput
from tests.server.doors.realtime.event_schema import Json
from tests.server.doors.realtime.session_stage import SessionStage, stage
from tests.server.live_gateway import run
from worker.protocol.messages import Adjust, Prepare
from worker.protocol.text_messages import InsertText


def sound_of(one: SessionStage) -> bytes:
    deltas = [event["delta"] for event in one.log if event["type"] == "response.output_audio.delta"]
    return b"".join(base64.b64decode(delta) for delta in deltas)


async def say(one: SessionStage, text: str = "Hello", **fields: Any) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **fields}
    await one.send("conversation.item.create", item=item)


@pytest.mark.parametrize("speed", [0.25, 0.8, 1.5])
def test_speed_changes_the_length_of_speech_and_what_counts_as_heard(speed: float) -> None:
    async def scenario() -> None:
        async with stage(audio={"output": {"speed": speed}}) as one:
            assert one.last("session.updated")["session"]["audio"]["output"]["speed"] == speed
            await one.append(1.0)
            one.speak("One two ")
            one.pass_time(10.0)
            await one.append(1.0)
            one.speak("three four.", ends=True)
            n_bytes, item = len(sound_of(one)), one.last("response.output_item.done")["item"]
            assert abs(n_bytes / 48 * speed - 2000) < 50, f"expected {2000 / speed} ms, got {n_bytes / 48}"
            await one.send(
                "conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=round(1100 / speed)
            )
            await one.send("conversation.item.retrieve", item_id=item["id"])
            heard = one.last("conversation.item.retrieved")["item"]["content"][0]["transcript"]
            assert heard.strip() == "One two", heard

    run(scenario)


def test_fast_speech_does_not_wait_for_the_rest_of_a_second() -> None:
    """A second of speech lasts 0.67 s at this speed."""

    async def scenario() -> None:
        async with stage(audio={"output": {"speed": 1.5}}) as one:
            await one.append(1.0)
            one.speak()
            await one.append(0.3)
            one.pass_time(0.3)
            assert len(one.chunks) == 1
            one.pass_time(0.1)
            assert len(one.chunks) == 2, "expected the next unit before the client runs out of sound"
            assert len(one.chunks[-1].samples()) == 16_000

    run(scenario)


@pytest.mark.parametrize(("form", "most"), [("audio/pcm", 12_000), ("audio/pcmu", 2000), ("audio/pcma", 2000)])
def test_sound_is_sent_in_parts_of_a_quarter_of_a_second(form: str, most: int) -> None:
    async def scenario() -> None:
        async with stage(audio={"output": {"format": {"type": form}}}) as one:
            await one.append(1.0)
            one.speak(ends=True)
            deltas = [event["delta"] for event in one.log if event["type"] == "response.output_audio.delta"]
            assert [len(base64.b64decode(delta)) for delta in deltas] == [most] * 4

    run(scenario)


@pytest.mark.parametrize(("kind", "param"), [(Prepare, "session"), (Adjust, "session"), (InsertText, "item")])
def test_what_does_not_fit_into_the_context_is_told(kind: type[Any], param: str) -> None:
    async def scenario() -> None:
        async with stage(instructions="x" * 30_000) as one:
            await one.append(0.2)
            if kind is not Prepare:
                one.prepared()
                await say(one, "y" * 60_000)
                await one.update(instructions="z" * 30_000)
                await one.append(1.0)
            one.refuse(kind, "context_full")
            error = one.last("error")["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            n_sent = sum(isinstance(message, Prepare) for message in one.units.sent)
            await one.append(0.2)
            assert sum(isinstance(message, Prepare) for message in one.units.sent) == n_sent == 1
            if kind is Prepare:
                await one.send("response.create", event_id="e5")
                assert one.last("error")["error"]["event_id"] == "e5", "expected no response that never ends"
                await one.update(instructions="Be brief.")
                await one.append(0.2)
                assert one.units.sent[-1].system_prompt == "Be brief.", "expected another try with other settings"

    run(scenario)


def test_dropped_sound_is_told_once_a_second() -> None:
    async def scenario() -> None:
        async with stage() as one:
            await one.append(1.0)
            await one.append(61.0)
            for _ in range(3):
                await one.append(0.5)
            one.pass_time(1.1)
            await one.append(0.5)
            told = [event["error"] for event in one.log if event["type"] == "error"]
            assert [error["code"] for error in told] == ["input_audio_buffer_overflow"] * 2
            assert "dropped 1000 ms" in told[0]["message"] and "dropped 2000 ms" in told[1]["message"], told

    run(scenario)


def test_a_failing_engine_is_no_error_of_the_client() -> None:
    async def scenario() -> None:
        async with stage() as one:
            await one.append(0.2)
            one.prepared()
            await say(one)
            one.refuse(InsertText, "engine")
            assert one.kinds("error") == []

    run(scenario)


def test_nothing_can_be_committed_after_a_clear_within_the_users_turn() -> None:
    async def scenario() -> None:
        async with stage() as one:
            await one.append(0.5)
            one.speak_up()
            await one.send("input_audio_buffer.clear")
            await one.send("input_audio_buffer.commit", event_id="e7")
            error = one.last("error")["error"]
            assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "e7")
            one.fall_silent()
            assert (
                one.last("input_audio_buffer.committed")["item_id"]
                == (one.last("input_audio_buffer.speech_started")["item_id"])
            )

    run(scenario)


def test_a_commit_within_the_users_turn_ends_it() -> None:
    async def scenario() -> None:
        async with stage() as one:
            await one.append(0.5)
            one.speak_up()
            await one.send("input_audio_buffer.commit")
            one.fall_silent()
            kinds = ["speech_started", "speech_stopped", "committed"]
            assert one.kinds("input_audio_buffer") == [f"input_audio_buffer.{kind}" for kind in kinds]
            assert one.last("input_audio_buffer.speech_stopped")["audio_end_ms"] == 500

    run(scenario)


@pytest.mark.parametrize("is_item", [False, True])
def test_a_file_is_heard_whole_before_its_answer(*, is_item: bool) -> None:
    async def scenario() -> None:
        async with stage() as one:
            await one.append(1.0)
            if is_item:
                part = {"type": "input_audio", "audio": base64.b64encode(bytes(2 * 60_000)).decode()}
                item = {"type": "message", "role": "user", "content": [part]}
                await one.send("conversation.item.create", item=item)
                one.speak_up(1000)
                assert one.kinds("input_audio_buffer") == [], "expected no second turn for the item"
            else:
                await one.append(2.5)
            await one.send("response.create")
            for _ in range(3):
                one.listen()
            demands = [(chunk.force_listen, chunk.force_speak) for chunk in one.chunks]
            assert demands == [(False, False), (True, False), (True, False), (False, True)]
            one.speak(ends=True)
            assert one.last("response.done")["response"]["status"] == "completed"

    run(scenario)


def test_an_item_that_is_deleted_while_it_is_spoken_is_not_heard_of_again() -> None:
    async def scenario() -> None:
        async with stage() as one:
            await one.append(1.0)
            one.speak()
            item_id = one.last("response.output_item.added")["item"]["id"]
            await one.send("conversation.item.delete", item_id=item_id)
            one.pass_time(2.0)
            one.speak(ends=True)
            assert one.kinds("conversation.item.done") == []
            assert one.last("response.done")["response"]["output"][0]["id"] == item_id

    run(scenario)


def test_clearing_the_output_names_the_last_response() -> None:
    async def scenario() -> None:
        async with stage() as one:
            await one.send("output_audio_buffer.clear")
            assert one.log[-1]["response_id"] == ""
            await one.append(1.0)
            one.speak(ends=True)
            await one.send("output_audio_buffer.clear")
            assert one.log[-1]["response_id"] == one.last("response.done")["response"]["id"]

    run(scenario)


def test_sound_before_another_lane_is_not_committed_in_it() -> None:
    async def scenario() -> None:
        async with stage() as one:
            await one.append(0.5)
            await one.update(audio={"input": {"turn_detection": None}})
            await one.send("input_audio_buffer.commit")
            assert one.last("error")["error"]["code"] == "input_audio_buffer_commit_empty"

    run(scenario)


async def show(one: SessionStage, url: str) -> None:
    part = {"type": "input_image", "image_url": url}
    await one.send("conversation.item.create", item={"type": "message", "role": "user", "content": [part]})


def test_pictures_behind_addresses_of_allowed_hosts_join_the_unit() -> None:
    picture = io.BytesIO()
    Image.new("RGB", (32, 24), "red").save(picture, "PNG")

    async def resolve(_: str) -> list[str]:
        return ["93.184.216.34"]

    def answer(request: httpx.Request) -> httpx.Response:
        async def parts() -> AsyncIterator[bytes]:
            yield picture.getvalue() if request.url.path == "/a.png" else b"no picture"

        return httpx.Response(200, content=parts())

    urls = PictureUrls(("a.example.org",), resolve=resolve, transport=httpx.MockTransport(answer))

    async def scenario() -> None:
        async with stage(picture_urls=urls) as one:
            await show(one, "https://a.example.org/a.png")
            assert one.last("conversation.item.done")["item"]["content"][0]["image_url"].endswith("/a.png")
            for wrong in ("https://a.example.org/b.png", "https://b.example.org/a.png", "http://a.example.org/a.png"):
                await show(one, wrong)
                assert one.log[-1]["error"]["code"] == "invalid_value", wrong
            await one.append(1.0)
            assert one.chunks[0].pictures() == [picture.getvalue()]

    run(scenario)


REFUSED = [
    ("session.update", {"session": {"tools": [{"name": "f", "parameters": {"x": "y" * 300_000}}]}}, "session.tools"),
    ("session.update", {"session": {"tools": [{"name": "f"}] * 129}}, "session.tools"),
    ("session.update", {"session": {"prompt": {"id": "p" * 20_000}}}, "session.prompt"),
    ("session.update", {"session": {"truncation": {"type": "retention_ratio"}}}, "session.truncation"),
    ("session.update", {"session": {"audio": {"output": {"speed": 1.6}}}}, "session.audio.output.speed"),
    ("response.create", {"response": {"tools": [{"name": "f"}] * 129}}, "response.tools"),
    ("response.create", {"response": {"metadata": {"a": "b" * 600}}}, "response.metadata"),
    ("response.create", {"response": {"metadata": {str(n): "" for n in range(17)}}}, "response.metadata"),
    ("response.create", {"response": {"instructions": "x" * 40_000}}, "response.instructions"),
]


@pytest.mark.parametrize(("kind", "fields", "param"), REFUSED)
def test_what_would_not_fit_into_an_event_is_refused(kind: str, fields: Json, param: str) -> None:
    async def scenario() -> None:
        async with stage() as one:
            before = one.session.described()
            try:
                await one.send(kind, **fields)
            except EventRefusedError as refused:
                assert str(refused.error.param).startswith(param), refused.error.param
            else:
                assert str(one.last("error")["error"]["param"]).startswith(param), one.log[-1]
            assert one.session.described() == before and one.session.response is None

    run(scenario)


def test_echoed_settings_are_shown_only_if_they_were_given() -> None:
    async def scenario() -> None:
        async with stage() as one:
            assert "reasoning" not in one.last("session.updated")["session"]
            await one.update(
                reasoning={"effort": "low"},
                parallel_tool_calls=False,
                audio={"input": {"noise_reduction": {"type": "near_field"}}},
            )
            shown = one.last("session.updated")["session"]
            assert shown["reasoning"] == {"effort": "low"} and shown["parallel_tool_calls"] is False
            assert shown["audio"]["input"]["noise_reduction"] == {"type": "near_field"}

    run(scenario)


def test_speed_keeps_the_pitch_in_each_format() -> None:
    tone = np.rint(9000 * np.sin(2 * np.pi * 440 * np.arange(48_000) / 24_000)).astype("<i2").tobytes()
    output = SoundOutput("audio/pcm", 0.5)
    samples = np.frombuffer(output.push(tone) + output.finish(), "<i2")
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    assert abs(len(samples) / 24_000 - 4) < 0.1 and abs(spectrum.argmax() * 24_000 / len(samples) - 440) < 4
    companded = SoundOutput("audio/pcmu", 0.5)
    assert abs(len(companded.push(tone) + companded.finish()) / 8000 - 4) < 0.1
