"""The pages and their files. Knows `static/`, what browsers must be told about it, and which apps are switched on."""

import mimetypes
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from server.registry.apps import App, Apps

STATIC = Path(__file__).parent / "static"
# The system's table may lack them or have them wrong, and browsers run modules only under the right name.
TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".md": "text/markdown",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".ico": "image/x-icon",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; connect-src 'self' ws: wss:; img-src 'self' blob: data:; media-src 'self' blob:; "
        "worker-src 'self' blob:; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again at each visit, answered with 304 if it is the same
}
PAGE = "index.html"


class _Files(StaticFiles):
    def file_response(self, *args: object, **options: object) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


def add_pages(app: FastAPI, apps: Apps, folder: Path = STATIC) -> None:
    """Everything under /static/, and the page: at / and at the route of each app that is switched on."""
    for suffix, kind in TYPES.items():
        mimetypes.add_type(kind, suffix)
    files = _Files(directory=folder, check_dir=False)
    files.config_checked = True  # where there is no folder there are no files, which is no fault of the server

    async def page(request: Request) -> Response:
        try:
            return await files.get_response(PAGE, request.scope)
        except HTTPException:
            raise HTTPException(404, f"No page: static/{PAGE} is missing") from None

    def add_app(one: App) -> None:
        async def app_page(request: Request) -> Response:
            if apps.is_enabled(one):
                return await page(request)
            return RedirectResponse("/", 302, headers={"Cache-Control": "no-store"})

        app.get(one.route, include_in_schema=False)(app_page)

    app.get("/", include_in_schema=False)(page)
    for one in apps.all:
        add_app(one)
    app.mount("/static", files, name="static")
