"""The gateway's FastAPI application: all routes, the middleware and the error handlers.

The routes are defined in `server.routes` and `server.pages`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from server.access.access import Access
from server.access.guard import AccessGuard
from server.admission import Admission
from server.cors import ApiCors
from server.dispatch.dispatcher import Dispatcher
from server.doors.calls.door import CallDoor
from server.doors.calls.live_door import GptLiveCallDoor
from server.doors.calls.processes import PeerProcesses
from server.doors.calls.routes import CallSockets, call_routes, live_call_routes
from server.doors.chat.routes import ChatDoor, completion_routes
from server.doors.conversion.routes import ConversionDoor, conversion_routes
from server.doors.core.chat_turn import ChatTurns
from server.doors.core.picture_urls import PictureUrls
from server.doors.core.transcriber import Transcriber
from server.doors.dialects.choice import DUPLEX_PATH, RealtimeDialects, add_duplex_socket
from server.doors.dialects.minicpm_o.socket import MiniCpmDoor
from server.doors.dialects.vllm_omni.socket import VllmOmniDoor
from server.doors.errors import ApiError, error_response, invalid_request, is_api_path, limit_message
from server.doors.gpt_live.routes import GPT_LIVE_PATH, add_gpt_live_socket
from server.doors.gpt_live.socket import GptLiveDoor
from server.doors.live.door_context import DoorContext, SessionLimits
from server.doors.live.truncation import SlotWindow
from server.doors.model_names import ModelNames
from server.doors.model_routes import model_routes
from server.doors.realtime.routes import REALTIME_PATHS, add_realtime_sockets
from server.doors.realtime.secret_routes import secret_routes
from server.doors.realtime.socket import RealtimeDoor
from server.doors.speech.live_text import LIVE_TEXT_PATH, LiveTextDoor, add_live_text_socket
from server.doors.speech.routes import SpeechDoor, speech_routes
from server.doors.voices import VoiceNames
from server.live.http_chat import HttpChats
from server.live.live_client import OtherGateways
from server.live.live_sessions import LiveSessions
from server.live.moves.move_watch import MoveWatch
from server.live.slot_wait import SlotWait
from server.live.sockets import GatewaySockets
from server.metrics import GatewayMetrics
from server.origins import Origins
from server.pages import add_pages
from server.recording.recordings import Recordings
from server.recording.trace_log import TraceLog
from server.registry.apps import Apps
from server.registry.gateway_state import GatewayState
from server.registry.presets import PresetFolders
from server.registry.voices import VoiceRegistry
from server.request_guard import SAFE_METHODS, RequestGuard
from server.request_ids import HEADER, RequestIds, request_id_of
from server.routes.access import access_routes
from server.routes.apps import app_routes
from server.routes.bodies import Problem
from server.routes.chat import chat_routes
from server.routes.compile_reports import compile_report_routes
from server.routes.models import model_admin_routes
from server.routes.preset_bodies import FrontendDefaults
from server.routes.presets import preset_routes
from server.routes.queue import queue_routes
from server.routes.recordings import recording_routes
from server.routes.sessions import session_routes
from server.routes.sockets import add_sockets, refuse_other_sockets
from server.routes.speech_weights import speech_weights_routes
from server.routes.status import status_routes
from server.routes.voices import voice_routes
from server.security_headers import SecurityHeaders
from server.unknown_page import on_http_error
from worker.config.access import ClientLimits
from worker.version import VERSION

REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "the body cannot be parsed"},
    403: {"model": Problem, "description": "the origin is not allowed"},
    413: {"model": Problem, "description": "the body is too long"},
}


@dataclass(frozen=True)
class Gateway:
    """The objects that the routes use.

    http: client for the workers. peers: processes of calls. client_limits: of each client. moves: of sessions between
    workers. default_voice: sound file for sessions without a voice of their own.
    session_limits: of sessions of the OpenAI API. live_barge_in_ms: speech that silences a GPT-Live reply; 0: none.
    slot_window: context of the workers' slots. picture_urls: fetches pictures from allowed hosts.
    log_folder: of the launcher. others: gateways of a cluster; None: there are none.
    """

    dispatcher: Dispatcher
    access: Access
    live: LiveSessions
    sockets: GatewaySockets
    chats: HttpChats
    http: httpx.AsyncClient
    metrics: GatewayMetrics
    origins: Origins
    frontend: FrontendDefaults
    recordings: Recordings
    traces: TraceLog
    voices: VoiceRegistry
    state: GatewayState
    presets: PresetFolders
    model_names: ModelNames
    voice_names: VoiceNames
    slots: SlotWait
    turns: ChatTurns
    transcriber: Transcriber
    peers: PeerProcesses
    client_limits: ClientLimits
    moves: MoveWatch
    default_voice: Path | None = None
    apps: Apps = field(default_factory=Apps)
    session_limits: SessionLimits = field(default_factory=SessionLimits)
    live_barge_in_ms: int = 0
    slot_window: SlotWindow = field(default_factory=SlotWindow)
    picture_urls: PictureUrls = field(default_factory=PictureUrls)
    log_folder: Path = Path("tmp")
    others: OtherGateways | None = None


def build_app(gateway: Gateway) -> FastAPI:
    """The application with all routes of the gateway."""
    # The interactive documentation of FastAPI loads its scripts from another server, so there is only the schema.
    app = FastAPI(title="Duologue gateway", version=VERSION, docs_url=None, redoc_url=None)
    app.add_middleware(RequestGuard, origins=gateway.origins, count=gateway.access.count)
    app.add_middleware(AccessGuard, access=gateway.access, error_response=_refusal, socket_error=limit_message)
    app.add_middleware(ApiCors, origins=gateway.origins)
    app.add_middleware(RequestIds)  # runs before those above: their refusals have an id too
    app.add_middleware(SecurityHeaders)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(Exception, _on_internal_error)
    apps = gateway.apps
    admission = Admission(gateway.origins, apps)
    for router in (
        access_routes(gateway.access),
        status_routes(gateway.dispatcher, gateway.live, gateway.metrics, gateway.log_folder),
        compile_report_routes(gateway.dispatcher, gateway.http),
        queue_routes(gateway.dispatcher, gateway.state),
        session_routes(gateway.live, gateway.http),
        chat_routes(gateway.chats, admission),
        app_routes(apps, gateway.state),
        preset_routes(gateway.presets, gateway.default_voice, gateway.frontend, apps),
        recording_routes(gateway.recordings, gateway.traces),
        voice_routes(gateway.voices),
        speech_weights_routes(),
        model_admin_routes(gateway.dispatcher, gateway.http, gateway.moves),
    ):
        for route in router.routes:
            assert isinstance(route, APIRoute) and route.methods is not None
            if not route.methods <= SAFE_METHODS:
                route.responses.update(REFUSED)
        app.include_router(router)
    turns, names, voice_names = gateway.turns, gateway.model_names, gateway.voice_names
    app.include_router(model_routes(names, gateway.dispatcher.workers))
    speech = SpeechDoor(turns, names, voice_names, admission)
    app.include_router(speech_routes(speech, gateway.dispatcher.workers))
    add_live_text_socket(app, LiveTextDoor(speech, gateway.client_limits, gateway.access.count))
    app.include_router(conversion_routes(ConversionDoor(turns, names, voice_names, admission)))
    app.include_router(completion_routes(ChatDoor(turns, names, voice_names, admission, gateway.picture_urls)))
    add_sockets(app, gateway.sockets, admission)
    door = DoorContext(
        gateway.slots,
        gateway.recordings,
        admission,
        names,
        voice_names,
        turns,
        gateway.transcriber,
        gateway.access.usage,
        gateway.session_limits,
        gateway.live_barge_in_ms,
        gateway.slot_window,
        gateway.picture_urls,
        gateway.others,
    )
    app.include_router(secret_routes(gateway.access, names, voice_names, gateway.transcriber))
    duplex = VllmOmniDoor(door)
    calls = CallDoor(door, gateway.peers, gateway.access.clients)
    app.include_router(call_routes(calls))
    app.include_router(live_call_routes(GptLiveCallDoor(door, gateway.peers, gateway.access.clients)))
    dialects = RealtimeDialects(RealtimeDoor(door), MiniCpmDoor(door), duplex, CallSockets(calls))
    add_realtime_sockets(app, dialects.serve)
    add_duplex_socket(app, duplex)
    add_gpt_live_socket(app, GptLiveDoor(door))
    refuse_other_sockets(app, *REALTIME_PATHS, GPT_LIVE_PATH, DUPLEX_PATH, LIVE_TEXT_PATH)
    add_pages(app, apps, gateway.recordings.store)
    return app


def _refusal(path: str, status: int, text: str, headers: Mapping[str, str]) -> Response:
    """The response to a request that the access guard refuses."""
    return error_response(path, ApiError(status, text, headers=headers))


async def _on_invalid_request(request: Request, error: Exception) -> Response:
    """A 422 response, or 400 in the OpenAI API, without the invalid input: it may be long or not fit into JSON."""
    assert isinstance(error, RequestValidationError)
    if is_api_path(request.url.path):
        return invalid_request(error).response()
    details = [{"type": one["type"], "loc": one["loc"], "msg": one["msg"]} for one in error.errors()]
    return Response(json.dumps({"detail": details}), 422, media_type="application/json")


async def _on_api_error(connection: HTTPConnection, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(connection.url.path, error)


async def _on_internal_error(request: Request, _: Exception) -> Response:
    """A 500 response without details; uvicorn logs the exception."""
    headers = {HEADER: request_id_of(request.scope)}  # this response does not pass the middleware
    return error_response(request.url.path, ApiError(500, "Internal server error", headers=headers))
