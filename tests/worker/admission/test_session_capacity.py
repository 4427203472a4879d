"""How many sessions are admitted: a simulated engine under more sessions than it serves has no late unit."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.admission.session_capacity import MIN_UNITS, TARGET_S, TRUSTED_UNITS, SessionCapacity, quantile
from worker.admission.unit_cost import Burst, UnitCost, measured_cost
from worker.loop.results import UnitLoad

N_SLOTS = 24


@dataclass
class Simulation:
    """An engine whose jobs share it equally, and sessions that send a unit every second from their admission on.

    cost: time of n units at once. slow: factor of all times, by clock reading. ends: when open sessions end.
    """

    cost: UnitCost
    slow: Callable[[float], float]
    now: float = 0.0
    open: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    n_opened: int = 0

    def run(self, capacity: SessionCapacity, until: float, phases: list[float], *, n_waiting: int) -> None:
        """Offer sessions, each as soon as one more is admitted, and serve them. phases: delays of their first units."""
        arrivals: list[tuple[float, int]] = []
        active: dict[int, list[float]] = {}  # session -> remaining work, start, job seconds
        for session in self.open:
            heapq.heappush(arrivals, (self.now + phases[session % len(phases)], session))
        while self.now < until:
            while n_waiting and len(self.open) < capacity.capacity:
                n_waiting -= 1
                self.open.append(self.n_opened)
                heapq.heappush(arrivals, (self.now + phases[self.n_opened % len(phases)], self.n_opened))
                self.n_opened += 1
            each_s = self.slow(self.now) * self.cost.seconds(max(len(active), 1))
            ends = self.now + min((left for left, *_ in active.values()), default=1e9) * each_s
            after = min(ends, arrivals[0][0] if arrivals else until, until)
            for job in active.values():
                job[0] -= (after - self.now) / each_s
                job[2] += len(active) * (after - self.now)
            self.now = after
            for session, (left, start, job_s) in list(active.items()):
                if left < 1e-9:
                    del active[session]
                    self.seconds.append(self.now - start)
                    capacity.record(UnitLoad(self.now - start, job_s / (self.now - start)), spoke=True)
            while arrivals and arrivals[0][0] <= self.now and arrivals[0][1] not in active:
                at, session = heapq.heappop(arrivals)
                active[session] = [1.0, at, 0.0]
                heapq.heappush(arrivals, (at + 1, session))
            in_time = not arrivals or arrivals[0][0] > self.now
            assert in_time, f"a unit is not answered within its second at {self.now:.1f} s, {len(self.open)} sessions"


costs = st.builds(UnitCost, st.floats(0.01, 0.3), st.floats(0.02, 0.3))
phase_lists = st.lists(st.floats(0, 0.999), min_size=1, max_size=N_SLOTS)


@settings(max_examples=40, deadline=None)
@given(cost=costs, phases=phase_lists, error=st.floats(0.93, 1.1), slow=st.floats(0.9, 1.03))
def test_twice_the_sessions_leave_no_unit_late(cost: UnitCost, phases: list[float], error: float, slow: float) -> None:
    measured = UnitCost(cost.base_s * error, cost.each_s * error)
    simulation = Simulation(cost, lambda now: slow)
    capacity = SessionCapacity(N_SLOTS, measured, clock=lambda: simulation.now)
    simulation.run(capacity, 20.0, phases, n_waiting=2 * N_SLOTS)
    n_open, most = len(simulation.open), min(cost.most(1.0 / slow), N_SLOTS)
    assert max(simulation.seconds) < 1, f"slowest unit: {max(simulation.seconds)} s with {n_open} sessions"
    least = min(cost.most(0.85 * TARGET_S / slow / error), N_SLOTS)
    assert max(least, 1) <= n_open <= max(most, 1), f"expected {least} to {most} sessions, got {n_open}"


@settings(max_examples=20, deadline=None)
@given(phases=phase_lists, factor=st.floats(1.5, 3.0))
def test_a_slower_machine_admits_fewer_and_recovers(phases: list[float], factor: float) -> None:
    simulation = Simulation(UnitCost(0.05, 0.05), lambda now: factor if 10 <= now < 60 else 1.0)
    capacity = SessionCapacity(N_SLOTS, simulation.cost, clock=lambda: simulation.now)
    simulation.run(capacity, 10.0, phases, n_waiting=8)
    assert len(simulation.open) == 8, f"expected every session to be admitted, got {len(simulation.open)}"
    del simulation.open[4:]
    simulation.run(capacity, 60.0, phases, n_waiting=0)
    expected = simulation.cost.most(TARGET_S / factor)
    assert abs(capacity.capacity - expected) <= 1, f"expected {expected} sessions, got {capacity.capacity}"
    simulation.run(capacity, 400.0, phases, n_waiting=0)
    assert abs(capacity.capacity - simulation.cost.most(TARGET_S)) <= 1, f"got {capacity.capacity}"


def test_a_disturbed_warm_up_is_corrected_by_enough_units() -> None:
    now = [0.0]
    capacity = SessionCapacity(8, UnitCost(0.2, 0.2), clock=lambda: now[0])
    assert capacity.capacity == 3
    for n in range(1, TRUSTED_UNITS + 1):
        now[0] += 1
        capacity.record(UnitLoad(0.2, 1), spoke=True)  # half the time of the warm-up
        assert capacity.capacity == (3 if n < TRUSTED_UNITS else 8), f"after {n} units: {capacity.capacity}"
    now[0] += 1000
    assert capacity.capacity == 3, "old units do not count"


def test_one_disturbed_unit_changes_nothing_and_two_do() -> None:
    capacity = SessionCapacity(4, UnitCost(0.1, 0.1), clock=count().__next__)
    for _ in range(MIN_UNITS):
        capacity.record(UnitLoad(0.2, 1), spoke=False)
    capacity.record(UnitLoad(2.0, 1), spoke=False)
    assert capacity.capacity == 4
    capacity.record(UnitLoad(2.0, 1), spoke=False)
    assert capacity.capacity == 1, "at least one session is admitted"
    report = capacity.report(3)
    assert (report.mode, report.allocated, report.capacity, report.excess) == ("measured", 4, 1, 2)
    assert report.p99_ms == 2000 and report.slowdown == 10


def test_units_that_only_listen_do_not_hide_those_that_speak() -> None:
    capacity = SessionCapacity(8, UnitCost(0.0, 0.1), clock=count(step=0.1).__next__)
    for n in range(600):
        spoke = n < 40
        capacity.record(UnitLoad(0.1 if spoke else 0.02, 1), spoke=spoke)
    assert capacity.slowdown == 1.0, capacity.slowdown


def test_a_fixed_number_is_only_reported() -> None:
    capacity = SessionCapacity(4, None, clock=lambda: 0.0)
    for _ in range(100):
        capacity.record(UnitLoad(5.0, 1), spoke=True)
    report = capacity.report(2)
    assert (report.mode, report.capacity, report.excess, report.p99_ms) == ("fixed", 4, 0, 5000)


@pytest.mark.parametrize(
    ("values", "expected"), [([3.0], 3.0), ([1.0, 9.0], 1.0), (range(100), 98), (range(1000), 989)]
)
def test_quantile_leaves_out_a_single_outlier(values: list[float], expected: float) -> None:
    assert quantile(values) == expected


def test_cost_passes_through_the_burst() -> None:
    cost = UnitCost.fitted(0.1, Burst(4, 0.25, 4))
    assert (cost.seconds(4), cost.seconds(1)) == pytest.approx((0.25, 0.1))
    slow_lone = UnitCost.fitted(0.4, Burst(4, 0.4, 4))  # the lone unit was disturbed
    assert slow_lone.seconds(4) == pytest.approx(0.4) and slow_lone.each_s == pytest.approx(0.025)
    assert UnitCost.fitted(0.1, Burst(2, 0.9, 2)) == UnitCost(0.0, 0.45), "never less than proportional to a burst"
    assert UnitCost(0.1, 0.1).most(0.8) == 7 and UnitCost(0.9, 0.1).most(0.8) == 0


def test_units_that_share_no_call_fit_one_after_the_other() -> None:
    burst = Burst(4, 1.0, 4)
    assert UnitCost.fitted(0.34, burst).most(0.9) == 3
    cost = UnitCost.fitted(0.34, burst, shares_calls=False)
    assert cost.seconds(4) == pytest.approx(1.0) and cost.most(0.9) == 2 and cost.most(0.3) == 0
    assert UnitCost.fitted(0.34, None, shares_calls=False).most(0.9) == 2
    assert SessionCapacity(4, cost).capacity == 2


def test_the_warm_ups_first_units_do_not_count() -> None:
    lone = [(UnitLoad(s, 1), spoke) for s, spoke in ((5.0, False), (0.02, False), (9.0, True), (0.1, True))]
    assert measured_cost(lone, [Burst(2, 3.0, 2), Burst(4, 0.4, 4)]) == UnitCost(0.0, pytest.approx(0.1))
    # Half of the burst listened: it would take 0.4 / 0.6 if all spoke.
    half = measured_cost(lone, [Burst(4, 0.4, 2)])
    assert half is not None and half.seconds(4) == pytest.approx(0.4 / 0.6)
    assert measured_cost([], []) is None
    assert measured_cost([], [Burst(4, 0.4, 0)]) == UnitCost(0.0, pytest.approx(0.1))
    assert measured_cost(lone[:1], []) == UnitCost(0.0, 5.0)
