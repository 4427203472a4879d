"""Who begins a response, and who ends the user's turn, for each `turn_detection`."""

from typing import Any, cast

import numpy as np
import pytest

from server.doors.core.unit_session import UnitSession
from tests.server.doors.realtime.session_stage import SessionStage, StubTurns, stage
from tests.server.live_gateway import run, wait_until
from worker.protocol.messages import Partial

SEMANTIC, SERVER = {"type": "semantic_vad"}, {"type": "server_vad"}
USER_TURN = [
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.committed",
    "conversation.item.added",
    "conversation.item.done",
]


def demands(one: SessionStage) -> list[str]:
    """What was demanded of each unit."""
    words = {(False, False): "free", (True, False): "listen", (False, True): "speak"}
    return [words[chunk.force_listen, chunk.force_speak] for chunk in one.chunks]


async def user_turn(one: SessionStage, seconds: float = 1.4) -> None:
    """The user speaks; the last part of the sound waits for the rest of its unit."""
    await one.append(seconds)
    one.speak_up()
    one.listen()
    one.fall_silent()


def test_semantic_vad_leaves_the_decision_to_the_model() -> None:
    async def scenario() -> None:
        async with stage(SEMANTIC) as one:
            await user_turn(one)
            assert demands(one) == ["free"], "expected no unit before its second is over"
            assert one.kinds("input_audio_buffer", "conversation", "response") == USER_TURN
            await one.append(0.6)
            assert demands(one) == ["free"] * 2 and one.kinds("response") == []
            one.speak(ends=True)
            assert one.kinds("response")[:2] == ["response.created", "response.output_item.added"]
            assert one.last("response.done")["response"]["status"] == "completed"

    run(scenario)


def test_server_vad_is_answered_at_once_after_the_users_turn() -> None:
    async def scenario() -> None:
        async with stage(SERVER) as one:
            await user_turn(one)
            assert demands(one) == ["free", "speak"], "expected the unit to be closed early"
            assert len(one.chunks[-1].samples()) == 16_000
            one.speak("Yes. ", ends=True)
            await one.append(1.0)
            assert demands(one)[2:] == ["free"], "expected one answer to one turn"
            assert one.kinds("response.done") == ["response.done"]

    run(scenario)


def test_server_vad_does_not_ask_a_model_twice_that_answers_by_itself() -> None:
    async def scenario() -> None:
        async with stage(SERVER) as one:
            await one.append(1.0)
            one.speak_up()
            one.fall_silent()  # while the unit runs that answers
            one.speak("Yes. ", ends=True)
            await one.append(1.0)
            assert demands(one) == ["free", "free"]

    run(scenario)


@pytest.mark.parametrize("detection", [SEMANTIC, SERVER])
def test_without_create_response_only_the_client_begins_a_response(detection: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with stage({**detection, "create_response": False}) as one:
            await user_turn(one)
            assert one.kinds("input_audio_buffer") == USER_TURN[:3]
            await one.append(0.6)
            assert demands(one) == ["listen"] * 2
            one.listen()
            await one.send("response.create")
            assert one.kinds("response")[0] == "response.created", "expected it before the model has spoken"
            assert demands(one)[2:] == ["speak"], "expected the unit to begin at once"
            one.speak()
            await one.append(1.0)
            assert demands(one)[3:] == ["free"], "expected the turn to go on"
            one.speak(ends=True)
            await one.append(1.0)
            assert demands(one)[4:] == ["listen"]

    run(scenario)


def test_without_turn_detection_the_client_ends_turns_and_begins_responses() -> None:
    turns = StubTurns()

    async def scenario() -> None:
        async with stage(turns=turns, audio={"input": {"turn_detection": None}, "output": {"speed": 0.5}}) as one:
            await one.append(1.5)
            assert one.chunks == [] and one.log[-1]["type"] == "session.updated"
            await one.send("input_audio_buffer.commit")
            assert one.kinds("input_audio_buffer", "conversation") == USER_TURN[2:]
            assert one.kinds("response") == []
            await one.send("response.create")
            await wait_until(lambda: one.kinds("response.done"), "the answer")
            done = one.last("response.done")["response"]
            assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": "Good day."}]
            item = one.session.conversation.find(done["output"][0]["id"], "none")
            assert 950 <= item.sent_ms <= 1050, f"expected half a second at half speed, got {item.sent_ms} ms"
            [request] = turns.requests
            messages: Any = request.fields["messages"]
            assert [part["type"] for part in messages[-1]["content"]] == ["audio"] and one.chunks == []

    run(scenario)


@pytest.mark.parametrize("creates", [True, False])
def test_a_quiet_user_is_spoken_to_if_the_server_may_begin_responses(creates: bool) -> None:
    async def scenario() -> None:
        async with stage({**SERVER, "idle_timeout_ms": 2000, "create_response": creates}) as one:
            await one.send("response.create")
            one.speak(ends=True)
            for waited, expected in ((2.9, 0), (0.2, 1), (3.0, 1)):  # a second of playback before the timeout
                one.pass_time(waited)
                one.session.lane.check_idle()
                assert len(one.kinds("input_audio_buffer.timeout_triggered")) == expected, f"after {waited} s"
            assert demands(one)[1:] == (["speak"] if creates else [])

    run(scenario)


@pytest.mark.parametrize(
    ("eagerness", "before", "patience"), [("low", 2.0, 8), ("medium", 1.0, 4), ("high", 0.5, 2), ("auto", 1.0, 99)]
)
def test_patience_makes_speech_more_likely_and_never_forces_it(eagerness: str, before: float, patience: int) -> None:
    async def scenario() -> None:
        async with stage({**SEMANTIC, "eagerness": eagerness}) as one:
            await user_turn(one, 1.0)
            for waited in range(9):
                await one.append(1.0)
                expected = before / 2 if waited >= patience else before
                assert one.settings["listen_prob_scale"] == expected, f"after {waited} units"
                one.listen()
            assert demands(one) == ["free"] * 10
            one.speak_up(20_000)
            await one.append(1.0)
            assert one.settings["listen_prob_scale"] == before, "expected new patience with a new turn"

    run(scenario)


def test_a_cancelled_response_is_followed_by_one_unit_that_listens() -> None:
    async def scenario() -> None:
        async with stage() as one:
            await one.append(1.0)
            one.speak()
            await one.append(1.0)
            await one.send("response.cancel")
            assert one.last("response.done")["response"]["status"] == "cancelled" and one.n_interrupts == 1
            one.speak("late ")
            assert one.kinds()[-1] == "rate_limits.updated", "expected the unit in flight to be dropped"
            assert demands(one) == ["free", "free"], "expected no unit without sound"
            await one.append(1.0)
            one.listen()
            await one.append(1.0)
            assert demands(one)[2:] == ["listen", "free"]

    run(scenario)


def test_a_request_after_a_cancelled_response_costs_no_further_unit() -> None:
    async def scenario() -> None:
        async with stage() as one:
            await one.append(1.0)
            one.speak()
            await one.append(1.0)
            await one.send("response.cancel")
            await one.send("response.create")
            one.listen()  # the interrupt has ended the turn
            assert demands(one) == ["free", "free", "speak"]

    run(scenario)


def test_speech_that_is_confirmed_cancels_unless_interruptions_are_off() -> None:
    async def scenario(*, interrupts: bool) -> None:
        async with stage({**SEMANTIC, "interrupt_response": interrupts}) as one:
            await one.append(1.0)
            one.speak()
            await one.append(1.0)
            one.speak_up(1100)
            assert one.kinds("input_audio_buffer") == ["input_audio_buffer.speech_started"]
            assert bool(one.kinds("response.done")) == interrupts
            if interrupts:
                assert one.last("response.done")["response"]["status_details"]["reason"] == "turn_detected"

    run(lambda: scenario(interrupts=True))
    run(lambda: scenario(interrupts=False))


# --- the context ----------------------------------------------------------------------------------


def test_disabled_truncation_ends_the_response_when_the_context_is_full() -> None:
    async def scenario() -> None:
        async with stage(truncation="disabled") as one:
            window, limit = (
                one.session.engine_settings(1.0, False).settings["window"],
                one.session.engine_settings(1.0, False).max_rows,
            )
            assert limit is not None and limit < window["low_tokens"] == window["high_tokens"] < 8192
            await one.append(1.0)
            one.speak(rows=limit)
            await one.append(1.0)
            one.speak(rows=limit + 1)
            one.pass_time(2.0)
            await one.append(1.0)
            assert len(one.chunks) == 2, "expected no unit that does not fit"
            done = one.last("response.done")["response"]
            assert done["status"] == "incomplete" and one.kinds("error") == ["error"]
            assert one.last("error")["error"]["code"] == "context_length_exceeded"
            await one.append(120.0)
            assert one.kinds("error") == ["error"], "expected one error"
            await one.send("response.create", event_id="e9")
            refused = one.last("error")["error"]
            assert (refused["code"], refused["event_id"]) == ("context_length_exceeded", "e9")
            await one.update(truncation="auto")
            await one.append(1.0)
            assert len(one.chunks) == 3 and one.settings["window"] == {"high_tokens": 4000, "low_tokens": 3500}

    run(scenario)


def test_another_worker_begins_with_room() -> None:
    async def scenario() -> None:
        async with stage(truncation="disabled") as one:
            await one.append(1.0)
            one.listen(rows=8000)
            await one.append(1.0)
            assert one.kinds("error") == ["error"] and len(one.chunks) == 1
            one.session.lane.detach()
            one.session.lane.attach(cast(UnitSession, one.units), one.session.history())
            await one.append(1.0)
            assert len(one.chunks) == 2

    run(scenario)


def test_a_retention_ratio_says_what_stays() -> None:
    async def scenario() -> None:
        given = {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": {"post_instructions": 3000}}
        async with stage(truncation=given) as one:
            assert one.last("session.updated")["session"]["truncation"] == given
            await one.append(1.0)
            assert one.settings["window"] == {"high_tokens": 3000, "low_tokens": 1500}

    run(scenario)


def test_unit_runs_early_where_the_worker_does_so() -> None:
    """Sound goes out in pieces while the model may begin by itself, and in whole units while it speaks."""

    async def scenario() -> None:
        async with stage(SEMANTIC) as one:
            one.units.runs_early = True
            for _ in range(4):
                await one.append(0.15)
            assert [len(chunk.samples()) for chunk in one.chunks] == [2_400] * 4 and demands(one) == ["free"] * 4
            pieces = list(one.chunks)
            for piece in pieces[:2]:
                one.answer(piece, one.outcome(is_listen=True, incomplete=True))
            one.session.lane.on_partial(Partial(current_time=1, part=1, text="Yes."))
            assert one.kinds("response.created") == ["response.created"]
            one.answer(pieces[2], one.outcome(is_listen=False, text="Yes.", early=True, shift_ms=550.0))
            one.answer(pieces[3], one.outcome(is_listen=True, incomplete=True))
            await one.append(0.8)
            assert len(one.chunks) == 4, "expected no pieces while the model speaks"
            one.pass_time(1.0)
            await one.append(0.1)
            assert len(one.chunks) == 5 and len(one.chunks[-1].samples()) == 16_000 - 2_400
            one.speak(" No.", ends=True)
            assert one.last("response.done")["response"]["status"] == "completed"
            await one.append(0.2)
            assert len(one.chunks) == 6 and len(one.chunks[-1].samples()) < 16_000

    run(scenario)


def test_units_are_whole_where_the_client_asks_for_every_response() -> None:
    async def scenario() -> None:
        async with stage({**SEMANTIC, "create_response": False}) as one:
            one.units.runs_early = True
            await one.append(0.9)
            assert not one.chunks
            await one.append(0.1)
            assert demands(one) == ["listen"]

    run(scenario)


def test_units_are_full_where_the_worker_has_a_place() -> None:
    """Silence before the first sound; the times of the user's turns do not count it."""

    async def scenario() -> None:
        async with stage(SEMANTIC) as one:
            one.pass_time(1.0)
            await one.append(0.1)
            one.prepared(start_after_ms=430.0)
            for number in range(4):
                assert not one.chunks, f"expected no unit after {100 * number} ms"
                one.pass_time(0.1)
                await one.append(0.1)
            [unit] = one.chunks
            assert np.count_nonzero(unit.samples()) == 0 and one.session.lane.detector.pushed_ms == 500
            one.listen()
            for _ in range(9):
                await one.append(0.1)
            assert len(one.chunks) == 1
            await one.append(0.1)
            assert len(one.chunks) == 2

    run(scenario)


def test_pictures_go_to_the_worker_before_their_unit() -> None:
    """While sound comes; the last place of a unit is for its newest picture."""

    async def scenario() -> None:
        async with stage(SEMANTIC) as one:
            lane = one.session.lane
            lane.add_picture(b"0", 1)
            assert not one.ahead, "expected that a picture before any sound waits"
            await one.append(1.0)
            assert one.chunks[-1].frame_base64_list == [b"0"]
            for name in (b"1", b"2", b"3", b"4", b"5"):
                lane.add_picture(name, 1)
            assert [(frame.frame, frame.max_slice_nums) for frame in one.ahead] == [(b"1", 1), (b"2", 1), (b"3", 1)]
            one.listen()
            await one.append(1.0)
            assert one.chunks[-1].frame_base64_list == [b"5"] and one.chunks[-1].max_slice_nums == [1]
            lane.add_picture(bytes(2**20 + 1), 1)
            lane.add_picture(b"6", 9)
            assert len(one.ahead) == 3, "expected that a large picture waits, and the next one behind it"
            one.listen()
            await one.append(1.0)
            assert one.chunks[-1].max_slice_nums == [1, 9]

    run(scenario)
