"""`POST /chat`: one request, one answer, in JSON."""

import asyncio
import base64
import io
import wave

import numpy as np
from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from worker.describe import shown
from worker.http.chat_conversation import ChatConversation, mode_of
from worker.http.error_codes import code_of
from worker.http.metrics import WorkerMetrics
from worker.http.socket import WorkerSockets
from worker.protocol.chat_messages import (
    HTTP_NEW_TOKENS,
    RATE_OUT,
    ChatRequest,
    ChatResponse,
    TokenStats,
    VoiceMode,
    read_chat,
)
from worker.protocol.codes import ErrorCode
from worker.protocol.connection import MAX_MESSAGE, bytes_of
from worker.protocol.messages import MAX_ERROR_CHARS
from worker.protocol.session_id import session_id_of
from worker.protocol.wire import Sound, WireError, read_object
from worker.service import Service
from worker.status import StateError

# Errors before the answer begins; any other one is a failure of the answer.
STATUS = {
    ErrorCode.BUSY: 429,
    ErrorCode.DRAINING: 503,
    ErrorCode.ENGINE: 500,
    ErrorCode.INTERNAL: 500,
    ErrorCode.TOO_LARGE: 413,
}
REFUSED = 422


async def answer_chat(request: Request, service: Service, metrics: WorkerMetrics, sockets: WorkerSockets) -> Response:
    """The answer to a chat request; a client that closes its connection ends it.

    Raises: HTTPException 503 for a worker that is not ready, 413 for a body above 128 MiB, 422 for an invalid request,
        429 without a free slot within 5 s.
    """
    if not service.is_ready:
        raise HTTPException(503, f"worker: expected one that is ready, got {service.status.state}")
    try:
        body = await _body(request)
    except ClientDisconnect:
        return Response(status_code=499)  # never sent
    conversation = ChatConversation(service, metrics, session_id_of(request.query_params.get("session_id"), "chat"))
    try:
        given, mode = await asyncio.to_thread(_read, body)
    except WireError as error:
        raise HTTPException(STATUS.get(error.code, REFUSED), str(error)) from None
    del body
    answer = conversation.answer(given, mode=mode, default_new_tokens=HTTP_NEW_TOKENS)
    answering = asyncio.create_task(sockets.run_without_socket(conversation, answer))
    leaving = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)
    return await asyncio.to_thread(_response, conversation)


async def _body(request: Request) -> bytes:
    held, parts, n_bytes = bytes_of(request), [], 0
    try:
        async for part in request.stream():
            n_bytes += len(part)
            if held is not None:
                held.add(len(part))
            if n_bytes > MAX_MESSAGE:
                raise HTTPException(413, f"body: expected at most {MAX_MESSAGE // 2**20} MiB, got more")
            parts.append(part)
        return b"".join(parts)
    finally:
        if held is not None:
            held.add(-n_bytes)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _read(body: bytes) -> tuple[ChatRequest, VoiceMode]:
    """The request, and the kind of its system message. Raises: WireError."""
    request = read_chat({**read_object(body, "body"), "streaming": False})
    if not request.messages:
        raise WireError(ErrorCode.BAD_MESSAGE, "messages", expected="at least one message", got="none")
    if request.tts.output_path is not None:
        expected = "nothing: the server writes no files for clients"
        raise WireError(ErrorCode.BAD_CONFIG, "tts.output_path", expected=expected, got=shown(request.tts.output_path))
    return request, mode_of(request)


def _response(conversation: ChatConversation) -> Response:
    """The answer. Slow for long sound: call on a thread. Raises: HTTPException for a request that got none."""
    return JSONResponse(_answer(conversation).model_dump())


def _answer(conversation: ChatConversation) -> ChatResponse:
    result, error = conversation.result, conversation.error
    duration_ms = round(1000 * conversation.seconds, 1)
    if result is None:
        if error is None:  # the worker shuts down, or the client has gone
            raise HTTPException(503, "the worker is shutting down")
        if not conversation.has_begun:
            code = code_of(error)
            status = 503 if isinstance(error, StateError) else STATUS.get(code, REFUSED)
            raise HTTPException(status, str(error)[:MAX_ERROR_CHARS])
        return ChatResponse(success=False, error=str(error)[:MAX_ERROR_CHARS], duration_ms=duration_ms)
    n_in, n_out = result.n_prompt, len(result.tokens)
    return ChatResponse(
        text=result.text,
        audio_data=None if result.pcm is None else wav_base64(result.pcm),
        tokens_generated=n_out,
        duration_ms=duration_ms,
        prompt=conversation.prompt,
        token_stats=TokenStats(input_tokens=n_in, generated_tokens=n_out, total_tokens=n_in + n_out),
    )


def wav_base64(pcm: np.ndarray) -> str:
    """Base64 of a WAV file, 16 bit. pcm: [n] float32 at 24 kHz."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE_OUT)
        writer.writeframes(Sound(pcm).packed("pcm16"))
    return base64.b64encode(file.getvalue()).decode("ascii")
