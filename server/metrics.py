"""Every counter and histogram of the gateway, in Prometheus' text format.

What happens is counted when it happens; what merely stands is read when somebody scrapes. Times of units are the
worker's, read off the results that pass through.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from server.dispatch.dispatcher import Dispatcher
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import clean
from worker.status import State

PREFIX = "duologue_gateway"
# Fine around the targets, coarse beyond the deadline of a second.
UNIT_SECONDS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.13, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0)
RELAY_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
WAIT_SECONDS = (0.1, 0.5, 1, 3, 10, 30, 60, 120, 300, 600, 1800)
SESSION_SECONDS = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600)
# Less is late. Negative ones are misses.
HEADROOM_SECONDS = (-2.0, -1.0, -0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
FIRST_SOUND = "first_sound"
OFFLINE = "OFFLINE"  # beside the states that a worker can tell of
CODES = frozenset(ErrorCode)
MOST = 2.0**63  # of a worker's numbers


class GatewayMetrics:
    """One registry; `text` is what /metrics answers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, labels, registry=registry)

        self._units = counter("units_total", "results that were passed on", "request_type", "decision")
        self._unit = histogram("unit_seconds", "from a chunk's turn to its result", UNIT_SECONDS, "decision")
        self._stage = histogram("stage_seconds", "one stage of a unit", UNIT_SECONDS, "stage")
        self._first_sound = histogram("first_sound_seconds", "from a unit's arrival to its first sound", UNIT_SECONDS)
        self._lag = histogram("lag_seconds", "how long a chunk waited for its turn", UNIT_SECONDS)
        self._headroom = histogram("headroom_seconds", "what was left of a unit's second", HEADROOM_SECONDS)
        self._missed = counter("deadline_misses_total", "results more than a second after their chunk")
        self._relay = histogram("relay_seconds", "what passing a message on takes", RELAY_SECONDS, "direction")
        self._wait = histogram("queue_wait_seconds", "from a client's ticket to its slot", WAIT_SECONDS)
        self._session = histogram("session_seconds", "from a slot to its end", SESSION_SECONDS, "request_type")
        self._sessions = counter("sessions_total", "clients that got a slot", "request_type")
        self._ended = counter("sessions_ended_total", "clients that are gone", "how")
        self._errors = counter("errors_total", "errors told to clients", "code")
        self._lost = counter("workers_lost_total", "times that a worker stopped answering", "worker")
        self._open = gauge("open_sessions", "sessions that have a slot", "worker")
        self._slots = gauge("slots", "slots of workers that are ready", "kind")
        self._queue = gauge("queue_length", "tickets that wait")
        self._state = gauge("worker_state", "1 for the state a worker is in", "worker", "state")
        self._compiled = gauge("worker_compiled", "what compiling has done since a worker began", "worker", "what")
        self._late = gauge("worker_compiled_after_warm_up", "since warm-up; not 0 is a fault", "worker", "what")
        self._memory = gauge("worker_memory_bytes", "memory of a worker and of its GPU", "worker", "kind")

    def unit(self, result: Mapping[str, Any], request_type: str) -> None:
        """A result has come. result: its fields, whatever a worker put there."""
        decision = "listen" if result.get("is_listen") else "speak"
        self._units.labels(request_type, decision).inc()
        if (ms := _number(result.get("wall_clock_ms"))) is not None:
            self._unit.labels(decision).observe(ms / 1000)
        if (ms := _number(result.get("lag_ms"))) is not None:
            self._lag.observe(ms / 1000)
        if (ms := _number(result.get("headroom_ms"))) is not None:
            self._headroom.observe(ms / 1000)
            if ms < 0:
                self._missed.inc()
        stages = result.get("stages")
        for stage, value in stages.items() if isinstance(stages, Mapping) else ():
            ms = _number(value)
            if stage == FIRST_SOUND and ms is not None:
                self._first_sound.observe(ms / 1000)
            elif stage in STAGES and ms is not None:
                self._stage.labels(stage).observe(ms / 1000)

    def relayed(self, direction: str, seconds: float) -> None:
        """A message was passed on, `up` to a worker or `down` to a client, and that took so long."""
        self._relay.labels(direction).observe(seconds)

    def error(self, code: str) -> None:
        """A client was told of one."""
        self._errors.labels(code if code in CODES else "other").inc()

    def seated(self, request_type: str, waited_s: float) -> None:
        """A client has got a slot."""
        self._sessions.labels(request_type).inc()
        self._wait.observe(waited_s)

    def ended(self, how: str) -> None:
        """A client is gone."""
        self._ended.labels(how).inc()

    def session(self, request_type: str, seconds: float) -> None:
        """A slot has come back."""
        self._session.labels(request_type).observe(seconds)

    def worker_lost(self, worker: str) -> None:
        """One that answered does not any more."""
        self._lost.labels(worker).inc()

    def text(self, dispatcher: Dispatcher) -> bytes:
        """All of it, with what stands now."""
        for standing in (self._open, self._compiled, self._late, self._memory):
            standing.clear()
        self._queue.set(len(dispatcher.queue))
        self._slots.labels("total").set(dispatcher.workers.n_slots)
        self._slots.labels("free").set(dispatcher.workers.n_free)
        for worker in dispatcher.workers.all:
            self._open.labels(worker.name).set(len(worker.leases))
            now = worker.state if worker.health else OFFLINE
            for state in (*State, OFFLINE):
                self._state.labels(worker.name, str(state)).set(now == state)
            compiling = worker.health.get("compile")
            compiling = compiling if isinstance(compiling, Mapping) else {}
            for gauge, key in ((self._compiled, "counts"), (self._late, "after_warm_up")):
                _set_all(gauge, worker.name, compiling.get(key))
            _set_all(self._memory, worker.name, worker.health.get("memory"))
        return generate_latest(self.registry)


STAGES = frozenset({"wait", "see", "hear", "prefill", "decode", "condition", "speech", "sound"})


def _number(value: object) -> float | None:
    """None: it is no number that a counter can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST:
        return None
    return float(value)


def _set_all(gauge: Gauge, worker: str, values: object) -> None:
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if (number := _number(value)) is not None:
            gauge.labels(worker, clean(str(name))).set(number)
