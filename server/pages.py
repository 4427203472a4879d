"""The pages and their files. Knows `static/` and what browsers must be told about it."""

import mimetypes
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
# The system's table may lack them or have them wrong, and browsers run modules only under the right name.
TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".md": "text/markdown", ".json": "application/json"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' blob: data:; media-src 'self' blob:; "
        "worker-src 'self' blob:; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again at each visit, answered with 304 if it is the same
}
ROUTES = ("/", "/omni", "/audio_duplex")


class _Files(StaticFiles):
    def file_response(self, *args: object, **options: object) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


def add_pages(app: FastAPI) -> None:
    """Everything under /static/, and the page itself."""
    for suffix, kind in TYPES.items():
        mimetypes.add_type(kind, suffix)

    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    for route in ROUTES:
        app.get(route, include_in_schema=False)(page)
    app.mount("/static", _Files(directory=STATIC, check_dir=False), name="static")
