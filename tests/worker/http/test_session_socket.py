"""A worker's socket, from outside: a real process, real connections, what clients may count on."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.worker.http.client_scripts import (
    ALOUD,
    QUIET,
    TURNS_ALOUD,
    TURNS_QUIET,
    assert_result,
    assert_told,
    base64_of,
    chunk,
    picture_of,
    sound_of,
)
from tests.worker.http.processes import Refused, Talker, WorkerProcess
from tests.worker.http.small_worker import N_SLOTS, heard_alone, small_worker
from worker.config.service import ROOT
from worker.protocol.messages import Paused, Prepared, Result, Resumed, Stopped, Timeout
from worker.start.voices import ReferenceSound

SOUND_APART = 1e-4  # of two sessions that speak at the same time; measured 1e-5, beside a loudness of 0.8


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with small_worker(tmp_path_factory.mktemp("worker")) as process:
        yield process


@pytest.fixture(autouse=True)
def _all_slots(worker: WorkerProcess) -> Iterator[None]:
    """Every test leaves every slot free."""
    yield
    worker.wait_free(N_SLOTS)


@pytest.fixture(scope="module")
def alone(worker: WorkerProcess) -> Callable[..., list[Result]]:
    return heard_alone(worker)


# --- units ----------------------------------------------------------------------------------------


def test_thirty_chunks_at_once(worker: WorkerProcess) -> None:
    """A client that knows nothing but a voice and `audio_chunk`, and does not wait; its last chunk is cut short."""
    voice = ReferenceSound.read(ROOT / "assets" / "ref_audio" / "high.wav").heard()
    with Talker(worker) as talker:
        talker.send({"type": "prepare", "ref_audio_base64": base64_of(voice)})
        for number in range(29):
            talker.send(chunk(number))
        talker.send(chunk(sound=sound_of(29)[:6000]))
        prepared = talker.expect(Prepared)
        assert type(prepared.prompt_length) is int and prepared.prompt_length > 0, (
            f"expected characters, got {prepared}"
        )
        results = [talker.expect(Result) for _ in range(30)]
        talker.expect_silence(0.2)
        talker.stop()
    for result in results:
        assert_result(result)
    got = [result.current_time for result in results]
    assert got == [*range(1, 30), 29], f"expected units counted from 1, the part of a second not counted, got {got}"
    assert all(result.is_listen for result in results[:3]), "expected three units of listening at the start"
    lags = [result.lag_ms for result in results]
    assert sorted(lags[:12]) == lags[:12] and lags[11] > lags[0], f"expected a lag that grows, got {lags}"
    got = [result.backlog_units for result in results]
    assert max(got) > 4 and got[-1] == 0, f"expected chunks that wait to be told, got {got}"
    assert results[-1].is_listen, f"part of a second: expected listening, got {results[-1]!r}"
    assert not all(result.is_listen for result in results), "expected some speech, got none: nothing was tested"


def test_every_kind_of_unit_is_as_promised(alone: Callable[..., list[Result]]) -> None:
    results = alone(TURNS_ALOUD, 8)
    for result in results:
        assert_result(result)
    kinds = {(result.is_listen, result.end_of_turn) for result in results}
    assert {(True, False), (False, False), (False, True)} <= kinds, f"expected turns and listening, got {kinds}"


def test_large_pictures_are_cut(worker: WorkerProcess) -> None:
    large = base64_of(picture_of(0, 1344, 896))
    with Talker(worker) as talker:
        talker.prepare(QUIET)
        given = {"frame_base64_list": [large]}
        got = [talker.unit(0, **given, **more).vision_slices for more in ({}, {"max_slice_nums": 2})]
        got.append(talker.unit(0, frame_base64_list=[large] * 2, max_slice_nums=[1, 2]).vision_slices)
        assert got == [1, 3, 4], f"expected 1 slice, 3, and 1 + 3, got {got}"
        talker.prepare(QUIET, max_slice_nums=2)
        got = [talker.unit(0, **given, **more).vision_slices for more in ({}, {"max_slice_nums": 1})]
        assert got == [3, 1], f"prepared with 2: expected 3 slices, and 1 where a chunk says so, got {got}"


def test_a_later_prepare_starts_anew(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    expected = alone(TURNS_QUIET, 6)
    with Talker(worker) as talker:
        talker.prepare({**QUIET, "seed": 1}, system_prompt="You are somebody else.")
        talker.units(range(3), picture=True)
        talker.send({"type": "pause"})
        talker.expect(Paused)
        talker.prepare(TURNS_QUIET)
        assert_told(talker.units(range(6)), expected, "after another prepare")


def test_nothing_reaches_the_next_session(worker: WorkerProcess) -> None:
    def run(config: dict[str, Any] | None, **fields: Any) -> list[Result]:
        with Talker(worker) as talker:
            talker.prepare(config, **fields)
            results = talker.burst(range(5))
            talker.stop()
        return results

    odd = {
        "force_listen_count": 0,
        "decode_mode": "greedy",
        "generate_audio": False,
        "max_new_speak_tokens_per_chunk": 1,
    }
    assert not run(odd, max_slice_nums=5)[0].is_listen
    results = run(None)
    got = [result.is_listen for result in results[:3]]
    assert got == [True] * 3, f"expected the default of three units of listening, got {got}"
    spoken = [result for result in results if not result.is_listen]
    assert spoken and all(result.audio_data for result in spoken), f"expected the default of speech, got {spoken}"


def test_a_kept_prompt_is_as_good_as_a_fresh_one(worker: WorkerProcess) -> None:
    def run() -> list[Result]:
        with Talker(worker) as talker:
            talker.prepare(QUIET, system_prompt="You like maps.")
            return talker.burst(range(3))

    assert worker.ask("/clear_cache", post={}) == (200, {"success": True, "message": "Cache cleared"})
    status, before = worker.ask("/cache_info")
    fresh = run()
    worker.wait_free(N_SLOTS)
    _, after = worker.ask("/cache_info")
    assert (status, before["status"], before["prompts"], after["prompts"]) == (200, "ok", 0, 1), (
        f"got {before}, {after}"
    )
    assert isinstance(before["note"], str)
    assert_told(run(), fresh, "from a kept prompt")


# --- several sessions -----------------------------------------------------------------------------


def test_sessions_do_not_touch_each_other(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """Two talk, one of them in bursts, while a third one is prepared, says nonsense and is lost."""
    turns, aloud = alone(TURNS_ALOUD, 8), alone(ALOUD, 6, picture=True)
    with Talker(worker, "one") as one, Talker(worker, "two") as two, Talker(worker, "three") as three:
        one.ask_prepare(TURNS_ALOUD)
        two.ask_prepare(ALOUD)
        one.expect(Prepared)
        two.expect(Prepared)
        for number in range(8):
            one.send(chunk(number))
        got = two.units(range(2), picture=True)
        three.ask_prepare({"seed": 1}, system_prompt="A long story. " * 50)
        got += two.units(range(2, 4), picture=True)
        three.expect(Prepared)
        three.send(chunk(sound=np.full(16_000, np.nan, np.float32)))
        three.send("{")
        three.send(chunk(3))
        three.lose(reset=True)
        got += two.units(range(4, 6), picture=True)
        assert_told(got, aloud, "unit by unit", apart=SOUND_APART)
        assert_told([one.expect(Result) for _ in range(8)], turns, "in a burst", apart=SOUND_APART)


def test_who_finds_no_slot_waits(worker: WorkerProcess) -> None:
    """For five seconds; then the handshake is refused."""
    talkers = [Talker(worker, f"s{number}") for number in range(N_SLOTS)]
    try:
        health = worker.health()
        assert (health["worker_status"], health["slots"]["free"]) == ("duplex_active", 0), f"all taken: got {health}"
        begun = time.monotonic()
        Talker(worker, wait=False).lose()
        waiting, refused = Talker(worker, wait=False), Talker(worker, wait=False)
        talkers.pop().stop()
        got = []
        for talker in (waiting, refused):
            try:
                talkers.append(talker.shake_hands())
                got.append(101)
            except Refused as error:
                got.append(error.status)
        waited = time.monotonic() - begun
        assert sorted(got) == [101, 403], f"one slot for two: expected one refused with 403, got {got}"
        assert waited >= 4.5, f"expected about 5 s of waiting, got {waited:.1f} s"
        talkers[-1].prepare(QUIET)
        talkers[-1].unit(0)
    finally:
        for talker in talkers:
            talker.lose()


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("n", [0, 2, 40], ids=["preparing", "in-a-unit", "more-than-is-read"])
def test_a_lost_connection_frees_its_slot(worker: WorkerProcess, reset: bool, n: int) -> None:
    """While it is prepared, in the middle of a unit, and when so much waits that the worker has stopped reading."""
    with Talker(worker) as talker:
        talker.ask_prepare(ALOUD, system_prompt=f"{reset}" * 500)
        for number in range(n):
            talker.send(chunk(number))
        if n:
            talker.expect(Prepared)
            talker.receive()
        talker.lose(reset)
        lost = time.monotonic()
        worker.wait_free(N_SLOTS)
        took = time.monotonic() - lost
    # Within a second and the unit in flight; far less than until a ping goes unanswered, on a busy machine too.
    assert took < 15, f"expected a free slot within a second or so, got one after {took:.1f} s"


def test_many_come_and_go(worker: WorkerProcess) -> None:
    """Some before the handshake is over."""
    for number in range(20):
        with Talker(worker, wait=number % 2 == 0) as talker:
            talker.lose(reset=number % 3 == 0)
    worker.wait_free(N_SLOTS)


def test_who_does_not_read_harms_nobody(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """It is not read from any more; nothing piles up."""
    before = worker.health()["memory"]["resident"]
    with Talker(worker) as deaf, Talker(worker) as neighbour:
        n_taken = deaf.flood('{"type":"resume"}', most=64 * 2**20)
        assert n_taken < 32 * 2**20, f"expected a worker that stops reading, got {n_taken} bytes read"
        neighbour.prepare(TURNS_QUIET)
        assert_told(neighbour.units(range(6)), alone(TURNS_QUIET, 6), "beside a client that does not read")
        grown = worker.health()["memory"]["resident"] - before
        assert grown < 100 * 10**6, f"expected no memory to pile up, got {grown} bytes more"


def test_close_right_behind_stop(worker: WorkerProcess) -> None:
    """As web clients do."""
    with Talker(worker) as talker:
        talker.prepare(QUIET)
        talker.send(chunk())
        talker.send({"type": "stop"})
        talker.close()
        worker.wait_free(N_SLOTS)


# --- pause, stop, timeouts ------------------------------------------------------------------------


def test_pause_and_resume(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """`paused` comes behind all earlier results; chunks right behind `resume` are heard; the rest is as without."""
    expected = alone(TURNS_QUIET, 6)
    with Talker(worker, "p") as talker:
        talker.prepare(TURNS_QUIET)
        for number in range(3):
            talker.send(chunk(number))
        talker.send({"type": "pause"})
        talker.send(chunk(9))
        results = [talker.expect(Result) for _ in range(3)]
        paused = talker.expect(Paused)
        assert paused.timeout == 60, f"expected the setting's 60 s, got {paused}"
        error = talker.expect_error("paused")
        assert error.error == "Worker is paused" == error.message, f"expected what clients look for, got {error}"
        health = worker.health()
        got = health["worker_status"], health["slots"], [one["paused"] for one in health["sessions"]]
        assert got == ("duplex_paused", {"total": 3, "free": 2, "paused": 1}, [True]), f"paused: got {got}"
        with Talker(worker, "q"):
            assert worker.health()["worker_status"] == "duplex_active", "one of two paused: expected duplex_active"
        talker.send({"type": "resume"})
        for number in range(3, 6):
            talker.send(chunk(number))
        talker.expect(Resumed)
        results += [talker.expect(Result) for _ in range(3)]
        assert_told(results, expected, "with a pause")
        talker.send({"type": "stop"})
        talker.expect(Stopped)


def test_a_long_pause_ends_the_session(worker: WorkerProcess) -> None:
    with Talker(worker) as talker:
        talker.prepare(QUIET)
        talker.send({"type": "pause", "timeout": 0.3})
        assert talker.expect(Paused).timeout == 0.3
        timeout = talker.expect(Timeout)
        assert timeout.reason == "Pause timeout (0.3s)", f"expected the reason, got {timeout}"
        code = talker.close_code()
        assert code == 1000, f"expected close code 1000, got {code}"
        health = worker.wait_free(N_SLOTS)
        assert health["worker_status"] == "idle", f"expected idle, got {health['worker_status']}"


def test_chunks_do_not_lengthen_a_pause(worker: WorkerProcess) -> None:
    with Talker(worker) as talker:
        talker.prepare(QUIET)
        talker.send({"type": "pause", "timeout": 1})
        talker.expect(Paused)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            talker.send(chunk())
            message = talker.receive()
            if isinstance(message, Timeout):
                return
            assert message.code == "paused", f"expected errors until the end, got {message!r}"
            time.sleep(0.1)
        raise AssertionError("expected the pause to end, got 30 s of errors")


def test_stop_comes_behind_what_was_sent(worker: WorkerProcess) -> None:
    """And what comes behind `stop` does not keep the end from arriving."""
    with Talker(worker, "bye bye/ä") as talker:
        talker.prepare(QUIET)
        for number in range(3):
            talker.send(chunk(number))
        talker.send({"type": "stop"})
        for number in range(20):
            talker.send(chunk(number))
        got = [talker.expect(Result).current_time for _ in range(3)]
        assert got == [1, 2, 3], f"expected all results first, got {got}"
        assert talker.expect(Stopped).session_id == "bye_bye__", "expected a name of harmless characters"
        code = talker.close_code()
        assert code == 1000, f"expected close code 1000, got {code}"
    with Talker(worker) as talker:  # at once
        talker.prepare(QUIET)
