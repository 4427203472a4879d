"""Prometheus metrics of one worker. Torch-free.

Counters and histograms are updated by events; gauges are read from `worker.http.health` on each scrape.
"""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from worker.compile.state import TargetPhase
from worker.early.trial import EarlyEnd, EarlyOutcome
from worker.loop.results import ReplyResult, StageTimes, UnitResult
from worker.protocol.messages import Result
from worker.protocol.takeover.slot_messages import KEPT_FIELD
from worker.status import State

PREFIX = "duologue_worker"
# Histogram buckets: fine around the target latencies, coarse above the deadline.
SECONDS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.13, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0)
STAGES = ("wait", "see", "hear", "prefill", "decode", "condition", "speech", "sound")


class WorkerMetrics:
    """The metrics in a registry of their own; `text` renders them for /metrics.

    Attributes:
        totals: for /health: `requests` (units and replies) answered and the `ms` they took; `speculations`, the units
            run before their second was full, those of them `committed`, and the `wasted_ms` of the others.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.totals = dict.fromkeys(("requests", "ms", "speculations", "committed", "wasted_ms"), 0.0)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, labels, buckets=SECONDS, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, labels, registry=registry)

        self._units = counter("units_total", "units answered", "decision")
        self._replies = counter("replies_total", "turn-based answers", "stopped")
        self._reply = histogram("reply_seconds", "from the end of a user's turn to the end of the answer")
        self._reply_sound = histogram("reply_first_sound_seconds", "from the end of a user's turn to the first sound")
        self._unit = histogram("unit_seconds", "from the start of a unit to its result", "decision")
        self._stage = histogram("stage_seconds", "duration of a stage of a unit", "stage")
        self._first_sound = histogram("first_sound_seconds", "from a unit's arrival to its first sound")
        self._gaps = histogram("playback_gap_seconds", "silence in a turn at a player that has nothing left", "cause")
        self._lag = histogram("lag_seconds", "from a chunk's arrival to the start of its unit")
        self._early = counter("early_units_total", "units that might run before their second was full", "end")
        self._early_seconds = counter("early_seconds_total", "time of the engine thread for such units", "end")
        self._pictures = gauge("early_pictures", "pictures before their unit since the start", "kind")
        self._missed = counter("deadline_misses_total", "units answered more than a second after they arrived")
        self._chats = counter("chats_total", "chat requests that ended", "how")
        self._spoken = counter("spoken_texts_total", "texts of the speech model that ended", "end")
        self._spoken_seconds = counter("spoken_seconds_total", "sound of the speech model")
        self._spoken_first = histogram("spoken_first_sound_seconds", "from a text's arrival to its first sound")
        self._speech_slots = gauge("speech_slots", "slots of the speech model", "kind")
        self._speech_counts = gauge("speech_steps", "frames of the speech model, and sounds after a gap", "what")
        self._conversions = counter("conversions_total", "voice conversions that ended", "end")
        self._converted_seconds = counter("converted_seconds_total", "sound of voice conversions")
        self._conversion_slots = gauge("conversion_slots", "slots of the voice conversion", "kind")
        self._conversion_counts = gauge("conversion_steps", "calls of the voice conversion, and pieces in them", "what")
        self._errors = counter("errors_total", "errors sent to clients", "code")
        self._refused = counter("sessions_refused_total", "connections refused without a slot", "why")
        self._sessions = counter("sessions_total", "sessions that got a slot")
        self._ended = counter("sessions_ended_total", "sessions that ended", "how")
        seconds = "time of the engine thread for such slices since the start"
        self._pictures_seconds = gauge("early_pictures_seconds", seconds)
        self._state = gauge("state", "1 for the current state of the worker", "state")
        self._slots = gauge("slots", "slots by use", "kind")
        self._kept = gauge("kept_sessions", "sessions without a connection that wait for a gateway")
        self._journals = gauge("journal_bytes", "memory of what rebuilds sessions on other workers")
        self._admission = gauge("admission", "sessions that slots hold and that units in time allow", "kind")
        self._slowdown = gauge("admission_slowdown", "time of recent units relative to the warm-up")
        self._p99 = gauge("recent_unit_p99_seconds", "99th percentile of the times of recent units")
        self._context = gauge("context_rows", "context tokens of all slots", "kind")
        self._memory = gauge("memory_bytes", "memory of the process and of the GPU", "kind")
        self._compiled = gauge("compiled", "compiler counters since the process started", "what")
        self._late = gauge("compiled_after_warm_up", "compiler counters since warm-up ended; expected to be 0", "what")
        self._targets = gauge("compile_target", "1 for the current phase of a compile target", "target", "phase")
        self._graphs = gauge("region_graphs", "CUDA graphs of a region", "region")
        self._cache = gauge("compile_cache", "kernel cache hits and misses of the last start", "what")
        self._seconds = gauge("start_seconds", "duration of each stage of the last start", "stage")
        self._weights = gauge("weights_load", "size, time and speed of loading the weights", "what")

    def unit(self, event: UnitResult, message: Result) -> None:
        """Count an answered unit. Sound that waits for the rest of its second counts for early units only."""
        if event.early is not None:
            self._count_early(event.early)
        if event.is_incomplete:
            return
        decision = "listen" if event.is_listen else "speak"
        times = event.times
        self.totals["requests"] += 1
        self.totals["ms"] += message.wall_clock_ms
        self._units.labels(decision).inc()
        self._unit.labels(decision).observe(message.wall_clock_ms / 1000)
        self._lag.observe(message.lag_ms / 1000)
        for stage in STAGES:
            self._stage.labels(stage).observe(getattr(times, stage) / 1000)
        if times.first_sound is not None:
            self._first_sound.observe(times.first_sound / 1000)
        self._count_gaps(times)
        if message.headroom_ms is not None and message.headroom_ms < 0:
            self._missed.inc()

    def _count_gaps(self, times: StageTimes) -> None:
        for gap in times.gaps:
            self._gaps.labels(gap.cause).observe(gap.seconds)

    def _count_early(self, early: EarlyOutcome) -> None:
        self._early.labels(early.end.value).inc()
        self._early_seconds.labels(early.end.value).inc(early.spent_ms / 1000)
        if early.end is not EarlyEnd.SKIPPED:
            is_committed = early.end is EarlyEnd.COMMITTED
            self.totals["speculations"] += 1
            self.totals["committed"] += is_committed
            self.totals["wasted_ms"] += 0.0 if is_committed else early.spent_ms

    def reply(self, event: ReplyResult) -> None:
        """Count a turn-based answer."""
        self.totals["requests"] += 1
        self.totals["ms"] += event.times.total
        self._replies.labels(event.stopped).inc()
        self._count_gaps(event.times)
        self._reply.observe(event.times.total / 1000)
        if event.times.first_sound is not None:
            self._reply_sound.observe(event.times.first_sound / 1000)

    def chat(self, how: str) -> None:
        """Count a chat request. how: `stop`, `length` or `interrupted` with an answer, else `failed`, `cancelled`."""
        self._chats.labels(how).inc()

    def spoken(self, end: str, seconds: float) -> None:
        """Count a text of the speech model. end: as in `CodesEnd`, or `cancelled`. seconds: of its sound."""
        self._spoken.labels(end).inc()
        self._spoken_seconds.inc(seconds)

    def spoke_first(self, seconds: float) -> None:
        """Count the time to the first sound of such a text."""
        self._spoken_first.observe(seconds)

    def converted(self, end: str, seconds: float) -> None:
        """Count a voice conversion. end: `stop`, `failed` or `cancelled`. seconds: of its sound."""
        self._conversions.labels(end).inc()
        self._converted_seconds.inc(seconds)

    def error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def refused(self, why: str) -> None:
        self._refused.labels(why).inc()

    def opened(self) -> None:
        self._sessions.inc()

    def ended(self, how: str) -> None:
        self._ended.labels(how).inc()

    def text(self, health: dict[str, Any]) -> bytes:
        """All metrics as text. health: the body of /health, which the gauges are set from."""
        of_engine = (self._compiled, self._late, self._targets, self._graphs, self._cache, self._seconds, self._weights)
        for gauge in (self._memory, *of_engine):
            gauge.clear()  # labels of an engine that was unloaded
        for state in State:
            self._state.labels(state.value).set(health["state"] == state.value)
        for kind, value in health["slots"].items():
            self._slots.labels(kind).set(value)
        self._kept.set(health[KEPT_FIELD])
        self._journals.set(health["journal_bytes"])
        speech = health["models"]["speech"]
        for kind in ("total", "free"):
            self._speech_slots.labels(kind).set(speech["slots"][kind] if speech else 0)
        for what in ("frames", "late_sounds"):
            self._speech_counts.labels(what).set(speech[what] if speech else 0)
        conversion = health["models"]["conversion"]
        for kind in ("total", "free"):
            self._conversion_slots.labels(kind).set(conversion["slots"][kind] if conversion else 0)
        for what in ("batches", "pieces"):
            self._conversion_counts.labels(what).set(conversion[what] if conversion else 0)
        admission = health["admission"] or {}
        for kind in ("allocated", "capacity", "excess"):
            self._admission.labels(kind).set(admission.get(kind, 0))
        self._slowdown.set(admission.get("slowdown", 1.0))
        self._p99.set((admission.get("p99_ms") or 0.0) / 1000)
        for kind in ("used", "total"):
            self._context.labels(kind).set(health["kv"][kind])
        for kind in ("encoded", "used", "fed"):
            self._pictures.labels(kind).set(health["early_pictures"][kind])
        self._pictures_seconds.set(health["early_pictures"]["spent_ms"] / 1000)
        for kind, value in health["memory"].items():
            self._memory.labels(kind).set(value)
        for what, value in health["compile"]["counts"].items():
            self._compiled.labels(what).set(value)
        for what, value in health["compile"]["after_warm_up"].items():
            self._late.labels(what).set(value)
        for name, target in health["compile"]["targets"].items():
            for phase in TargetPhase:
                self._targets.labels(name, phase.value).set(target["phase"] == phase.value)
        for name, region in health["compile"]["regions"].items():
            self._graphs.labels(name).set(region["n_graphs"])
        for what in ("hits", "misses") if health["compile"]["cache"] else ():
            self._cache.labels(what).set(health["compile"]["cache"][what])
        for stage, seconds in health["start_seconds"].items():
            self._seconds.labels(stage).set(seconds)
        for what, value in (health["model"]["weights"] or {}).items():
            self._weights.labels(what).set(value)
        return generate_latest(self.registry)
