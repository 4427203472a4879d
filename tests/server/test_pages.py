"""Static files over HTTP: content types, headers, ranges, revalidation, and no file outside the folder."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from server.origins import Origins
from server.pages import HEADERS, STATIC, add_pages
from server.recording.store import RecordingStore
from server.registry.apps import Apps
from server.request_guard import RequestGuard
from tests.server.routes.asgi_gateway import AsgiClient, OpenIdentity, asgi_client, gateway_of

TYPES = {
    "a.js": "text/javascript",
    "b.mjs": "text/javascript",
    "c.css": "text/css",
    "d.md": "text/markdown",
    "e.json": "application/json",
    "f.svg": "image/svg+xml",
    "g.png": "image/png",
    "h.wasm": "application/wasm",
    "i.html": "text/html",
    "j.webmanifest": "application/manifest+json",
    "k.ico": "image/x-icon",
    "l.jpg": "image/jpeg",
    "m.woff2": "font/woff2",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """static/ with one file of each type, and a file outside it that must not be served."""
    static = tmp_path / "static"
    (static / "inner").mkdir(parents=True)
    for name in TYPES:
        (static / name).write_text("0123456789")
    (static / "inner" / "x.js").write_text("let x;")
    for name in ("live", "home", "admin"):
        (static / name).mkdir()
        (static / name / f"{name}.html").write_text(f"<!doctype html><title>{name}</title>")
    (tmp_path / "secret.txt").write_text("secret")
    (static / "link.txt").symlink_to(tmp_path / "secret.txt")
    return static


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[AsgiClient]:
    app = FastAPI()
    app.add_middleware(RequestGuard, origins=Origins(()), count=lambda _: None)
    app.add_middleware(OpenIdentity)
    add_pages(app, Apps(), RecordingStore(folder / "none"), folder)
    async with asgi_client(app) as http:
        yield http


def test_serves_types_and_headers(folder: Path) -> None:
    async def scenario() -> None:
        async with serving(folder) as http:
            for name, kind in TYPES.items():
                answer = await http.request("GET", f"/static/{name}")
                got = answer.headers["content-type"].split(";")[0]
                assert got == kind, f"{name}: expected {kind}, got {got}"
                assert HEADERS.items() <= {key: answer.headers.get(key) for key in HEADERS}.items(), answer.headers
            await http.request("GET", "/static/inner/x.js")

    asyncio.run(scenario())


def test_head_ranges_and_revalidation(folder: Path) -> None:
    async def scenario() -> None:
        async with serving(folder) as http:
            for path in ("/static/a.js", "/"):
                whole = await http.request("GET", path)
                head = await http.request("HEAD", path)
                assert head.content == b"" and head.headers["content-length"] == str(len(whole.content)), path
                again = await http.request("GET", path, 304, headers={"If-None-Match": whole.headers["etag"]})
                assert again.content == b"" and again.headers["cache-control"] == "no-cache", again.headers
                since = {"If-Modified-Since": whole.headers["last-modified"]}
                await http.request("HEAD", path, 304, headers=since)
            part = await http.request("GET", "/static/a.js", 206, headers={"Range": "bytes=2-4"})
            assert part.text == "234" and part.headers["content-range"] == "bytes 2-4/10", part.headers
            await http.request("GET", "/static/a.js", 416, headers={"Range": "bytes=50-60"})
            (folder / "a.js").write_text("changed")
            etag = {"If-None-Match": (await http.request("GET", "/static/b.mjs")).headers["etag"]}
            assert (await http.request("GET", "/static/a.js", headers=etag)).text == "changed"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "path",
    [
        "/static/../secret.txt",
        "/static/%2e%2e/secret.txt",
        "/static/..%2fsecret.txt",
        "/static/inner/../../secret.txt",
        "/static/inner/%2e%2e/%2e%2e/secret.txt",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/link.txt",
        "/static/..%5csecret.txt",
        "/static/a.js%00",
        "/static/%00",
        "/static/%ff",
        f"/static/{'a' * 5000}",
        f"/static/{'a/' * 3000}",
        "/static/inner",
        "/static/inner/",
        "/static/",
        "/static/a.js/b",
        "/static/none.js",
    ],
    ids=lambda path: path[:40],
)
def test_serves_no_file_outside_folder(folder: Path, path: str) -> None:
    async def scenario() -> None:
        async with serving(folder) as http:
            url = httpx.URL("http://localhost").copy_with(raw_path=path.encode())
            answer = await http.raw.request("GET", url)
            got = (answer.status_code, answer.text[:100])
            assert answer.status_code == 404 and answer.json().keys() == {"detail"}, f"expected 404, got {got}"

    asyncio.run(scenario())


def test_refuses_other_methods(folder: Path) -> None:
    async def scenario() -> None:
        async with serving(folder) as http:
            for path in ("/", "/omni", "/static/a.js"):
                await http.request("POST", path, 405)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_there", [True, False])
def test_missing_page_is_404(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "static"
    if is_there:
        folder.mkdir()

    async def scenario() -> None:
        async with serving(folder) as http:
            for path, name in (("/", "home"), ("/admin", "admin"), ("/omni", "live"), ("/audio_duplex", "live")):
                answer = await http.request("GET", path, 404)
                assert answer.json() == {"detail": f"No page: static/{name}/{name}.html is missing"}, answer.text
            await http.request("GET", "/static/a.js", 404)

    asyncio.run(scenario())


def test_phones_get_the_same_pages(folder: Path) -> None:
    """/mobile/ is the home page, /mobile-omni/ the live page; both without the slash redirect, with their query."""

    async def scenario() -> None:
        async with serving(folder) as http:
            for path, name in (("/mobile/", "home"), ("/mobile-omni/", "live")):
                assert f"<title>{name}</title>" in (await http.request("GET", path)).text
                answer = await http.request("GET", f"{path.rstrip('/')}?lang=zh", 302)
                assert answer.headers["location"] == f"{path}?lang=zh", answer.headers

    asyncio.run(scenario())


def test_mobile_live_page_follows_its_app(folder: Path) -> None:
    apps = Apps()
    apps.set_enabled("omni", False)
    app = FastAPI()
    app.add_middleware(RequestGuard, origins=Origins(()), count=lambda _: None)
    app.add_middleware(OpenIdentity)
    add_pages(app, apps, RecordingStore(folder / "none"), folder)

    async def scenario() -> None:
        async with asgi_client(app) as http:
            answer = await http.request("GET", "/mobile-omni/", 302)
            assert answer.headers["location"] == "/" and "duologue_off=omni" in answer.headers["set-cookie"]
            for path in ("/", "/admin", "/mobile/", "/audio_duplex"):
                await http.request("GET", path)

    asyncio.run(scenario())


def test_serves_all_files_of_the_page() -> None:
    kinds = {Path(name).suffix: kind for name, kind in TYPES.items()}

    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            files = [file for file in sorted(STATIC.rglob("*")) if file.is_file()]
            assert len(files) > 10
            for file in files:
                answer = await http.request("GET", f"/static/{file.relative_to(STATIC).as_posix()}")
                assert file.suffix in kinds, f"{file.name}: expected a suffix with a known type"
                assert answer.headers["content-type"].split(";")[0] == kinds[file.suffix], file.name
                assert answer.content == file.read_bytes(), file.name
            for path in ("/", "/admin", "/mobile/", "/mobile-omni/", "/omni", "/audio_duplex"):
                page = await http.request("GET", path)
                assert page.headers["content-type"].startswith("text/html"), page.headers
                assert HEADERS.items() <= {key: page.headers.get(key) for key in HEADERS}.items()

    asyncio.run(scenario())


def test_unknown_address_is_a_page_for_browsers_and_json_for_programs() -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}

    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            for path in ("/nothing", "/omni/x", "/docs", "/redoc"):
                answer = await http.request("GET", path, 404, headers=browser)
                assert answer.headers["content-type"].startswith("text/html"), f"{path}: got {answer.headers}"
                assert 'href="/"' in answer.text and "http" not in answer.text, answer.text
                assert (await http.request("GET", path, 404)).json() == {"detail": "Not Found"}
            for method, path in (("GET", "/api/nothing"), ("GET", "/static/nothing.js"), ("POST", "/nothing")):
                answer = await http.request(method, path, 404, headers=browser)
                assert answer.json().keys() == {"detail"}, f"{method} {path}: got {answer.text}"

    asyncio.run(scenario())


def test_icon_is_served_where_browsers_look_for_it() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of()) as http:
            answer = await http.request("GET", "/favicon.ico")
            assert answer.headers["content-type"] == "image/svg+xml" and "<svg" in answer.text

    asyncio.run(scenario())
