"""Requests made from the schema of the HTTP API: whatever is asked, the answer is one that the schema has.

State-changing ones are among them. All are asked of one gateway, where a client talks and others wait.
"""

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import allow_header_conformance

from server.app import build_app
from server.registry.presets import Presets
from tests.server.routes.http_gateway import IDLE, gateway_of


def application() -> FastAPI:
    gateway = gateway_of(2, presets=Presets.load(), lang="en")
    dispatcher = gateway.dispatcher
    dispatcher.workers.answered(dispatcher.workers.all[0], {**IDLE, "slots": {"total": 1, "free": 1}})
    for name in ("omni_talks", "omni_waits", "adx_waits"):
        dispatcher.arrive("audio_duplex" if name.startswith("adx_") else "omni_duplex", name)
    assert len(dispatcher.workers.leases) == 1 and len(dispatcher.queue) == 2
    return build_app(gateway)


SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", application())


@SCHEMA.parametrize()
@settings(max_examples=15, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_in_the_schema(case: schemathesis.Case) -> None:
    # Where a path has several routes, Starlette allows the methods of the first.
    case.call_and_validate(excluded_checks=[allow_header_conformance])
