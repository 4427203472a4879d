"""HTTP responses made while an answer arrives: status and headers wait for its first bytes; its client may leave."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from fastapi import Response
from starlette.types import Receive, Scope, Send

from server.doors.errors import ApiError, error_response
from worker.protocol.connection import STUCK_S

LOG = logging.getLogger(__name__)
EVENT_STREAM = "text/event-stream"
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
NO_CACHE = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class TurnResponse(Response):
    """A response of chunks.

    An error before the first chunk becomes a response of its own. After it the connection is closed without the end
    of the body, so that the client notices; a stream of events reports its errors itself.

    Args:
        chunks: the body. It is closed when the response is complete or the client has gone.
        media_type: of the body.
        headers: further ones.
    """

    def __init__(self, chunks: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str] | None = None):
        self._chunks, self._names = chunks, {"content-type": media_type, **(headers or {})}
        super().__init__(media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(scope, receive, send), name="response")
        leaving = asyncio.create_task(until_disconnected(receive))
        tasks = (sending, leaving)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._chunks.aclose()
        if not sending.cancelled() and (error := sending.exception()) is not None:
            raise error

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._chunks, b"")
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._names.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_body(send, first)
        try:
            async for chunk in self._chunks:
                await _send_body(send, chunk)
        except (ApiError, TimeoutError) as error:
            LOG.warning("an answer ends early: %s", str(error) or "the client does not read it")
            return  # without the last message of the body, the server closes the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, chunk: bytes) -> None:
    async with asyncio.timeout(STUCK_S):
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def until_disconnected(receive: Receive) -> None:
    """Return when the client of a request whose body is read has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def reporting_errors(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """An event stream in which an error after the first event is an event, too."""
    has_begun = False
    try:
        async for event in events:
            has_begun = True
            yield event
    except ApiError as error:
        if not has_begun:
            raise
        yield sse({"error": error.fields()})
    finally:
        await events.aclose()


async def with_pings(events: AsyncGenerator[bytes], every_s: float) -> AsyncGenerator[bytes]:
    """An event stream with a comment wherever nothing else comes for some seconds."""
    coming: asyncio.Task[bytes] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(_next(events))
            await asyncio.wait((coming,), timeout=every_s)
            if not coming.done():
                yield PING
                continue
            event, coming = coming, None
            try:
                chunk = event.result()
            except StopAsyncIteration:
                return
            yield chunk
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


def sse(fields: object) -> bytes:
    """An object as one event of an event stream."""
    return b"data: " + json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
