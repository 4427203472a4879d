"""A worker's socket: units, concurrent sessions, lost connections, pauses and timeouts, in a real process."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clients.duplex import connect
from tests.e2e.serving import CutProxy
from tests.server.live_gateway import running_gateway
from tests.worker.http.client_scripts import (
    ALOUD,
    QUIET,
    TURNS_ALOUD,
    TURNS_QUIET,
    assert_same_results,
    chunk,
    sound_of,
)
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.scripted_client import HandshakeRefused, ScriptedClient
from tests.worker.http.small_worker import N_SLOTS
from worker.protocol.codec import Message
from worker.protocol.gateway_messages import SessionMoved
from worker.protocol.messages import Paused, Prepared, Result, Resumed, Spec, Stopped, Timeout

SOUND_TOLERANCE = 1e-4  # of concurrent sessions; measured 1e-5 at an amplitude of 0.8


pytestmark = pytest.mark.usefixtures("all_slots_free")


# --- a lost worker ------------------------------------------------------------------------------------


def test_a_session_that_loses_its_worker_goes_on_as_an_undisturbed_one(
    worker: WorkerProcess, alone: Callable[..., list[Result]]
) -> None:
    """Through a gateway, which rebuilds the context in another slot: before, within and after a turn."""
    expected = alone(TURNS_QUIET, 6)
    proxy = CutProxy(worker.port)

    async def story() -> list[Result]:
        results: list[Result] = []
        moves: list[Message] = []
        async with running_gateway(proxy.port) as gateway:
            await gateway.wait_for_slot()
            async with connect(f"ws://127.0.0.1:{gateway.port}", "adx_me") as client:
                await client.prepare(config=TURNS_QUIET, spec=Spec(resume=True))
                for number in range(6):
                    if number in (1, 3, 4):
                        proxy.cut()
                    await client.send_unit(sound_of(number))
                    while len(results) == number:
                        message = await anext(client)
                        (results if isinstance(message, Result) else moves).append(message)
                await client.stop()
        moved = [one.restored for one in moves if isinstance(one, SessionMoved)]
        assert moved == [1, 3, 4] and len(moves) == 6, f"expected all units to be rebuilt, got {moves}"
        return results

    try:
        assert_same_results(asyncio.run(story()), expected, "with three lost workers")
    finally:
        proxy.close()


# --- units ----------------------------------------------------------------------------------------


def test_second_prepare_restarts_the_session(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    expected = alone(TURNS_QUIET, 6)
    with ScriptedClient(worker) as client:
        client.prepare({**QUIET, "seed": 1}, system_prompt="You are another assistant.")
        client.units(range(3), picture=True)
        client.send({"type": "pause"})
        client.expect(Paused)
        client.prepare(TURNS_QUIET)
        assert_same_results(client.units(range(6)), expected, "after another prepare")


def test_prepared_tells_when_to_begin(worker: WorkerProcess) -> None:
    """A session alone begins at once, a second one in another place of the second."""
    with ScriptedClient(worker) as first, ScriptedClient(worker) as second:
        prepared = first.prepare(QUIET, spec={"trace": True})
        assert prepared.start_after_ms == 0
        assert not prepared.spec.trace and "record_traces" in prepared.notes[-1], f"expected a note, got {prepared}"
        delay = second.prepare(QUIET).start_after_ms
        assert delay is not None and 0 <= delay < 1000, f"expected ms within a second, got {delay}"
        first.units(range(1))
        assert second.prepare(QUIET).start_after_ms != delay, "expected the place to follow the first session's units"


def test_settings_do_not_leak_into_next_session(worker: WorkerProcess) -> None:
    def run(config: dict[str, Any] | None, **fields: Any) -> list[Result]:
        with ScriptedClient(worker) as client:
            client.prepare(config, **fields)
            results = client.burst(range(5))
            client.stop()
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


def test_cached_prompt_gives_same_results(worker: WorkerProcess) -> None:
    def run() -> list[Result]:
        with ScriptedClient(worker) as client:
            client.prepare(QUIET, system_prompt="You like maps.")
            return client.burst(range(3))

    assert worker.ask("/clear_cache", post={}) == (200, {"success": True, "message": "Cache cleared"})
    status, before = worker.ask("/cache_info")
    fresh = run()
    worker.wait_free(N_SLOTS)
    _, after = worker.ask("/cache_info")
    assert (status, before["status"], before["prompts"], after["prompts"]) == (200, "ok", 0, 1), (
        f"got {before}, {after}"
    )
    assert isinstance(before["note"], str)
    assert_same_results(run(), fresh, "from a kept prompt")


# --- several sessions -----------------------------------------------------------------------------


def test_concurrent_sessions_are_independent(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """Two sessions run, one in bursts, while a third one is prepared, sends invalid messages and disconnects."""
    turns, aloud = alone(TURNS_ALOUD, 8), alone(ALOUD, 6, picture=True)
    with (
        ScriptedClient(worker, "one") as one,
        ScriptedClient(worker, "two") as two,
        ScriptedClient(worker, "three") as three,
    ):
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
        three.drop(reset=True)
        got += two.units(range(4, 6), picture=True)
        assert_same_results(got, aloud, "unit by unit", tolerance=SOUND_TOLERANCE)
        assert_same_results([one.expect(Result) for _ in range(8)], turns, "in a burst", tolerance=SOUND_TOLERANCE)


def test_waits_for_free_slot_then_refuses(worker: WorkerProcess) -> None:
    """The handshake is refused after five seconds."""
    clients = [ScriptedClient(worker, f"s{number}") for number in range(N_SLOTS)]
    try:
        health = worker.health()
        assert (health["worker_status"], health["slots"]["free"]) == ("duplex_active", 0), f"all taken: got {health}"
        begun = time.monotonic()
        ScriptedClient(worker, wait=False).drop()
        waiting, refused = ScriptedClient(worker, wait=False), ScriptedClient(worker, wait=False)
        clients.pop().stop()
        got = []
        for client in (waiting, refused):
            try:
                clients.append(client.finish_handshake())
                got.append(101)
            except HandshakeRefused as error:
                got.append(error.status)
        waited = time.monotonic() - begun
        assert sorted(got) == [101, 403], f"one slot for two: expected one refused with 403, got {got}"
        assert waited >= 4.5, f"expected about 5 s of waiting, got {waited:.1f} s"
        clients[-1].prepare(QUIET)
        clients[-1].unit(0)
    finally:
        for client in clients:
            client.drop()


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("n", [0, 2, 40], ids=["preparing", "in-a-unit", "more-than-is-read"])
def test_lost_connection_frees_its_slot(worker: WorkerProcess, reset: bool, n: int) -> None:
    """During `prepare`, during a unit, and while the worker has stopped reading."""
    with ScriptedClient(worker) as client:
        client.ask_prepare(ALOUD, system_prompt=f"{reset}" * 500)
        for number in range(n):
            client.send(chunk(number))
        if n:
            client.expect(Prepared)
            client.receive()
        client.drop(reset)
        lost = time.monotonic()
        worker.wait_free(N_SLOTS)
        took = time.monotonic() - lost
    # About a second plus the unit in flight, far below the ping timeout.
    assert took < 15, f"expected a free slot within a second or so, got one after {took:.1f} s"


def test_many_short_connections(worker: WorkerProcess) -> None:
    """Some end during the handshake."""
    for number in range(20):
        with ScriptedClient(worker, wait=number % 2 == 0) as client:
            client.drop(reset=number % 3 == 0)
    worker.wait_free(N_SLOTS)


def test_client_that_does_not_read_affects_no_other(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """The worker stops reading from it; memory stays bounded."""
    expected = alone(TURNS_QUIET, 6)  # before the clients below, since it waits for all slots
    before = worker.health()["memory"]["resident"]
    with ScriptedClient(worker) as blocked, ScriptedClient(worker) as neighbour:
        # Errors that quote the message fill the connection's buffers after few messages.
        n_taken = blocked.flood(json.dumps({"type": "x" * 100}), most=64 * 2**20)
        assert n_taken < 32 * 2**20, f"expected a worker that stops reading, got {n_taken} bytes read"
        neighbour.prepare(TURNS_QUIET)
        assert_same_results(neighbour.units(range(6)), expected, "beside a client that does not read")
        grown = worker.health()["memory"]["resident"] - before
        assert grown < 100 * 10**6, f"expected bounded memory, got {grown} bytes more"


# --- pause, stop, timeouts ------------------------------------------------------------------------


def test_pause_and_resume(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """`paused` follows all earlier results; chunks sent right after `resume` are processed; results are unchanged."""
    expected = alone(TURNS_QUIET, 6)
    with ScriptedClient(worker, "p") as client:
        client.prepare(TURNS_QUIET)
        for number in range(3):
            client.send(chunk(number))
        client.send({"type": "pause"})
        client.send(chunk(9))
        results = [client.expect(Result) for _ in range(3)]
        paused = client.expect(Paused)
        assert paused.timeout == 60, f"expected the setting's 60 s, got {paused}"
        error = client.expect_error("paused")
        assert error.error == "Worker is paused" == error.message, f"expected what clients look for, got {error}"
        health = worker.health()
        got = health["worker_status"], health["slots"], [one["paused"] for one in health["sessions"]]
        assert got == ("duplex_paused", {"total": 3, "free": 2, "paused": 1}, [True]), f"paused: got {got}"
        with ScriptedClient(worker, "q"):
            assert worker.health()["worker_status"] == "duplex_active", "one of two paused: expected duplex_active"
        client.send({"type": "resume"})
        for number in range(3, 6):
            client.send(chunk(number))
        client.expect(Resumed)
        results += [client.expect(Result) for _ in range(3)]
        assert_same_results(results, expected, "with a pause")
        client.send({"type": "stop"})
        client.expect(Stopped)


def test_chunks_do_not_extend_pause(worker: WorkerProcess) -> None:
    with ScriptedClient(worker) as client:
        client.prepare(QUIET)
        client.send({"type": "pause", "timeout": 1})
        client.expect(Paused)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            client.send(chunk())
            message = client.receive()
            if isinstance(message, Timeout):
                return
            assert message.code == "paused", f"expected errors until the end, got {message!r}"
            time.sleep(0.1)
        raise AssertionError("expected the pause to end, got 30 s of errors")


def test_stop_is_answered_after_earlier_chunks(worker: WorkerProcess) -> None:
    """Messages after `stop` do not delay the end."""
    with ScriptedClient(worker, "bye bye/ä") as client:
        client.prepare(QUIET)
        for number in range(3):
            client.send(chunk(number))
        client.send({"type": "stop"})
        for number in range(20):
            client.send(chunk(number))
        got = [client.expect(Result).current_time for _ in range(3)]
        assert got == [1, 2, 3], f"expected all results first, got {got}"
        assert client.expect(Stopped).session_id == "bye_bye__", "expected a name of harmless characters"
        code = client.close_code()
        assert code == 1000, f"expected close code 1000, got {code}"
    with ScriptedClient(worker) as client:  # at once
        client.prepare(QUIET)
