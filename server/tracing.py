"""OpenTelemetry traces of sessions, if the environment names a collector and the extra `telemetry` is installed.

A session is one span, with a child for the wait and one for the time in a slot. Spans hold no content, ids or keys.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

LOG = logging.getLogger(__name__)
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE = "duologue-gateway"
SESSION, WAIT, SLOT = "session", "wait for a slot", "slot"
PREFIX = "duologue"


class TraceSpan(Protocol):
    """A span of OpenTelemetry."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute."""

    def end(self) -> None:
        """End the span."""


class TraceSpans(Protocol):
    """Where spans begin and are exported."""

    def start(self, name: str, parent: TraceSpan | None) -> TraceSpan:
        """Start a span."""

    def close(self) -> None:
        """Export what has ended. Blocks."""


class SessionTrace:
    """The spans of one session. A session that loses its slot waits again."""

    def __init__(self, spans: TraceSpans, request_type: str):
        self._spans = spans
        self._session = spans.start(SESSION, None)
        self._session.set_attribute(f"{PREFIX}.request_type", request_type)
        self._part: TraceSpan | None = spans.start(WAIT, self._session)

    def got_slot(self, worker: str) -> None:
        """Record that a worker has accepted the session. worker: its name."""
        if self._part is not None:
            self._part.end()
            self._part = self._spans.start(SLOT, self._session)
            self._part.set_attribute(f"{PREFIX}.worker", worker)

    def end(self, n_units: int) -> None:
        """Record the end. A second call does nothing. n_units: results of the session."""
        if self._part is not None:
            self._part.end()
            self._part = None
            self._session.set_attribute(f"{PREFIX}.units", n_units)
            self._session.end()


class _SdkSpans:
    """Spans of the SDK, exported in the background over OTLP as the environment's variables say."""

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("duologue")
        self._in_context: Callable[[Any], Any] = trace.set_span_in_context

    def start(self, name: str, parent: TraceSpan | None) -> TraceSpan:
        context = None if parent is None else self._in_context(parent)
        span: TraceSpan = self._tracer.start_span(name, context)
        return span

    def close(self) -> None:
        self._provider.shutdown()


def spans_of(environ: Mapping[str, str]) -> TraceSpans | None:
    """The exporter of traces; None if the environment names no collector, or the packages are missing."""
    if not any(environ.get(name) for name in VARIABLES) or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        return _SdkSpans()
    except ImportError as error:
        expected = "the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
        LOG.warning("no traces: expected %s (the extra `telemetry`), got none: %s", expected, error.name)
        return None
