"""Estimates of waiting times: configured and measured durations, and countdowns that never jump up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.dispatch.dispatcher import Dispatcher
from server.dispatch.eta import CONFIG_FIELDS, DEFAULT_DURATION_S, Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import WorkerAddress, Workers
from tests.server.dispatch.test_queue import Clock, body
from tests.server.live_gateway import run, running_gateway

SECONDS = st.floats(0.1, 1000)


def test_configured_duration_until_enough_samples() -> None:
    eta = Eta(EtaConfig(eta_omni_duplex_s=90, ema_alpha=0.25, min_samples=3))
    for given_s, expected in ((10, 90), (20, 90), (30, 0.75 * (0.75 * 10 + 0.25 * 20) + 0.25 * 30)):
        eta.record("omni_duplex", given_s)
        got = eta.duration("omni_duplex")
        assert got == pytest.approx(expected), f"expected {expected} after {given_s}, got {got}"
    assert eta.duration("audio_duplex") == 120, "expected other types to be unchanged"
    assert eta.duration("something") == DEFAULT_DURATION_S
    eta.record("omni_duplex", 0)
    assert eta.measured["omni_duplex"].n == 3, "expected a duration of 0 to be ignored"


def test_waits_follow_order_of_freed_slots() -> None:
    eta = Eta(EtaConfig(eta_chat_s=15, eta_omni_duplex_s=90))
    waits = eta.waits([40, 20], 0, ["omni_duplex", "chat", "chat", "omni_duplex"])
    assert waits == [20, 40, 55, 70], f"expected [20, 40, 55, 70], got {waits}"
    assert eta.waits([40], 1, ["chat", "chat", "chat"]) == [0, 15, 30]
    assert eta.waits([], 0, ["chat", "chat"]) == [0, 0], "expected 0 without any slot"


def test_configure_keeps_other_settings() -> None:
    eta = Eta(EtaConfig(eta_chat_s=7, ema_alpha=0.5))
    eta.record("chat", 10)
    eta.configure({"eta_omni_duplex_s": 33})
    config = eta.config
    assert (config.eta_chat_s, config.ema_alpha, config.eta_omni_duplex_s) == (7, 0.5, 33), config


def test_configure_over_http() -> None:
    async def scenario() -> None:
        async with running_gateway(eta_chat_s=7.0) as gateway:
            path = "/api/config/eta"
            for body in ({"eta_omni_duplex_s": 33}, {"ema_alpha": 0.5, "unknown": None}, {"ema_alpha": None}, {}):
                answer = await gateway.http.put(path, json=body)
                assert answer.status_code == 200, f"{body}: expected 200, got {answer.text}"
            assert (await gateway.http.put(path, json={"eta_chat_s": None})).status_code == 422
            assert (await gateway.http.put(path, json={"eta_chat_s": -1})).status_code == 422
            config = (await gateway.get(path))["config"]
            got = [config[key] for key in ("eta_chat_s", "eta_half_duplex_s", "eta_omni_duplex_s", "ema_alpha")]
            assert got == [7, 180, 33, 0.5], f"expected the changes and the other values as before, got {config}"
            gateway.gateway.dispatcher.eta.record("chat", 10)
            status = await gateway.get(path)
            got = [status[key] for key in ("ema_alpha", "ema_chat_s", "ema_chat_samples", "ema_omni_duplex_s")]
            assert got == [0.5, 10, 1, None], f"expected the measured duration, got {status}"

    run(scenario)


@given(duration=SECONDS, elapsed=st.lists(st.floats(0, 2000), min_size=2))
def test_remaining_time_never_grows(duration: float, elapsed: list[float]) -> None:
    eta = Eta(EtaConfig(eta_omni_duplex_s=duration))
    left = [eta.remaining("omni_duplex", one) for one in sorted(elapsed)]
    assert left == sorted(left, reverse=True), f"expected it to fall, got {left}"
    assert min(left) >= min(15, duration), f"expected at least 15 s, got {min(left)}"


@given(
    running=st.lists(st.sampled_from(sorted(CONFIG_FIELDS)), min_size=1, max_size=5),
    queued=st.lists(st.sampled_from(sorted(CONFIG_FIELDS)), min_size=1, max_size=6),
    steps=st.lists(st.floats(0, 100), min_size=1, max_size=8),
)
def test_estimate_at_fixed_position_never_grows(running: list[str], queued: list[str], steps: list[float]) -> None:
    clock = Clock()
    workers = Workers([WorkerAddress("127.0.0.1", 1)], clock, clock)
    workers.record_health(workers.all[0], body("IDLE", len(running), len(running)))
    dispatcher = Dispatcher(workers, Queue(10, clock, clock), Eta(EtaConfig()), clock)
    for kind in running:
        assert dispatcher.submit(kind, "active").lease is not None
        clock.now += 5
    waiting = [dispatcher.submit(kind, "waits") for kind in queued]
    before = [dispatcher.position_of(pending).wait_s for pending in waiting]
    for step in steps:
        clock.now += step
        waits = [dispatcher.position_of(pending).wait_s for pending in waiting]
        assert all(now <= then for now, then in zip(waits, before, strict=True)), (
            f"expected at most {before}, got {waits}"
        )
        before = waits
