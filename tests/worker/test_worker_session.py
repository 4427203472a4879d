"""A worker's socket, from outside: a real process, real connections, what clients may count on."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.worker.processes import Refused, Talker, WorkerProcess, running
from tests.worker.sayings import (
    ALOUD,
    QUIET,
    TURNS_ALOUD,
    TURNS_QUIET,
    assert_result,
    assert_told,
    base64_of,
    chunk,
    picture_of,
    samples,
    sound_of,
)
from worker.protocol import Interrupted, Partial, Paused, Prepared, Result, Resumed, Stopped, Timeout
from worker.results import SOUND_RATE
from worker.service_config import ROOT
from worker.voices import ReferenceSound
from worker.wire import pack_frame

N_SLOTS = 3
SOUND_APART = 1e-4  # of two sessions that speak at the same time; measured 1e-5, beside a loudness of 0.8
SMALL = {"duplex": {"euler_steps": 1, "max_backlog_mb": 1}}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    flags = ("--max-sessions", str(N_SLOTS), "--max-warmup-chunks", "2")
    with running(tmp_path_factory.mktemp("worker"), *flags, config=SMALL) as process:
        yield process


@pytest.fixture(autouse=True)
def _all_slots(worker: WorkerProcess) -> Iterator[None]:
    """Every test leaves every slot free."""
    yield
    worker.wait_free(N_SLOTS)


@pytest.fixture(scope="module")
def alone(worker: WorkerProcess) -> Callable[..., list[Result]]:
    """Results of a session that has the worker for itself, computed once."""
    known: dict[str, list[Result]] = {}

    def results(config: dict[str, Any], n: int, **given: Any) -> list[Result]:
        key = repr((config, n, given))
        if key not in known:
            with Talker(worker) as talker:
                talker.prepare(config)
                known[key] = talker.units(range(n), **given)
            worker.wait_free(N_SLOTS)
        return known[key]

    return results


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


# --- steering turns -------------------------------------------------------------------------------


def test_interrupt_ends_a_turn_that_is_open(worker: WorkerProcess) -> None:
    with Talker(worker) as talker:
        talker.prepare(ALOUD)
        last = talker.units(range(2))[-1]
        assert not last.is_listen and not last.end_of_turn, f"expected a turn that goes on, got {last!r}"
        talker.send({"type": "interrupt"})
        talker.expect(Interrupted)
        cut = talker.unit(2)
        assert (cut.is_listen, cut.end_of_turn) == (True, True), f"expected the turn to end in silence, got {cut!r}"
        assert_result(cut)
        later = talker.units(range(3, 5))
        assert all(not result.is_listen for result in later), f"expected a new turn, got {later}"
        assert later[0].n_tts_tokens > 0, f"expected the new turn to be heard, got {later[0]!r}"


def test_interrupt_stops_the_unit_that_runs(worker: WorkerProcess) -> None:
    """It does not wait for its turn behind chunks that were sent before; its answer does."""
    with Talker(worker) as talker:
        talker.prepare(ALOUD)
        talker.unit(0)
        for number in range(1, 6):
            talker.send(chunk(number))
        talker.send({"type": "interrupt"})
        results = [talker.expect(Result) for _ in range(5)]
        talker.expect(Interrupted)
        got = [result.end_of_turn for result in results]
        assert sum(got) == 1 and not got[-1], f"expected one of the first units to end the turn, got {got}"
        for result in results:
            assert_result(result)


def test_interrupt_while_listening_changes_nothing(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """Neither between units nor behind one that runs: the next turn is not its business."""
    config = {**QUIET, "force_listen_count": 3}
    expected = alone(config, 6)
    assert [result.is_listen for result in expected] == [True] * 3 + [False] * 3, "expected listening, then speech"
    with Talker(worker) as talker:
        talker.prepare(config)
        talker.send({"type": "interrupt"})
        talker.expect(Interrupted)
        results = talker.units(range(2))
        talker.send(chunk(2))
        talker.send({"type": "interrupt"})
        results.append(talker.expect(Result))
        talker.expect(Interrupted)
        talker.send({"type": "interrupt"})
        talker.expect(Interrupted)
        results += talker.units(range(3, 6))
        assert_told(results, expected, "with interrupts while listening")


def test_force_listen_ends_a_turn(worker: WorkerProcess) -> None:
    with Talker(worker) as talker:
        talker.prepare(ALOUD)
        talker.units(range(2))
        forced = talker.unit(2, force_listen=True)
        assert (forced.is_listen, forced.end_of_turn) == (True, True), f"expected the turn to end, got {forced!r}"
        forced = talker.unit(3, force_listen=True)
        assert (forced.is_listen, forced.end_of_turn) == (True, False), f"expected listening, got {forced!r}"
        assert not talker.unit(4).is_listen, "expected a new turn"


# --- options --------------------------------------------------------------------------------------


def test_partial_results_make_up_the_unit(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    expected = alone(TURNS_ALOUD, 8)
    with Talker(worker) as talker:
        prepared = talker.prepare(TURNS_ALOUD, spec={"partial_results": True})
        assert prepared.spec.partial_results and not expected[0].n_parts
        most = 0
        for number, whole in enumerate(expected):
            talker.send(chunk(number))
            parts, message = [], talker.receive()
            while isinstance(message, Partial):
                parts.append(message)
                message = talker.receive()
            assert isinstance(message, Result), f"expected the result, got {message!r}"
            got = [(part.part, part.current_time) for part in parts]
            wanted = [(part, whole.current_time) for part in range(1, len(parts) + 1)]
            assert got == wanted and message.n_parts == len(parts), f"expected {wanted}, got {got}, {message!r}"
            for name in ("text", "is_listen", "end_of_turn", "kv_cache_length", "n_tts_tokens"):
                assert getattr(message, name) == getattr(whole, name), f"unit {number}: expected the same {name}"
            if parts:
                assert "".join(part.text for part in parts) == whole.text, f"unit {number}: expected {whole.text!r}"
                assert message.audio_data is None, "expected sound in the parts alone"
            sounds = [sound for sound in map(samples, parts or [message]) if sound is not None]
            sound, plain = np.concatenate([np.zeros(0, np.float32), *sounds]), samples(whole)
            n_filled = 0 if plain is None else len(plain) - len(sound)
            # Without parts a short second is filled up with silence in front.
            filled = None if plain is None else np.concatenate((np.zeros(n_filled, np.float32), sound))
            assert (plain is None and not len(sound)) or np.array_equal(plain, filled), f"unit {number}: other sound"
            most = max(most, sum(part.audio_data is not None for part in parts))
        assert most >= 2, f"expected sound in several parts, got {most}"


def frame(number: int, form: str, **fields: Any) -> bytes:
    """An `audio_chunk` with its picture as a binary frame."""
    sound = sound_of(number)
    data = sound.astype("<f4") if form == "float32" else np.rint(sound * 32768).clip(-32768, 32767).astype("<i2")
    return pack_frame({"type": "audio_chunk", **fields}, data.tobytes(), [picture_of(number)])


@pytest.mark.parametrize("form", ["float32", "pcm16"])
def test_binary_frames(worker: WorkerProcess, alone: Callable[..., list[Result]], form: str) -> None:
    """In both directions; base64 stays welcome. With float32 every sample is the same."""
    n = 4
    expected = alone(ALOUD, 6, picture=True)[:n]
    with Talker(worker) as talker:
        talker.prepare(ALOUD, spec={"sound_in": form, "sound_out": form})
        results = []
        for number in range(n):
            talker.send(frame(number, form) if number != 1 else chunk(number, picture=True))
            opcode, data = talker.receive_frame()
            assert opcode.name == "BINARY", f"expected a binary frame, got {opcode.name}"
            results.append(talker.read(opcode, data))
            size = {"float32": 4, "pcm16": 2}[form] * SOUND_RATE
            assert len(data) >= size and len(data) < size + 2000, f"expected a second of {form}, got {len(data)} bytes"
    if form == "float32":
        assert_told(results, expected, form)
    else:
        got, wanted = ([(one.is_listen, one.text) for one in all_of] for all_of in (results, expected))
        assert got == wanted, f"expected the same decisions as from base64, {wanted}, got {got}"
        heard, meant = samples(results[0]), samples(expected[0])
        assert np.abs(heard - meant).max() < 0.02, f"expected the same sound, off by {np.abs(heard - meant).max()}"


def test_who_is_behind_may_catch_up(worker: WorkerProcess) -> None:
    """It listens until it has. One result per chunk all the same, each behind the one before."""
    with Talker(worker) as talker:
        talker.prepare({**QUIET, "force_listen_count": 1}, spec={"backlog": "catch_up"})
        # The first one takes its time, so that the others are there when it is answered.
        large = {"frame_base64_list": [base64_of(picture_of(0, 1344, 1344))] * 2, "max_slice_nums": 9}
        for message in [chunk(0, **large), *(chunk(number) for number in range(1, 12))]:
            talker.send(message)
        talker.send(chunk(sound=np.zeros(0, np.float32), audio_base64="!"))
        talker.send(chunk(12))
        results = [talker.expect(Result) for _ in range(12)]
        talker.expect_error("bad_base64")
        results.append(talker.expect(Result))
        got = [result.current_time for result in results]
        assert got == list(range(1, 14)), f"expected units in order, got {got}"
        got = [result.is_listen for result in results]
        assert all(got[1:4]) and not got[12], f"expected listening until nothing waits, got {got}"
        for result in results:
            assert_result(result, voiced=False)


def test_other_names_and_unknown_fields(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """What other clients call things; what nobody knows is passed over, and told where it is a setting."""
    expected = alone(TURNS_QUIET, 4, picture=True)
    with Talker(worker) as talker:
        config = {**TURNS_QUIET, "max_kv_tokens": 8000, "window": {"color": "red"}}
        prepared = talker.prepare(config, prefix_system_prompt="You are a helpful assistant.", mood="good")
        notes = " ".join(prepared.notes)
        assert "max_kv_tokens" in notes and "window.color" in notes, f"expected notes on both, got {prepared.notes}"
        results = []
        for number in range(4):
            talker.send({"type": "video_frame", "frame": base64_of(picture_of(number)), "id": 1})
            talker.send({"type": "client_diagnostic", "event": "gap", "ms": 12.5})
            talker.send({"type": "audio_chunk", "audio": base64_of(sound_of(number)), "seq": number})
            results.append(talker.expect(Result))
        assert_told(results, expected, "by other names")
        content = [{"type": "text", "text": "You are kind."}, {"type": "audio", "data": base64_of(sound_of(0))}]
        talker.prepare(QUIET, system_content=content)
        given = {"type": "audio_chunk", "audio": base64_of(sound_of(0)), "video_frames": [base64_of(picture_of(0))]}
        talker.send(given)
        assert talker.expect(Result).vision_slices == 1


def test_named_voices(worker: WorkerProcess) -> None:
    """A voice of the server's folder goes by its name, with any path in front, and wins over one that is sent."""

    def run(**fields: Any) -> list[Result]:
        with Talker(worker) as talker:
            talker.prepare(ALOUD, **fields)
            return talker.units(range(2))

    high = base64_of(ReferenceSound.read(ROOT / "assets" / "ref_audio" / "high.wav").heard())
    sent = run(ref_audio_base64=high)
    assert_told(run(ref_audio_path="some/where/high.wav", ref_audio_base64=base64_of(sound_of(0))), sent, "by its name")
    spoken = run(tts_ref_audio_base64=high)
    assert spoken[0].kv_cache_length == run()[0].kv_cache_length, "expected the default voice to be heard"
    default = samples(run()[0])
    assert not np.array_equal(samples(spoken[0]), default) and default.any(), "expected another voice to speak"


# --- HTTP -----------------------------------------------------------------------------------------


def counted(worker: WorkerProcess) -> dict[str, float]:
    """All samples of /metrics, by name and labels."""
    status, text = worker.ask("/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "le")
            found[f"{sample.name.removeprefix('duologue_worker_')}{{{labels}}}"] = sample.value
    return found


def test_health_answers_while_units_run(worker: WorkerProcess) -> None:
    idle = worker.health()
    got = idle["worker_status"], idle["state"], idle["slots"], idle["kv"]["used"], idle["sessions"]
    assert got == ("idle", "IDLE", {"total": 3, "free": 3, "paused": 0}, 0, []), f"idle: got {got}"
    assert (idle["status"], idle["model_loaded"]) == ("healthy", True)
    with Talker(worker, "busy") as talker, Talker(worker, "busy") as other:
        other.prepare(QUIET)
        other.unit(0)
        talker.prepare(ALOUD)
        for number in range(4):
            talker.send(chunk(number))
        slowest, bodies = 0.0, []
        for _ in range(10):
            begun = time.monotonic()
            bodies.append(worker.health())
            slowest = max(slowest, time.monotonic() - begun)
            time.sleep(0.02)
        results = [talker.expect(Result) for _ in range(4)]
        assert slowest < 5, f"expected an answer at once, if the machine is not busy, got one after {slowest:.2f} s"
        for body in bodies:
            got = body["worker_status"], body["state"], body["slots"]["free"], body["current_session_id"]
            assert got == ("duplex_active", "BUSY", 1, "busy"), f"busy: got {got}"
        body = worker.health()
        rows = [one["kv_rows"] for one in body["sessions"]]
        assert body["kv_cache_length"] == max(rows) >= results[-1].kv_cache_length, (
            f"got {body['sessions']}, {results[-1]}"
        )
        assert body["kv"]["used"] == sum(rows) and min(rows) > 0, f"two of one name: expected both counted, got {body}"
        assert sorted(one["units"] for one in body["sessions"]) == [1, 4], f"got {body['sessions']}"


def test_live_and_ready(worker: WorkerProcess) -> None:
    assert worker.ask("/livez") == (200, {"alive": True, "error": None})
    assert worker.ask("/readyz") == (200, {"ready": True, "state": "IDLE", "free_slots": 3})
    assert worker.ask("/nothing")[0] == 404


def test_metrics_count_what_happens(worker: WorkerProcess) -> None:
    before = counted(worker)
    with Talker(worker) as talker:
        talker.prepare({**QUIET, "force_listen_count": 1})
        talker.units(range(3))
        talker.send("nonsense")
        talker.expect_error("bad_json")
        running_now = counted(worker)
        talker.stop()
    worker.wait_free(N_SLOTS)
    after = counted(worker)

    def moved(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    expected = {
        "units_total{decision=listen}": 1,
        "units_total{decision=speak}": 2,
        "unit_seconds_count{decision=speak}": 2,
        "stage_seconds_count{stage=prefill}": 3,
        "lag_seconds_count{}": 3,
        "errors_total{code=bad_json}": 1,
        "sessions_total{}": 1,
        "sessions_ended_total{how=stopped}": 1,
    }
    got = {name: moved(name) for name in expected}
    assert got == expected, f"expected {expected}, got {got}"
    names = ("slots{kind=free}", "state{state=BUSY}", "state{state=IDLE}", "context_rows{kind=total}")
    got = [running_now[name] for name in names]
    assert got[:3] == [2, 1, 0] and got[3] > 0 < running_now["context_rows{kind=used}"], f"while it runs: got {got}"
    assert after["context_rows{kind=used}"] == 0, "expected no rows behind the last session"
    assert after["memory_bytes{kind=resident}"] > 10**8
