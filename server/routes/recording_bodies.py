"""Bodies of the requests and responses about recordings."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from server.routes.bodies import RequestBody


class RecordingList(BaseModel):
    """Recordings, newest first. total: of all recordings. sessions: the content of `meta.json` of each."""

    total: int
    offset: int
    limit: int
    sessions: list[dict[str, Any]]


class Replays(BaseModel):
    """replays: names of the media files that play the whole session. is_complete: whether no more will be made."""

    is_complete: bool
    replays: list[str]


class Uploaded(BaseModel):
    status: Literal["ok"] = "ok"
    path: str
    size_bytes: int


class CommentRequest(RequestBody):
    """comment: text. The route checks its type and length, and answers 400 and 413."""

    model_config = ConfigDict(json_schema_extra={"required": ["comment"]})

    comment: Annotated[object, WithJsonSchema({"type": "string"})] = None


class CommentSaved(BaseModel):
    """len: characters after surrounding space is removed."""

    status: Literal["ok"] = "ok"
    len: int


class Comment(BaseModel):
    comment: str


class TraceSaved(BaseModel):
    ok: Literal[True] = True
