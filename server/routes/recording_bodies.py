"""Bodies of the requests and responses about recordings."""

from typing import Any, Literal

from pydantic import BaseModel

from server.routes.bodies import RequestBody


class RecordingList(BaseModel):
    """Recordings, newest first. total: of all recordings. sessions: the content of `meta.json` of each."""

    total: int
    offset: int
    limit: int
    sessions: list[dict[str, Any]]


class Uploaded(BaseModel):
    status: Literal["ok"] = "ok"
    path: str
    size_bytes: int


class CommentRequest(RequestBody):
    """comment: text; its type is checked by the route, which answers 400."""

    comment: object = None


class CommentSaved(BaseModel):
    """len: characters after surrounding space is removed."""

    status: Literal["ok"] = "ok"
    len: int


class Comment(BaseModel):
    comment: str


class TraceSaved(BaseModel):
    ok: Literal[True] = True
