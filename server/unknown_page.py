"""The answer to requests of unknown paths: a small page for browsers, JSON for programs."""

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

PROGRAMS_ONLY = ("/api/", "/static/")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Page not found</title>
</head>
<body>
<main>
<h1>Page not found</h1>
<p>This server has no page at this address. <a href="/">Go to the start page</a></p>
<p lang="zh">此地址没有页面。<a href="/">返回首页</a></p>
</main>
</body>
</html>
"""


async def on_http_error(request: Request, error: Exception) -> Response:
    """The response to an HTTP error: the page for a browser that opens an unknown address, else JSON."""
    assert isinstance(error, HTTPException)
    is_page = request.method == "GET" and not request.url.path.startswith(PROGRAMS_ONLY)
    if error.status_code == 404 and is_page and "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(PAGE, 404, headers={"X-Content-Type-Options": "nosniff"})
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)
