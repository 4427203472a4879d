"""Routes for the page and its static files, with their content types and security headers."""

import asyncio
import mimetypes
import os
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.staticfiles import PathLike
from starlette.types import Scope

from server.recording.store import NoRecordingError, RecordingStore
from server.registry.apps import App, Apps

STATIC = Path(__file__).parent / "static"
# The system's table may lack these types or contain wrong ones, and browsers run modules only with the right type.
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
    "Cache-Control": "no-cache",  # browsers revalidate at each visit and get 304 for an unchanged file
}
ICON = "icon.svg"
LIVE = "live/live.html"
HOME = "home/home.html"
# App id -> its page. A page that is missing is a 404.
PAGES = {
    "turnbased": "chat/chat.html",
    "half_duplex_audio": "half_duplex/half_duplex.html",
    "omni": LIVE,
    "audio_duplex": LIVE,
}
RECORDINGS_PAGE = "/recordings"
RECORDINGS, VIEWER = "viewer/recordings.html", "viewer/viewer.html"
# Path -> a page that cannot be disabled. Phones get the same pages, whose layouts adapt.
ALWAYS = {"/": HOME, "/admin": "admin/admin.html", "/mobile/": HOME, RECORDINGS_PAGE: RECORDINGS}
MOBILE_LIVE = "/mobile-omni/"  # the live page that fills the screen; it follows the app omni
REDIRECTS = {"/mobile": "/mobile/", "/mobile-omni": MOBILE_LIVE}
OFF_COOKIE = "duologue_off"  # names the disabled app to the page that the visitor is redirected to
OFF_COOKIE_S = 10


class _Files(StaticFiles):
    def file_response(
        self, full_path: PathLike, stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def add_pages(app: FastAPI, apps: Apps, store: RecordingStore, folder: Path = STATIC) -> None:
    """Serve all files under /static/, the pages that cannot be disabled, of recordings, and of each enabled app."""
    for suffix, kind in TYPES.items():
        mimetypes.add_type(kind, suffix)
    files = _Files(directory=folder, check_dir=False)
    files.config_checked = True  # skips the check that the folder exists: without it every file is a 404

    async def page(name: str, request: Request) -> Response:
        try:
            return await files.get_response(name, request.scope)
        except HTTPException:
            raise HTTPException(404, f"No page: static/{name} is missing") from None

    def add_page(path: str, name: str, one: App | None = None) -> None:
        """one: the app that the page belongs to; while it is disabled, the page redirects to the home page."""

        async def show(request: Request) -> Response:
            if one is None or apps.is_enabled(one):
                return await page(name, request)
            redirect = RedirectResponse("/", 302, headers={"Cache-Control": "no-store"})
            redirect.set_cookie(OFF_COOKIE, one.app_id, max_age=OFF_COOKIE_S, samesite="lax")
            return redirect

        app.get(path, include_in_schema=False)(show)

    def add_redirect(path: str, to: str) -> None:
        async def redirect(request: Request) -> Response:
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(to + query, 302, headers={"Cache-Control": "no-store"})

        app.get(path, include_in_schema=False)(redirect)

    async def viewer(session_id: str, request: Request) -> Response:
        try:
            await asyncio.to_thread(store.existing, session_id)
        except NoRecordingError:
            raise HTTPException(404, f"Session not found: {session_id[:200]}") from None
        return await page(VIEWER, request)

    add_page("/favicon.ico", ICON)
    for path, name in ALWAYS.items():
        add_page(path, name)
    for path, to in REDIRECTS.items():
        add_redirect(path, to)
    app.get("/s/{session_id}", include_in_schema=False)(viewer)
    for one in apps.all:
        add_page(one.route, PAGES[one.app_id], one)
        if one.app_id == "omni":
            add_page(MOBILE_LIVE, PAGES[one.app_id], one)
    app.mount("/static", files, name="static")
