"""Refusals of the access guard, and the answers that tell a client about them."""

import math
from collections.abc import Callable, Mapping

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from models.errors import ModelError
from server.access.limit import Limit
from server.access.sign_in_page import SIGN_IN_HEADERS, SIGN_IN_PAGE

# Makes the response of a path's clients from the path, the status, the text and further headers.
ErrorResponse = Callable[[str, int, str, Mapping[str, str]], Response]


class AccessRefusedError(ModelError, PermissionError):
    """A request is refused. status: 401, 403 or 429. retry_after_s: when it may succeed; None: never as it is.

    limit: the limit that the client has reached; None: the refusal has another cause.
    """

    def __init__(
        self,
        status: int,
        what: str,
        *,
        expected: object,
        got: object,
        retry_after_s: float | None = None,
        limit: Limit | None = None,
    ):
        super().__init__(what, expected=expected, got=got)
        self.status, self.retry_after_s, self.limit = status, retry_after_s, limit


def limit_reached(
    limit: Limit, what: str, *, expected: object, got: object, retry_after_s: float
) -> AccessRefusedError:
    """The refusal of a client that has reached a limit."""
    return AccessRefusedError(429, what, expected=expected, got=got, retry_after_s=retry_after_s, limit=limit)


def refusal_response(scope: Scope, error: AccessRefusedError, error_response: ErrorResponse) -> Response:
    """The response to a refused request: the page to sign in for a browser that opens a page, else an error."""
    headers = {"Cache-Control": "no-store"}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    path: str = scope["path"]
    if error.status == 401 and _opens_page(scope):
        return HTMLResponse(SIGN_IN_PAGE, error.status, headers={**headers, **SIGN_IN_HEADERS})
    return error_response(path, error.status, str(error), headers)


def _opens_page(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
        return False
    return "text/html" in HTTPConnection(scope).headers.get("accept", "")
