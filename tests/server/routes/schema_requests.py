"""Requests generated from the schema of the HTTP API, whose responses must match the schema.

All requests, including those that change state, go to one gateway with one active and two waiting sessions.
`test_schema.py` runs this file.
"""

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import allow_header_conformance, positive_data_acceptance
from starlette.types import ASGIApp, Receive, Scope, Send

from server.app import build_app
from server.doors.calls.routes import CALLS_PATH, LIVE_PATH, SDP
from server.registry.presets import FOLDER
from server.routes.voices import PATH
from tests.server.routes.asgi_gateway import IDLE, gateway_of
from worker.config.service import default_config


@schemathesis.serializer(SDP)
def offer(_: schemathesis.SerializationContext, value: object) -> bytes:
    return str(value).encode()


def from_loopback(app: FastAPI) -> ASGIApp:
    """The application with requests from this machine: those from other addresses may not change settings."""

    async def local(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "client": ("127.0.0.1", 50_000)}, receive, send)

    return local


def application() -> FastAPI:
    config = default_config()
    service = config.service.model_copy(
        update={"max_queue_size": 2, "allowed_hosts": ("testserver",)}
    )  # chats are refused instead of left waiting
    config = config.model_copy(update={"service": service})
    gateway = gateway_of(2, config=config, preset_folder=FOLDER, default_lang="en")
    dispatcher = gateway.dispatcher
    dispatcher.workers.record_health(dispatcher.workers.all[0], {**IDLE, "slots": {"total": 1, "free": 1}})
    for name in ("omni_active", "omni_waits", "adx_waits"):
        dispatcher.submit("audio_duplex" if name.startswith("adx_") else "omni_duplex", name)
    assert len(dispatcher.workers.leases) == 1 and len(dispatcher.queue) == 2
    return build_app(gateway)


# A schema describes neither the sound file in a text nor the paths inside a recording nor the names of voices, nor an
# offer of WebRTC.
TURNS = {"/api/chat", "/v1/audio/conversions", "/v1/audio/speech", "/v1/chat/completions", CALLS_PATH, LIVE_PATH}
UNDESCRIBED = {
    PATH,
    "/api/sessions/{session_id}/assets/{path}",
    "/v1/audio/conversions",
    "/v1/audio/speech",
    "/v1/chat/completions",
    CALLS_PATH,
    LIVE_PATH,
}
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", from_loopback(application()))


@SCHEMA.parametrize()
@settings(max_examples=10, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_responses_match_schema(case: schemathesis.Case) -> None:
    # For a path with several routes, Starlette lists only the methods of the first one in Allow.
    excluded = [allow_header_conformance]
    if case.operation.path in TURNS:
        excluded.append(not_a_server_error)  # the queue is full: 503
    if case.operation.path in UNDESCRIBED:
        excluded.append(positive_data_acceptance)
    case.call_and_validate(excluded_checks=excluded)
