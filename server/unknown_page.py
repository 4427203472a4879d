"""The answer to requests of unknown paths: a small page for browsers, JSON for programs."""

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from server.doors.errors import ApiError, error_response, is_api_path

RECORDING_PAGES = "/s/"
PROGRAMS_ONLY = ("/api/", "/static/")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{en} <a href="/">Go to the start page</a></p>
<p lang="zh">{zh}<a href="/">返回首页</a></p>
</main>
</body>
</html>
"""


UNKNOWN = PAGE.format(title="Page not found", en="This server has no page at this address.", zh="此地址没有页面。")
NO_RECORDING = PAGE.format(
    title="Recording not found",
    en="There is no recording at this address. It may have been deleted.",
    zh="此地址没有录制，可能已被删除。",
)


def accepts_page(request: Request) -> bool:
    """Whether the client is a browser that opens an address, and not a program."""
    return request.method == "GET" and "text/html" in request.headers.get("accept", "")


async def on_http_error(request: Request, error: Exception) -> Response:
    """The response to an HTTP error: the page for a browser that opens an unknown address, else JSON."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if is_api_path(path):
        return error_response(path, ApiError(error.status_code, str(error.detail), headers=error.headers))
    if error.status_code == 404 and accepts_page(request) and not path.startswith(PROGRAMS_ONLY):
        page = NO_RECORDING if path.startswith(RECORDING_PAGES) else UNKNOWN
        return HTMLResponse(page, 404, headers={"X-Content-Type-Options": "nosniff"})
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)
