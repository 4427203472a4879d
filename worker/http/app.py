"""The worker's HTTP routes and its WebSocket routes. The service and `worker.http.health` compute the answers."""

import asyncio
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field

from models.errors import ModelError, SettingsError
from worker.config.hub_id import hub_id
from worker.config.service import ROOT
from worker.engine_thread import EngineError
from worker.http.answer_conversation import AnswerConversation
from worker.http.chat_conversation import ChatConversation
from worker.http.chat_route import answer_chat
from worker.http.conversion.conversation import ConversionConversation
from worker.http.duplex_conversation import DuplexConversation
from worker.http.half_duplex_conversation import HalfDuplexConversation
from worker.http.health import health
from worker.http.metrics import WorkerMetrics
from worker.http.socket import WorkerSockets
from worker.http.speech.given_text import SpeechConversation
from worker.http.speech.speech_model import SpeakConversation
from worker.http.streaming_conversation import StreamingConversation
from worker.model_changes import ModelName
from worker.protocol.session_id import session_id_of
from worker.protocol.takeover.slot_messages import KEPT_FIELD, TAKE_QUERY
from worker.service import Service
from worker.status import State, StateError
from worker.version import VERSION


class StopRequest(BaseModel):
    """The body of POST /half_duplex/stop and /streaming/stop. session_id: the only session to stop; null: all."""

    session_id: str | None = None


class KeptSessionRequest(BaseModel):
    """The body of POST /kept_session and /kept_session/end: a gateway may take a session over; nothing needs it.

    token: SHA-256 of the resume token. owner: whose key the client has; an address without a key.
    """

    model_config = ConfigDict(extra="forbid")

    session_id: str
    token: str = Field(pattern="^[0-9a-f]{64}$")
    owner: str


class LoadRequest(BaseModel):
    """The body of POST /model/load: the engine settings to change."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_path: Path | None = None
    token2wav_path: Path | None = None
    pt_path: Path | None = None
    compile: bool | None = None
    speech_path: Path | None = None
    s3gen_path: Path | None = None


class UnloadRequest(BaseModel):
    """The body of POST /model/unload. model: null: all models."""

    model_config = ConfigDict(extra="forbid")

    model: ModelName | None = None


def build_app(service: Service, metrics: WorkerMetrics, sockets: WorkerSockets) -> FastAPI:
    """All routes of one worker."""
    # The interactive documentation of FastAPI loads its scripts from another server, so there is only the schema.
    app = FastAPI(title="Duologue worker", version=VERSION, docs_url=None, redoc_url=None)

    has_secret = service.settings.secret is not None

    def now() -> dict[str, Any]:
        return {
            **health(service, list(sockets.conversations), metrics.totals),
            KEPT_FIELD: sockets.n_kept,
            "journal_bytes": sockets.journal_bytes,
        }

    @app.get("/health")
    async def get_health() -> dict[str, Any]:
        return now()

    @app.get("/livez")
    async def livez() -> Response:
        service.check()
        failed = service.status.state is State.FAILED
        return JSONResponse({"alive": not failed, "error": service.status.now.error}, 503 if failed else 200)

    @app.get("/readyz")
    async def readyz() -> Response:
        service.check()
        body = {"ready": service.is_ready, "state": service.status.state, "free_slots": service.n_free}
        return JSONResponse(body, 200 if service.is_ready else 503)

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(metrics.text(now()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/compile_report")
    async def compile_report() -> Response:
        try:
            return JSONResponse(service.omni.compile_report())
        except StateError as error:
            raise HTTPException(503, str(error)) from None

    @app.get("/cache_info")
    async def cache_info() -> dict[str, Any]:
        cached = 0 if service.loaded is None else service.loaded.n_snapshots
        return {"status": "ok", "note": f"{cached} prepared prompts are kept", "prompts": cached}

    @app.post("/clear_cache")
    async def clear_cache(request: Request) -> dict[str, Any]:
        _refuse_pages(request)
        try:
            await service.omni.forget_snapshots()
        except ModelError as error:
            raise HTTPException(503, str(error)) from None
        return {"success": True, "message": "Cache cleared"}

    @app.post("/kept_session")
    async def kept_session(request: Request, body: KeptSessionRequest) -> dict[str, Any]:
        _refuse_pages(request)
        return {"kept": sockets.keeps(body.session_id, body.token, body.owner)}

    @app.post("/kept_session/end")
    async def end_kept_session(request: Request, body: KeptSessionRequest) -> dict[str, Any]:
        _refuse_pages(request)
        return {"ended": sockets.give_up(body.session_id, body.token, body.owner)}

    @app.post("/half_duplex/stop")
    async def stop_half_duplex(request: Request, body: StopRequest | None = None) -> dict[str, Any]:
        _refuse_pages(request)
        named = None if body is None or body.session_id is None else session_id_of(body.session_id)
        stopped = [
            one.name
            for one in sockets.conversations
            if isinstance(one, HalfDuplexConversation) and named in (None, one.name) and one.interrupt()
        ]
        return {"success": bool(stopped), "message": f"{len(stopped)} answers are stopped", "stopped": stopped}

    @app.post("/streaming/stop")
    async def stop_chats(request: Request, body: StopRequest | None = None) -> dict[str, Any]:
        _refuse_pages(request)
        named = None if body is None or body.session_id is None else session_id_of(body.session_id)
        kinds = (AnswerConversation, StreamingConversation)
        chats = [one for one in sockets.conversations if isinstance(one, kinds) and named in (None, one.name)]
        stopped = [one.name for one in chats if one.stop()]
        return {"success": bool(stopped), "message": f"{len(stopped)} answers are stopped", "stopped": stopped}

    @app.post("/model/unload")
    async def unload(request: Request, body: UnloadRequest | None = None) -> dict[str, Any]:
        _refuse_others(request, has_secret=has_secret)
        try:
            memory = await asyncio.to_thread(service.unload, None if body is None else body.model)
        except StateError as error:
            raise HTTPException(409, str(error)) from None
        except EngineError as error:
            raise HTTPException(503, str(error)) from None
        return {"state": service.status.state, "memory": memory}

    @app.post("/model/load", status_code=202)
    async def load(request: Request, body: LoadRequest) -> dict[str, Any]:
        _refuse_others(request, has_secret=has_secret)
        try:
            given = body.model_dump(exclude_none=True)
            changes = {key: _absolute(one) for key, one in given.items()}
            await asyncio.to_thread(service.load, **changes)
        except StateError as error:
            raise HTTPException(409, str(error)) from None
        except (SettingsError, ModelError) as error:
            raise HTTPException(422, str(error)) from None
        return {"state": service.status.state}

    @app.post("/drain", status_code=202)
    async def drain(request: Request) -> dict[str, Any]:
        _refuse_others(request, has_secret=has_secret)
        service.drain()
        return {"state": service.status.state}

    @app.websocket("/ws/duplex")
    async def ws_duplex(websocket: WebSocket) -> None:
        if websocket.query_params.get(TAKE_QUERY) == "1":
            await sockets.take(websocket)
        else:
            await sockets.serve(websocket, DuplexConversation, keeps=True)

    @app.websocket("/ws/half_duplex")
    async def ws_half_duplex(websocket: WebSocket) -> None:
        await sockets.serve(websocket, HalfDuplexConversation)

    @app.post("/chat")
    async def post_chat(request: Request) -> Response:
        _refuse_pages(request)
        return await answer_chat(request, service, metrics, sockets)

    @app.websocket("/ws/chat")
    async def ws_chat(websocket: WebSocket) -> None:
        await sockets.serve(websocket, ChatConversation, "chat")

    @app.websocket("/ws/speech")
    async def ws_speech(websocket: WebSocket) -> None:
        await sockets.serve(websocket, SpeechConversation, "speech")

    @app.websocket("/ws/conversion")
    async def ws_conversion(websocket: WebSocket) -> None:
        await sockets.serve(websocket, ConversionConversation, "conversion")

    @app.websocket("/ws/speak")
    async def ws_speak(websocket: WebSocket) -> None:
        await sockets.serve(websocket, SpeakConversation, "speak")

    @app.websocket("/ws/streaming")
    async def ws_streaming(websocket: WebSocket) -> None:
        await sockets.serve(websocket, StreamingConversation, "streaming")

    return app


def _absolute(value: object) -> object:
    """A path that starts at the root, unless it is a model id of the hub; other values as they are."""
    return ROOT / value if isinstance(value, Path) and hub_id(value, ROOT) is None else value


def _refuse_pages(request: Request) -> None:
    """Refuse a request from a web page, which any site could send through a visitor's browser.

    Browsers mark such requests with Origin or Sec-Fetch-Site. Raises: HTTPException 403.
    """
    if origin := request.headers.get("origin") or request.headers.get("sec-fetch-site"):
        raise HTTPException(403, f"expected a request from a program, got one from a page ({origin[:100]})")


def _refuse_others(request: Request, *, has_secret: bool) -> None:
    """Refuse a request from a web page, and without a secret one from another machine.

    has_secret: the worker has one; its guard (`worker.http.guard`) has found it in this request.
    Raises: HTTPException 403.
    """
    _refuse_pages(request)
    host = request.client.host if request.client else ""
    if not has_secret and not _is_loopback(host):
        raise HTTPException(403, f"expected a request from this machine, got one from {host}")


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
