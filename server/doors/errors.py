"""Errors in the form of the OpenAI API, and the choice of the error body for a path.

Paths of that API answer `{"error": {"message", "type", "param", "code"}}`; all others answer `{"detail": ...}`.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from worker.describe import cut
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import Error, write
from worker.protocol.wire import clean, json_text

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "rate_limit_error", "server_error"
]
API_PATHS = ("/v1", "/realtime")
TYPES: dict[int, ErrorType] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "overloaded",
}


class ApiErrorFields(BaseModel):
    """The content of `error`."""

    message: str
    type: ErrorType
    param: str | None
    code: str | None


class ApiErrorBody(BaseModel):
    """The body of every response of the OpenAI API with another status than 2xx."""

    error: ApiErrorFields


NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": ApiErrorBody, "description": "the model is unknown"}}


@dataclass(eq=False)
class ApiError(Exception):
    """A refused or failed request.

    Attributes:
        status: HTTP status.
        message: text for people.
        type: class of the error; None: the usual one for the status.
        param: name of the invalid field or parameter.
        code: word for programs; None: the usual one for the status, if there is one.
        headers: additional headers of the response.
    """

    status: int
    message: str
    type: ErrorType | None = None
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    def fields(self) -> dict[str, str | None]:
        """The content of `error` in a body, an event stream or a socket's message."""
        usual: ErrorType = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "message": clean(self.message),
            "type": self.type or TYPES.get(self.status, usual),
            "param": self.param,
            "code": self.code or CODES.get(self.status),
        }

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """The same error, about a field of the request. names: names of a worker's fields -> of the request's."""
        self.param = names.get(self.param or "", self.param)
        return self

    def response(self) -> JSONResponse:
        """The response in the form of the OpenAI API."""
        headers = None if self.headers is None else dict(self.headers)
        return JSONResponse({"error": self.fields()}, self.status, headers=headers)


def invalid(param: str, *, expected: str, got: object, code: str = "invalid_value") -> ApiError:
    """The error of a field with an impossible value."""
    return ApiError(400, f"{param}: expected {expected}, got {got}", param=param, code=code)


def missing(param: str) -> ApiError:
    """The error of a required field that is not given."""
    return ApiError(400, f"{param}: expected a value, got none", param=param, code="missing_required_parameter")


def invalid_request(error: RequestValidationError) -> ApiError:
    """The error of a request that FastAPI refused, without the invalid input."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: expected JSON, got {first['ctx']['error']}", code="invalid_json")
    param = ".".join(cut(str(part)) for part in first["loc"][1:]) or None
    message = f"{param}: {first['msg']}" if param else str(first["msg"])
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, message, param=param, code=code)


def is_api_path(path: str) -> bool:
    """Whether the path belongs to the OpenAI API."""
    return any(path == one or path.startswith(f"{one}/") for one in API_PATHS)


def limit_message(path: str, text: str) -> str:
    """The message to a socket's client that a limit of the access guard ends."""
    if not is_api_path(path):
        return str(write(Error(error=text, code=ErrorCode.LIMIT_REACHED)))
    event = {"type": "error", "event_id": f"event_{secrets.token_hex(10)}"}
    return json_text({**event, "error": ApiError(429, text).fields()})


def error_response(path: str, error: ApiError) -> JSONResponse:
    """The response to a failed request of any path, with the body that clients of the path expect."""
    if is_api_path(path):
        return error.response()
    headers = None if error.headers is None else dict(error.headers)
    return JSONResponse({"detail": clean(error.message)}, error.status, headers=headers)
