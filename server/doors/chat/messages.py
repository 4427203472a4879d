"""Messages of a chat completion as messages of the worker's request, one for one: errors name the same places."""

from collections.abc import Callable
from typing import Any

from server.access.shares import run_shared
from server.doors.core.picture_urls import PictureUrlError, PictureUrls
from server.doors.core.request_fields import RequestFields, item_fields
from server.doors.core.turn_response import base64_text
from server.doors.errors import ApiError, invalid
from worker.describe import cut
from worker.protocol.wire import WireError, read_object

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type -> field
DETAILS = ("auto", "low", "high")
PARTS = (*TEXT_PARTS, "image_url", "input_audio", "video_url")
MAX_FETCHED = 16  # pictures of one request
MAX_FETCHED_BYTES = 64 * 2**20  # of all of them
# An id of a spoken answer -> its transcript; None for an unknown one.
FindTranscript = Callable[[str], str | None]


def worker_messages(fields: RequestFields, find_transcript: FindTranscript) -> list[dict[str, Any]]:
    """The messages. Raises: ApiError."""
    given = fields.required("messages")
    if not isinstance(given, list) or not given:
        raise invalid("messages", expected="a list with at least one message", got="none" if given == [] else "no list")
    return [_message(item_fields(one, f"messages[{i}]"), find_transcript) for i, one in enumerate(given)]


def _message(fields: RequestFields, find_transcript: FindTranscript) -> dict[str, Any]:
    role = ROLES[fields.choice("role", ROLES)]
    content = _content(fields)
    if role == "assistant":
        if not content and (audio := fields.group("audio")) is not None:
            content = _earlier_answer(audio, find_transcript)
        if calls := fields.items("tool_calls"):
            named = enumerate(calls)
            return {
                "role": role,
                "content": content,
                "tool_calls": [_call(item_fields(one, f"{fields.name('tool_calls')}[{i}]")) for i, one in named],
            }
    if not content and role not in ("assistant", "tool"):
        raise invalid(fields.name("content"), expected="text or parts", got="nothing")
    return {"role": role, "content": content}


def _content(fields: RequestFields) -> str | list[dict[str, Any]]:
    content = fields.given.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(fields.name("content"), expected="text or a list of parts", got="another value")
    return [_part(item_fields(one, f"{fields.name('content')}[{i}]")) for i, one in enumerate(content)]


def _part(fields: RequestFields) -> dict[str, Any]:
    kind = fields.choice("type", PARTS)
    if kind in TEXT_PARTS:
        return {"type": "text", "text": fields.text(TEXT_PARTS[kind])}
    group = fields.group(kind)
    if group is None:
        fields.required(kind)
        raise AssertionError("expected an error for a part without its content")
    if kind == "input_audio":
        return {"type": "audio", "data": group.text("data")}
    url = group.text("url")
    is_fetched = kind == "image_url" and url[:6].lower() == "https:"  # by `fetch_pictures`
    if url[:5].lower() != "data:" and not is_fetched:
        raise invalid(group.name("url"), expected="a data: URL", got=cut(url))
    return {"type": kind.removesuffix("_url"), "data": url}


async def fetch_pictures(messages: list[dict[str, Any]], picture_urls: PictureUrls) -> None:
    """Put pictures behind addresses of allowed hosts into the messages. Raises: ApiError."""
    parts = (
        (f"messages[{i}].content[{j}].image_url.url", part)
        for i, message in enumerate(messages)
        for j, part in enumerate(message["content"] if isinstance(message["content"], list) else ())
        if part["type"] == "image" and part["data"][:6].lower() == "https:"
    )
    n_bytes = 0
    for n_before, (param, part) in enumerate(parts):
        if not picture_urls.allows(part["data"]):
            raise invalid(param, expected="a data: URL", got=cut(part["data"]))
        if n_before == MAX_FETCHED or n_bytes > MAX_FETCHED_BYTES:
            expected = f"at most {MAX_FETCHED} pictures and {MAX_FETCHED_BYTES} bytes behind addresses"
            raise invalid(param, expected=expected, got="more")
        try:
            data = await picture_urls.fetch(part["data"])
        except PictureUrlError as error:
            raise invalid(param, expected=error.expected, got=error.got) from None
        n_bytes += len(data)
        part["data"] = await run_shared(base64_text, data)


def max_slices(fields: RequestFields) -> int | None:
    """Slices of a picture: 1 if all pictures have the detail `low`; None: as the server cuts them. Raises: ApiError."""
    details: set[str] = set()
    for i, one in enumerate(fields.items("messages")):
        message = item_fields(one, f"messages[{i}]")
        content = message.given.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            picture = item_fields(part, f"{message.name('content')}[{j}]").group("image_url")
            if picture is not None:
                details.add(picture.choice("detail", DETAILS, "auto"))
    return 1 if details == {"low"} else None


def _earlier_answer(audio: RequestFields, find_transcript: FindTranscript) -> str:
    audio_id = audio.text("id")
    transcript = find_transcript(audio_id)
    if transcript is None:
        raise invalid(audio.name("id"), expected="the id of an answer of the last hour", got=cut(audio_id))
    return transcript


def _call(fields: RequestFields) -> dict[str, Any]:
    function = fields.group("function")
    if function is None:
        raise ApiError(400, f"{fields.name('function')}: expected an object, got none", param=fields.name("function"))
    name, arguments = function.text("name"), function.text("arguments", "{}") or "{}"
    try:
        return {"name": name, "arguments": read_object(arguments, function.name("arguments"))}
    except WireError as error:
        raise ApiError(400, str(error), param=function.name("arguments"), code="invalid_value") from None
