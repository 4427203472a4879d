"""Counters, histograms and gauges of the gateway, in Prometheus' text format.

Events are counted when they happen; gauges are set when the metrics are scraped. The times of units are measured by the
worker and taken from the results that pass through the gateway.
"""

from collections.abc import Callable, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from server.access.limit import Limit
from server.dispatch.dispatcher import Dispatcher
from server.dispatch.workers import OTHER_MODELS
from worker.protocol.codes import ErrorCode
from worker.protocol.live_http import TransportLimit
from worker.protocol.wire import clean
from worker.status import State

PREFIX = "duologue_gateway"
# Narrow buckets around the latency targets, wide ones after the deadline of one second.
UNIT_SECONDS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.13, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0)
RELAY_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
WAIT_SECONDS = (0.1, 0.5, 1, 3, 10, 30, 60, 120, 300, 600, 1800)
SESSION_SECONDS = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600)
# Headroom below 0 is a missed deadline.
HEADROOM_SECONDS = (-2.0, -1.0, -0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
# A delay above 0.05 s is a stall: clients notice it.
DELAY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
FIRST_SOUND = "first_sound"
OFFLINE = "OFFLINE"  # state of a worker that does not answer, in addition to `State`
CODES = frozenset(ErrorCode)
MAX_NUMBER = 2.0**63  # a larger number from a worker is ignored


class GatewayMetrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, labels, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, labels, registry=registry)

        # `labels` checks and converts its arguments at each call, so counters of units keep the object that it returns.
        self._units = cache(counter("units_total", "results forwarded to clients", "request_type", "decision").labels)
        self._replies = cache(counter("replies_total", "answers of chats and half-duplex turns", "request_type").labels)
        self._unit = cache(
            histogram(
                "unit_seconds", "from the start of a unit's processing to its result", UNIT_SECONDS, "decision"
            ).labels
        )
        self._stage = cache(histogram("stage_seconds", "duration of one stage of a unit", UNIT_SECONDS, "stage").labels)
        self._first_sound = histogram(
            "first_sound_seconds", "from the arrival of a unit to its first sound", UNIT_SECONDS
        )
        self._lag = histogram("lag_seconds", "time that a chunk waited before its processing started", UNIT_SECONDS)
        self._headroom = histogram(
            "headroom_seconds", "remaining part of a unit's second when its result was ready", HEADROOM_SECONDS
        )
        self._missed = counter("deadline_misses_total", "results with negative headroom")
        self._relay = cache(histogram("relay_seconds", "time to forward a message", RELAY_SECONDS, "direction").labels)
        self._delay = histogram("loop_delay_seconds", "lateness of a due task of the event loop", DELAY_SECONDS)
        self._wait = histogram("queue_wait_seconds", "from a client's ticket to its slot", WAIT_SECONDS)
        self._session = histogram(
            "session_seconds", "time for which a session had a slot", SESSION_SECONDS, "request_type"
        )
        self._sessions = counter("sessions_total", "clients that got a slot", "request_type")
        self._ended = counter("sessions_ended_total", "connections that ended", "how")
        self._resumptions = counter("resumptions_total", "sessions that lost their connection", "outcome")
        self._detached = gauge("detached_sessions", "sessions without a connection, which keep their slot")
        self._kept = gauge("resume_journal_bytes", "memory of messages kept for clients that lose their connection")
        self._moves = histogram("move_seconds", "from a lost worker to another one", WAIT_SECONDS, "outcome")
        self._quarantined = counter("quarantined_units_total", "messages dropped: two workers were lost at them")
        self._journals = gauge("session_journal_bytes", "memory of what rebuilds sessions on other workers")
        self._transcriptions = counter("transcriptions_total", "transcriptions of users' speech that ended", "outcome")
        self._errors = counter("errors_total", "error messages sent to clients", "code")
        self._limits = counter("limits_total", "times that a limit refused, closed or slowed a client", "limit")
        for limit in (*Limit, *TransportLimit):
            self._limits.labels(limit)
        self._lost = counter("workers_lost_total", "number of times a worker became unreachable", "worker")
        self._calls = gauge("open_calls", "WebRTC calls that are not over")
        self._call_processes = counter(
            "call_processes_lost_total", "processes with connections of calls that ended by themselves"
        )
        self._recordings = counter("recordings_total", "recordings that began", "request_type")
        self._recorded = counter("recorded_bytes_total", "bytes written to the timelines of recordings")
        self._unrecorded = counter(
            "unrecorded_messages_total", "messages left out of recordings: the disk was slow or full"
        )
        self._failed_recordings = counter("recording_failures_total", "recordings that stopped early at a disk error")
        self._open = gauge("open_sessions", "sessions with a slot", "worker")
        self._slots = gauge("slots", "slots of ready workers", "kind")
        self._queue = gauge("queue_length", "waiting tickets")
        self._state = gauge("worker_state", "1 for the current state of a worker, 0 for the others", "worker", "state")
        self._compiled = gauge("worker_compiled", "compiler counters since the start of a worker", "worker", "what")
        self._late = gauge(
            "worker_compiled_after_warm_up",
            "compiler counters since the end of warm-up; expected to be 0",
            "worker",
            "what",
        )
        self._memory = gauge(
            "worker_memory_bytes", "memory of a worker process and of its GPU, in bytes", "worker", "kind"
        )

    def record_result(self, result: Mapping[str, object], request_type: str) -> None:
        """Count a result. result: its fields, which are not validated; fields without a usable number are skipped."""
        decision = "listen" if result.get("is_listen") else "speak"
        self._units(request_type, decision).inc()
        if (ms := _number(result.get("wall_clock_ms"))) is not None:
            self._unit(decision).observe(ms / 1000)
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
                self._stage(stage).observe(ms / 1000)

    def record_reply(self, request_type: str) -> None:
        """Count the answer of a chat or of a half-duplex turn."""
        self._replies(request_type).inc()

    def record_transcription(self, outcome: str) -> None:
        """Count a transcription that has ended. outcome: value of the label."""
        self._transcriptions.labels(outcome).inc()

    def record_relay(self, direction: str, seconds: float) -> None:
        """Record the time to forward a message. direction: `up` to a worker or `down` to a client."""
        self._relay(direction).observe(seconds)

    def record_loop_delay(self, seconds: float) -> None:
        """Record how late the event loop ran a task that was due."""
        self._delay.observe(seconds)

    def record_error(self, code: str) -> None:
        """Count an error message sent to a client."""
        self._errors.labels(code if code in CODES else "other").inc()

    def record_limit(self, limit: Limit | TransportLimit) -> None:
        """Count that a client has reached a limit."""
        self._limits.labels(limit).inc()

    def record_session_start(self, request_type: str, waited_s: float) -> None:
        """Count a session that got a slot, after it waited for `waited_s` seconds."""
        self._sessions.labels(request_type).inc()
        self._wait.observe(waited_s)

    def record_connection_end(self, how: str) -> None:
        """Count a closed connection. how: value of the label."""
        self._ended.labels(how).inc()

    def record_resumption(self, outcome: str) -> None:
        """Count an end of the time without a connection, or a refused client. outcome: value of the label."""
        self._resumptions.labels(outcome).inc()

    def record_detached(self, n: int) -> None:
        """Change the number of sessions without a connection. n: 1 or -1."""
        self._detached.inc(n)

    def watch_kept_bytes(self, messages: Callable[[], float], journals: Callable[[], float]) -> None:
        """Show what these functions return as the memory of kept messages and of journals."""
        self._kept.set_function(messages)
        self._journals.set_function(journals)

    def record_move(self, outcome: str, seconds: float) -> None:
        """Record the time without a worker. outcome: value of the label."""
        self._moves.labels(outcome).observe(seconds)

    def record_quarantine(self) -> None:
        """Count a dropped message."""
        self._quarantined.inc()

    def record_session_end(self, request_type: str, seconds: float) -> None:
        """Record for how many seconds a session had its slot."""
        self._session.labels(request_type).observe(seconds)

    def record_worker_lost(self, worker: str) -> None:
        """Count a worker that became unreachable."""
        self._lost.labels(worker).inc()

    def record_call(self, n: int) -> None:
        """Change the number of WebRTC calls that are not over. n: 1 at the begin of one, -1 at its end."""
        self._calls.inc(n)

    def record_call_process_lost(self) -> None:
        """Count a process with connections of calls that ended by itself."""
        self._call_processes.inc()

    def record_recording_start(self, kind: str) -> None:
        """Count a recording that began. kind: its request type, or `streaming`."""
        self._recordings.labels(kind).inc()

    def record_recorded(self, n_bytes: int) -> None:
        """Count bytes written to a recording's timeline."""
        self._recorded.inc(n_bytes)

    def record_unrecorded(self) -> None:
        """Count a message that is left out of its recording."""
        self._unrecorded.inc()

    def record_recording_failure(self) -> None:
        """Count a recording that stopped early at a disk error."""
        self._failed_recordings.inc()

    def render(self, dispatcher: Dispatcher) -> bytes:
        """The metrics as Prometheus text, with gauges set to the current state."""
        for gauge in (self._open, self._state, self._compiled, self._late, self._memory):
            gauge.clear()
        self._queue.set(len(dispatcher.queue))
        self._slots.labels("total").set(dispatcher.workers.n_slots)
        self._slots.labels("free").set(dispatcher.workers.n_free)
        for model in OTHER_MODELS:
            self._slots.labels(f"{model}_total").set(dispatcher.workers.n_slots_of(model))
            self._slots.labels(f"{model}_free").set(dispatcher.workers.n_free_of(model))
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
    """A finite number of limited size as a float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        return None
    return float(value)


def _set_all(gauge: Gauge, worker: str, values: object) -> None:
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if (number := _number(value)) is not None:
            gauge.labels(worker, clean(str(name))).set(number)
