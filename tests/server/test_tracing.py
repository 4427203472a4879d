"""Traces of sessions: their spans, in order, and what they hold."""

import asyncio
import logging
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.serve.fake_worker import FakeWorker
from server.tracing import TraceSpan, spans_of
from tests.server.live_gateway import STOP, running_gateway


@dataclass
class RecordedSpan:
    name: str
    parent: TraceSpan | None
    attributes: dict[str, Any] = field(default_factory=dict)
    n_ends: int = 0

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def end(self) -> None:
        self.n_ends += 1


@dataclass
class RecordedSpans:
    spans: list[RecordedSpan] = field(default_factory=list)

    def start(self, name: str, parent: TraceSpan | None) -> TraceSpan:
        self.spans.append(RecordedSpan(name, parent))
        return self.spans[-1]

    def close(self) -> None:
        pass


def test_a_session_is_a_span_with_its_wait_and_its_slot() -> None:
    async def scenario() -> None:
        recorded = RecordedSpans()
        async with FakeWorker() as worker, running_gateway(worker, spans=recorded) as gateway:
            client = await (await gateway.connect("private")).prepared()
            await client.unit()
            await client.send(STOP)
            await client.receive("stopped")
            await gateway.wait_idle()
        session, wait, slot = recorded.spans
        assert [(one.name, one.n_ends) for one in recorded.spans] == [
            ("session", 1),
            ("wait for a slot", 1),
            ("slot", 1),
        ]
        assert session.parent is None and wait.parent is slot.parent is session
        assert session.attributes == {"duologue.request_type": "omni_duplex", "duologue.units": 1}
        assert slot.attributes == {"duologue.worker": "worker_0"} and not wait.attributes

    asyncio.run(scenario())


def test_traces_need_a_collector_and_their_packages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were not installed
    collector = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"}
    assert spans_of({}) is None and spans_of({**collector, "OTEL_SDK_DISABLED": "true"}) is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert spans_of(collector) is None
    assert "no traces: expected the packages opentelemetry-sdk" in caplog.text
