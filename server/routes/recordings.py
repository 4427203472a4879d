"""Routes of recordings: list, content, media, download, upload, comments, deletion.

An id cannot be guessed. A client that knows it can read the recording. With keys, only the key that recorded it and
administrators list, comment, extend and delete it.
"""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.access.identity import identity_of
from server.recording.archive import zip_blocks
from server.recording.files import META, RECORDING
from server.recording.recordings import Recordings
from server.recording.store import MAX_COMMENT_CHARS, AssetPathError, NoRecordingError
from server.recording.trace_log import TraceLog
from server.recording.upload import MAX_UPLOAD_BYTES, UPLOAD_TYPES, UploadError, UploadTooLargeError, receive_upload
from server.request_guard import MAX_UPLOAD_BODY, is_head
from server.routes.bodies import Problem, Success
from server.routes.recording_bodies import (
    Comment,
    CommentRequest,
    CommentSaved,
    RecordingList,
    Replays,
    TraceSaved,
    Uploaded,
)

MAX_PAGE = 200
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "private, no-cache"}
Answers = dict[int | str, dict[str, Any]]
NOT_FOUND: Answers = {404: {"model": Problem, "description": "there is no such recording or file"}}
BAD_PATH: Answers = {400: {"model": Problem, "description": "the path leaves the recording"}}
TOO_LARGE: Answers = {413: {"model": Problem, "description": "the body is too long"}}
BAD_BODY: Answers = {400: {"model": Problem, "description": "the body has another form"}}
JSON_FILE: Answers = {200: {"content": {"application/json": {"schema": {"type": "object"}}}}, **NOT_FOUND}
ZIP: Answers = {200: {"content": {"application/zip": {}}, "description": "the archive"}, **NOT_FOUND}
MEDIA: Answers = {
    200: {"content": {"*/*": {}}, "description": "the file"},
    206: {"content": {"*/*": {}}, "description": "the requested part of the file"},
    416: {"content": {"text/plain": {}}, "description": "the file has no such part"},
    **BAD_PATH,
    **NOT_FOUND,
}
UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "contentMediaType": ", ".join(UPLOAD_TYPES)}},
                }
            }
        },
    }
}


class _File(FileResponse):
    """A file that is not read for HEAD."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__({**scope, "method": "HEAD"} if is_head(scope) else scope, receive, send)


def recording_routes(recordings: Recordings, traces: TraceLog) -> APIRouter:
    router = APIRouter()
    store = recordings.store

    def check_owner(request: Request, session_id: str) -> None:
        """Raises: NoRecordingError for a recording of another key."""
        identity = identity_of(request)
        if identity.has_key and not identity.owns(store.owner(session_id) or ""):
            raise NoRecordingError("session id", expected="a recording of this key", got=session_id)

    @router.get("/api/sessions", responses=NOT_FOUND)
    def listed(
        request: Request,
        offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    ) -> RecordingList:
        if not recordings.is_enabled:
            raise HTTPException(404, "recording.enabled: expected true, got false; sessions are not recorded")
        identity = identity_of(request)
        sees_all = identity.is_admin or not identity.has_key
        page = store.page(offset, limit, None if sees_all else identity.owner)
        return RecordingList(total=page.total, offset=offset, limit=limit, sessions=page.metas)

    @router.get("/api/sessions/{session_id}", response_class=Response, responses=JSON_FILE)
    def meta(session_id: str) -> Response:
        return _json_file(session_id, META)

    @router.get("/api/sessions/{session_id}/recording", response_class=Response, responses=JSON_FILE)
    def recording(session_id: str) -> Response:
        return _json_file(session_id, RECORDING)

    @router.get("/api/sessions/{session_id}/replays", responses=NOT_FOUND)
    def replays(session_id: str) -> Replays:
        try:
            return Replays(is_complete=store.is_complete(session_id), replays=store.replays(session_id))
        except NoRecordingError:
            raise _not_found(session_id) from None

    def _json_file(session_id: str, name: str) -> Response:
        # Sent as bytes: parsing the JSON of a long session would hold the interpreter's lock for too long.
        try:
            file = store.existing(session_id) / name
        except NoRecordingError:
            raise _not_found(session_id) from None
        try:
            data = file.read_bytes()  # at once: the file is replaced while a recording is completed
        except FileNotFoundError:
            raise HTTPException(404, f"Recording not complete: {session_id}") from None
        return Response(data, media_type="application/json", headers=HEADERS)

    @router.get("/api/sessions/{session_id}/assets/{path:path}", response_class=_File, responses=MEDIA)
    def asset(session_id: str, path: str) -> Response:
        try:
            file, kind = store.asset(session_id, path)
        except AssetPathError as error:
            raise HTTPException(400, str(error)) from None
        except NoRecordingError as error:
            raise HTTPException(404, str(error)) from None
        return _File(file, media_type=kind, headers=HEADERS)

    @router.get("/api/sessions/{session_id}/download", response_class=StreamingResponse, responses=ZIP)
    def download(session_id: str, request: Request) -> Response:
        try:
            folder = store.existing(session_id)
        except NoRecordingError:
            raise _not_found(session_id) from None
        headers = {**HEADERS, "Content-Disposition": f'attachment; filename="{session_id}.zip"'}
        if is_head(request.scope):
            return Response(media_type="application/zip", headers=headers)
        return StreamingResponse(zip_blocks(folder), media_type="application/zip", headers=headers)

    @router.post(
        "/api/sessions/{session_id}/upload-recording",
        responses={**BAD_BODY, **NOT_FOUND, **TOO_LARGE},
        openapi_extra=UPLOAD_BODY,
    )
    async def upload(session_id: str, request: Request) -> Uploaded:
        try:
            await asyncio.to_thread(check_owner, request, session_id)
            folder = await asyncio.to_thread(store.existing, session_id)
            length = request.headers.get("content-length", "0")
            if length.isascii() and length.isdigit() and int(length[:20]) > MAX_UPLOAD_BODY:
                raise UploadTooLargeError("file", expected=f"at most {MAX_UPLOAD_BYTES} bytes", got=length[:20])
            path, n_bytes = await receive_upload(folder, request.headers.get("content-type", ""), request.stream())
        except (NoRecordingError, FileNotFoundError):
            raise _not_found(session_id) from None
        except UploadError as error:
            raise HTTPException(400, str(error)) from None
        except UploadTooLargeError as error:
            raise HTTPException(413, str(error)) from None
        except ClientDisconnect:
            raise HTTPException(400, "body: expected all of it, got a part") from None
        return Uploaded(path=path, size_bytes=n_bytes)

    @router.post("/api/sessions/{session_id}/comment", responses={**BAD_BODY, **NOT_FOUND, **TOO_LARGE})
    def set_comment(session_id: str, body: CommentRequest, request: Request) -> CommentSaved:
        if not isinstance(body.comment, str):
            raise HTTPException(400, f"comment: expected text, got {type(body.comment).__name__}")
        comment = body.comment.strip()
        if len(comment) > MAX_COMMENT_CHARS:
            raise HTTPException(413, f"comment: expected at most {MAX_COMMENT_CHARS} characters, got {len(comment)}")
        try:
            check_owner(request, session_id)
            store.set_comment(session_id, comment)
        except (NoRecordingError, FileNotFoundError):
            raise _not_found(session_id) from None
        return CommentSaved(len=len(comment))

    @router.get("/api/sessions/{session_id}/comment", responses=NOT_FOUND)
    def comment(session_id: str) -> Comment:
        try:
            return Comment(comment=store.comment(session_id))
        except NoRecordingError:
            raise _not_found(session_id) from None

    @router.delete("/api/sessions/{session_id}", responses=NOT_FOUND)
    async def delete(session_id: str, request: Request) -> Success:
        try:
            await asyncio.to_thread(check_owner, request, session_id)
            if recordings.discard(session_id) or await asyncio.to_thread(store.delete, session_id):
                return Success(success=True)
        except NoRecordingError:
            pass
        raise _not_found(session_id)

    @router.post("/api/_debug/record_trace")
    def record_trace(trace: dict[str, object]) -> TraceSaved:
        try:
            traces.write(trace)
        except ValueError:
            raise HTTPException(422, "body: expected finite numbers, got an infinite one") from None
        return TraceSaved()

    return router


def _not_found(session_id: str) -> HTTPException:
    return HTTPException(404, f"Session not found: {session_id[:200]}")
