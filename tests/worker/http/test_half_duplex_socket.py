"""A worker's half-duplex socket: settings, errors, stops, barge-in and slots, in a real process."""

import base64
from contextlib import ExitStack

import numpy as np
import pytest

from tests.worker.http.client_scripts import base64_of, picture_of
from tests.worker.http.half_duplex_client import QUIET, HalfDuplexScript, sentence
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.scripted_client import HandshakeRefused, ScriptedClient
from tests.worker.http.small_worker import N_SLOTS
from worker.protocol.half_duplex_messages import (
    AnswerInterrupted,
    TurnChunk,
    TurnDone,
    TurnHeard,
    TurnPrepared,
    VadState,
)
from worker.protocol.messages import Stopped

pytestmark = pytest.mark.usefixtures("all_slots_free")
SILENT = {"generation": {"max_new_tokens": 800, "seed": 1}, "tts": {"enabled": False}}
LONG = {"generation": {"max_new_tokens": 2000, "seed": 1}}
BARGE_IN = {**LONG, "vad": {"barge_in": True, "barge_in_ms": 200}}


def test_prompt_of_texts_and_sounds_is_in_the_context(worker: WorkerProcess) -> None:
    def rows(**prompt: object) -> int:
        with HalfDuplexScript(worker) as client:
            client.send({"type": "prepare", "config": QUIET, **prompt})
            client.expect(TurnPrepared)
            n = worker.health()["sessions"][0]["kv_rows"]
            client.stop()
        worker.wait_free(N_SLOTS)
        return n

    sound = base64_of(sentence()[:16_000])
    texts = [{"type": "text", "text": "You are kind."}]
    with_sound = [*texts, {"type": "audio", "data": sound}]
    plain = rows(system_content=texts)
    assert rows(system_prompt="You are kind.") == plain
    assert rows(system_prompt="You are rude.", system_content=texts) == plain, "expected the content to count"
    assert rows(system_content=with_sound) == rows(system_prompt="You are kind.", ref_audio_base64=sound) > plain
    assert rows(system_content=[]) == rows()


def test_a_turn_has_the_pictures_that_came_with_it(worker: WorkerProcess) -> None:
    with HalfDuplexScript(worker) as client:
        client.begin(QUIET)
        rows = [worker.health()["sessions"][0]["kv_rows"]]
        for number, frames in enumerate(([], [base64.b64encode(picture_of(1)).decode()])):
            client.push(sentence(), frame_base64_list=frames)
            [heard] = [one for one in client.until(TurnDone) if isinstance(one, TurnHeard)]
            assert (heard.video_frames is None) == (number == 0), heard
            rows.append(worker.health()["sessions"][0]["kv_rows"])
        without, with_pictures = rows[1] - rows[0], rows[2] - rows[1]
        assert heard.video_frames is not None and with_pictures >= without + 60 * heard.video_frames
        client.stop()


def test_second_prepare_starts_anew(worker: WorkerProcess) -> None:
    with HalfDuplexScript(worker) as client:
        client.begin(QUIET)
        first = client.say(sentence())[-1]
        rows = worker.health()["sessions"][0]["kv_rows"]
        prepared = client.begin({**QUIET, "session": {"timeout_s": 60}})
        assert (prepared.timeout_s, worker.health()["sessions"][0]["kv_rows"] < rows) == (60, True)
        again = client.say(sentence())[-1]
        assert (again.turn_index, again.text) == (1, first.text), f"expected {first}, got {again}"
        client.stop()


def test_errors_keep_the_session(worker: WorkerProcess) -> None:
    with HalfDuplexScript(worker) as client:
        client.push(np.zeros(8_000, np.float32))
        assert client.expect_error("not_prepared").error == "Not prepared yet"
        client.send({"type": "prepare", "config": {"vad": {"threshold": 7}}})
        assert (
            "config.vad.threshold: expected a number from 0.05 to 1, got 7" in client.expect_error("bad_message").error
        )
        client.begin(QUIET)
        client.send({"type": "pause"})
        assert client.expect_error("unknown_type").error == "Unknown type: pause"
        client.send("no JSON")
        client.expect_error("bad_json")
        client.send(b"\0\0\0\0")
        client.expect_error("binary_not_agreed")
        client.send({"type": "audio_chunk", "audio_base64": "AAAA"})
        client.expect_error("bad_audio")
        client.send({"type": "audio_chunk", "audio_base64": base64_of(np.full(8_000, np.nan, np.float32))})
        client.expect_error("bad_audio")
        for empty in ({}, {"audio_base64": ""}, {"audio_base64": None}):
            client.send({"type": "audio_chunk", **empty})
        client.send({"type": "prepare", "config": {"generation": {"length_penalty": 99}}})
        client.expect_error("bad_message")
        done = client.say(sentence())[-1]
        assert done.turn_index == 1, f"expected the conversation to go on, got {done}"
        client.stop()


def test_stop_is_answered_during_an_answer(worker: WorkerProcess) -> None:
    with HalfDuplexScript(worker, "one") as client:
        client.begin(LONG)
        client.push(sentence())
        client.until(TurnChunk)
        client.send({"type": "stop"})
        stopped = client.until(Stopped)
        assert stopped[-1].session_id == "one" and not any(isinstance(one, TurnDone) for one in stopped)
        assert client.close_code() == 1000


def test_lost_connection_frees_the_slot_during_an_answer(worker: WorkerProcess) -> None:
    client = HalfDuplexScript(worker)
    client.begin(LONG)
    client.push(sentence())
    client.until(TurnHeard)
    client.drop(reset=True)
    worker.wait_free(N_SLOTS, timeout=10)


def test_sound_during_an_answer_is_ignored_by_default(worker: WorkerProcess) -> None:
    with HalfDuplexScript(worker) as client:
        client.begin(SILENT)
        client.push(sentence())
        client.until(TurnChunk)
        client.push(sentence("question"))
        rest = client.until(TurnDone)
        assert all(isinstance(one, TurnChunk) for one in rest[:-1]), f"expected chunks only, got {rest}"
        assert rest[-1].stopped != "interrupted"
        assert client.settled() == []
        client.stop()


def test_speech_interrupts_an_answer_and_is_the_next_turn(worker: WorkerProcess) -> None:
    with HalfDuplexScript(worker) as client:
        client.begin(BARGE_IN)
        client.push(sentence())
        before = client.until(TurnChunk)
        while not any(isinstance(one, TurnChunk) and one.audio_data for one in before):
            before += client.until(TurnChunk)
        client.push(sentence("question"))
        before += client.until(AnswerInterrupted)
        interrupted, rest = before.pop(), client.until(TurnDone)
        chunks = [one for one in before if isinstance(one, TurnChunk)]
        sent_ms = sum(one.duration_ms or 0.0 for one in chunks)
        assert interrupted.turn_index == 1 and interrupted.text == "".join(one.text_delta or "" for one in chunks)
        assert abs(interrupted.audio_ms - sent_ms) < 0.1 and 0 <= interrupted.heard_ms <= interrupted.audio_ms
        assert rest[0] == VadState(speaking=True), f"expected the user to speak, got {rest[0]}"
        assert all(one.audio_data is None for one in rest if isinstance(one, TurnChunk)), "expected no further sound"
        assert (rest[-1].turn_index, rest[-1].stopped) == (1, "interrupted")
        assert rest[-1].text.startswith(interrupted.text)
        following = client.until(TurnChunk)
        assert any(isinstance(one, TurnHeard) for one in following), f"expected the next turn, got {following}"
        client.send({"type": "stop"})
        client.until(Stopped)


def test_noise_does_not_interrupt_an_answer(worker: WorkerProcess) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 24_000).astype(np.float32)
    cough = sentence()[4_000 + 3_200 : 4_000 + 3_200 + 1_600]  # 100 ms
    with HalfDuplexScript(worker) as client:
        client.begin({**SILENT, "vad": {"barge_in": True}})
        client.push(sentence())
        client.until(TurnChunk)
        client.push(np.concatenate((noise, cough, np.zeros(16_000, np.float32))))
        rest = client.until(TurnDone)
        assert rest[-1].stopped != "interrupted" and all(isinstance(one, TurnChunk) for one in rest[:-1]), f"{rest}"
        client.stop()


def test_interrupt_stops_the_answer(worker: WorkerProcess) -> None:
    with HalfDuplexScript(worker) as client:
        client.begin(LONG)
        client.push(sentence())
        client.until(TurnChunk)
        client.send({"type": "interrupt"})
        assert client.until(AnswerInterrupted)[-1].turn_index == 1
        assert client.until(TurnDone)[-1].stopped == "interrupted"
        assert client.settled() == []
        client.push(sentence())
        assert len(client.until(TurnHeard)) == 3, "expected the next turn to be answered"
        client.send({"type": "interrupt"})
        assert client.until(TurnDone)[-1].turn_index == 2
        client.stop()


def test_route_stops_one_or_all_answers(worker: WorkerProcess) -> None:
    with HalfDuplexScript(worker, "one") as one, HalfDuplexScript(worker, "two") as two:
        for client in (one, two):
            client.begin(LONG)
            client.push(sentence())
        for client in (one, two):
            client.until(TurnChunk)
        status, body = worker.ask("/half_duplex/stop", post={"session_id": "two"})
        assert (status, body["success"], body["stopped"]) == (200, True, ["two"]), f"got {body}"
        assert two.until(TurnDone)[-1].stopped == "interrupted"
        one.push(np.zeros(8_000, np.float32))
        status, body = worker.ask("/half_duplex/stop", post={})
        assert (status, body["success"], "one" in body["stopped"]) == (200, True, True), f"got {body}"
        assert one.until(TurnDone)[-1].stopped == "interrupted"
        one.stop()
        two.stop()


def test_shares_slots_with_duplex_sessions(worker: WorkerProcess) -> None:
    """A full worker refuses the handshake, as for duplex sessions, and takes over no session."""
    with ExitStack() as stack:
        talks = [stack.enter_context(HalfDuplexScript(worker)) for _ in range(N_SLOTS - 1)]
        assert worker.health()["worker_status"] == "busy_half_duplex"
        duplex = stack.enter_context(ScriptedClient(worker))
        duplex.prepare()
        health = worker.health()
        assert (health["worker_status"], health["slots"]["free"]) == ("duplex_active", 0), f"got {health['slots']}"
        with pytest.raises(HandshakeRefused) as refused:
            HalfDuplexScript(worker)
        assert refused.value.status == 403
        duplex.unit(0)
        waiting = HalfDuplexScript(worker, wait=False)
        duplex.stop()
        waiting.finish_handshake()
        waiting.begin(QUIET)
        assert waiting.say(sentence())[-1].turn_index == 1
        waiting.stop()
        for talk in talks:
            talk.stop()


def test_metrics_count_answers(worker: WorkerProcess) -> None:
    def counted() -> float:
        lines = worker.ask("/metrics")[1].splitlines()
        return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith("duologue_worker_replies_total{"))

    before = counted()
    with HalfDuplexScript(worker) as client:
        client.begin(QUIET)
        client.say(sentence())
        client.stop()
    assert counted() == before + 1
