"""The route of chats over HTTP: checks, and the gateway's fields of the response."""

import asyncio
import math
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from models.errors import SettingsError
from server.access.identity import identity_of
from server.admission import Admission
from server.dispatch.placement import needs_of
from server.doors.core.turn_response import until_disconnected
from server.live.closes import SessionEnd
from server.live.http_chat import ForwardedAnswer, HttpChats
from server.live.inbox import ClientDisconnected
from server.live.worker_link import WorkerLostError
from server.routes.bodies import ChatAnswerBody, Problem
from worker.protocol.chat_messages import read_chat
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import WireError, json_text, read_object

LONG_BODY = 2**20  # bytes; longer bodies are parsed on a thread
JSON = "application/json"
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"model": ChatAnswerBody, "description": "the answer, or `success: false` if it failed"},
    422: {"model": Problem, "description": "the request is invalid"},
    429: {"model": Problem, "description": "a limit of the client is reached"},
    502: {"model": Problem, "description": "the worker was lost"},
    503: {"model": Problem, "description": "the queue is full, or the request was cancelled"},
}
MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string", "minLength": 1}},
}
SCHEMA = {
    "type": "object",
    "required": ["messages"],
    "properties": {"messages": {"type": "array", "minItems": 1, "items": MESSAGE}},
}
BODY = {"required": True, "content": {JSON: {"schema": SCHEMA}}}


def chat_routes(chats: HttpChats, admission: Admission) -> APIRouter:
    router = APIRouter()

    @router.post("/api/chat", responses=RESPONSES, openapi_extra={"requestBody": BODY}, response_class=Response)
    async def chat(request: Request) -> Response:
        if (refusal := admission.refusal(request, "chat")) is not None:
            raise HTTPException(403, refusal)
        body = await request.body()
        try:
            if len(body) > LONG_BODY:
                await asyncio.to_thread(check, body)
            else:
                check(body)
            needs, identity = needs_of(request.query_params), identity_of(request)
            answer = await chats.ask(body, lambda: until_disconnected(request.receive), identity, needs)
        except (WireError, SettingsError) as error:
            raise HTTPException(422, str(error)) from None
        except SessionEnd as end:
            message = end.close.error
            status = 429 if message is not None and message.code == ErrorCode.LIMIT_REACHED else 503
            retry_s = end.close.retry_after_s
            headers = None if retry_s is None else {"Retry-After": str(max(1, math.ceil(retry_s)))}
            detail = end.close.reason if message is None else message.error
            raise HTTPException(status, detail, headers) from None
        except WorkerLostError as error:
            raise HTTPException(502, f"The worker was lost: {error}") from None
        except ClientDisconnected:
            return Response(status_code=499)  # never sent
        return Response(with_waits(answer), answer.status, media_type=JSON)

    return router


def check(body: bytes) -> None:
    """Check a request. Raises: WireError bad_json, bad_message."""
    if not read_chat(read_object(body, "body")).messages:
        raise WireError(ErrorCode.BAD_MESSAGE, "messages", expected="at least one message with content", got="none")


def with_waits(answer: ForwardedAnswer) -> bytes:
    """The body of a worker's response; with the waiting times, if it is an answer."""
    body = answer.body.rstrip()
    if answer.status != 200 or not body.endswith(b"}"):
        return answer.body
    waits = {
        "queue_wait_ms": round(1000 * answer.waited_s),
        "estimated_queue_wait_s": round(answer.estimated_s, 1),
    }
    comma = b"" if body[:-1].rstrip().endswith(b"{") else b","
    return body[:-1] + comma + json_text(waits)[1:].encode()
