"""How long it will take: guesses, what was measured, and estimates that make a calm countdown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.dispatch.dispatcher import Dispatcher
from server.dispatch.eta import KINDS, UNKNOWN_S, Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import WorkerAddress, Workers
from tests.server.dispatch.test_queue import Clock, body
from tests.server.gateways import run, running_gateway

SECONDS = st.floats(0.1, 1000)


def test_guess_until_enough_are_measured() -> None:
    eta = Eta(EtaConfig(eta_omni_duplex_s=90, ema_alpha=0.25, min_samples=3))
    for given_s, expected in ((10, 90), (20, 90), (30, 0.75 * (0.75 * 10 + 0.25 * 20) + 0.25 * 30)):
        eta.record("omni_duplex", given_s)
        got = eta.duration("omni_duplex")
        assert got == pytest.approx(expected), f"expected {expected} after {given_s}, got {got}"
    assert eta.duration("audio_duplex") == 120, "expected other kinds to be untouched"
    assert eta.duration("something") == UNKNOWN_S
    eta.record("omni_duplex", 0)
    assert eta.measured["omni_duplex"].n == 3, "expected nothing to be learnt from no time at all"


def test_waits_are_those_of_a_heap() -> None:
    eta = Eta(EtaConfig(eta_chat_s=15, eta_omni_duplex_s=90))
    waits = eta.waits([40, 20], 0, ["omni_duplex", "chat", "chat", "omni_duplex"])
    assert waits == [20, 40, 55, 70], f"expected [20, 40, 55, 70], got {waits}"
    assert eta.waits([40], 1, ["chat", "chat", "chat"]) == [0, 15, 30]
    assert eta.waits([], 0, ["chat", "chat"]) == [0, 0], "expected 0 without any place"


def test_settings_that_are_not_given_stay() -> None:
    eta = Eta(EtaConfig(eta_chat_s=7, ema_alpha=0.5))
    eta.record("chat", 10)
    eta.adjust(eta_omni_duplex_s=33)
    config = eta.config
    assert (config.eta_chat_s, config.ema_alpha, config.eta_omni_duplex_s) == (7, 0.5, 33), config


def test_settings_over_http() -> None:
    async def story() -> None:
        async with running_gateway(eta_chat_s=7.0) as gateway:
            path = "/api/config/eta"
            for wanted in ({"eta_omni_duplex_s": 33}, {"ema_alpha": 0.5, "unknown": None}, {"ema_alpha": None}, {}):
                answer = await gateway.http.put(path, json=wanted)
                assert answer.status_code == 200, f"{wanted}: expected 200, got {answer.text}"
            assert (await gateway.http.put(path, json={"eta_chat_s": None})).status_code == 422
            assert (await gateway.http.put(path, json={"eta_chat_s": -1})).status_code == 422
            config = (await gateway.get(path))["config"]
            got = [config[key] for key in ("eta_chat_s", "eta_half_duplex_s", "eta_omni_duplex_s", "ema_alpha")]
            assert got == [7, 180, 33, 0.5], f"expected what was given and the rest as it was, got {config}"
            gateway.gateway.dispatcher.eta.record("chat", 10)
            told = await gateway.get(path)
            got = [told[key] for key in ("ema_alpha", "ema_chat_s", "ema_chat_samples", "ema_omni_duplex_s")]
            assert got == [0.5, 10, 1, None], f"expected what was measured, got {told}"

    run(story)


@given(duration=SECONDS, elapsed=st.lists(st.floats(0, 2000), min_size=2))
def test_what_is_left_never_grows(duration: float, elapsed: list[float]) -> None:
    eta = Eta(EtaConfig(eta_omni_duplex_s=duration))
    left = [eta.remaining("omni_duplex", one) for one in sorted(elapsed)]
    assert left == sorted(left, reverse=True), f"expected it to fall, got {left}"
    assert min(left) >= min(15, duration), f"expected a rest of 15 s, got {min(left)}"


@given(
    running=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5),
    queued=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6),
    steps=st.lists(st.floats(0, 100), min_size=1, max_size=8),
)
def test_what_is_told_at_a_place_never_jumps_up(running: list[str], queued: list[str], steps: list[float]) -> None:
    clock = Clock()
    workers = Workers([WorkerAddress("127.0.0.1", 1)], clock, clock)
    workers.answered(workers.all[0], body("IDLE", len(running), len(running)))
    dispatcher = Dispatcher(workers, Queue(10, clock, clock), Eta(EtaConfig()), clock)
    for kind in running:
        assert dispatcher.arrive(kind, "seated").lease is not None
        clock.now += 5
    waiting = [dispatcher.arrive(kind, "waits") for kind in queued]
    before = [dispatcher.place(pending).wait_s for pending in waiting]
    for step in steps:
        clock.now += step
        told = [dispatcher.place(pending).wait_s for pending in waiting]
        assert all(now <= then for now, then in zip(told, before, strict=True)), (
            f"expected at most {before}, got {told}"
        )
        before = told
