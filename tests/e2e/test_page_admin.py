"""The page for administration, the home page and the pages of phones in Chromium, with a gateway and a fake worker."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from websockets.sync.client import ClientConnection, connect

from tests.e2e.browser import press_start
from tests.e2e.serving import ServerProcess, gateway_with_fake_worker

pytestmark = pytest.mark.programs

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
PHONE = {"width": 320, "height": 640}
WIDTH = "[document.documentElement.scrollWidth, innerWidth]"
# The next request for the durations waits for `release`, which returns once the page has shown its answer.
HOLD_DURATIONS = """() => {
    const fetchNow = window.fetch;
    window.fetch = (url, ...rest) => {
        if (!String(url).includes("/api/config/eta")) return fetchNow(url, ...rest);
        window.fetch = fetchNow;
        return new Promise((resolve) => {
            window.release = async () => {
                resolve(await fetchNow(url, ...rest));
                await new Promise((later) => setTimeout(later, 50));
            };
        });
    };
}"""
VOICE = Path(__file__).parents[2] / "assets" / "ref_audio" / "default.wav"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with gateway_with_fake_worker(tmp_path_factory.mktemp("gateway"), "--slots", "1") as one:
        yield one


@contextmanager
def opened(browser: Browser, server: ServerProcess, path: str, **options: Any) -> Iterator[Page]:
    """A loaded page, which must write no error to its console. options: of the browser's context."""
    context = browser.new_context(**options)
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"http://127.0.0.1:{server.port}{path}")
    page.wait_for_selector("html[data-ready]")
    yield page
    context.close()
    assert errors == [], f"expected no errors on the console, got {errors}"


def violations(page: Page) -> list[tuple[str, list[str]]]:
    """Serious and critical findings of axe-core."""
    page.evaluate(AXE)
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    bad = [one for one in found if one["impact"] in ("serious", "critical")]
    return [(one["id"], [node["html"][:160] for node in one["nodes"]]) for one in bad]


@contextmanager
def conversation(server: ServerProcess, name: str, *, slot: bool) -> Iterator[ClientConnection]:
    """A client's socket, with a slot or in the queue."""
    with connect(f"ws://127.0.0.1:{server.port}/ws/duplex/{name}") as socket:
        wanted = "queue_done" if slot else "queued"
        while json.loads(socket.recv(timeout=20))["type"] != wanted:
            pass
        yield socket


def until_error(socket: ClientConnection) -> str:
    """The code of the next error message."""
    while (message := json.loads(socket.recv(timeout=20)))["type"] != "error":
        pass
    return message["code"]


def test_admin_cancels_ticket_and_ends_session(browser: Browser, server: ServerProcess) -> None:
    with (
        conversation(server, "omni_runs", slot=True) as runs,
        conversation(server, "omni_waits", slot=False) as waits,
        opened(browser, server, "/admin?lang=en") as page,
    ):
        assert "1 of 1" in page.inner_text("#tiles")
        page.click("#queue li:has-text('omni_waits') button")
        page.click("dialog[open] button:has-text('Keep')")
        assert page.locator("#queue li").count() == 1, "Keep changes nothing"
        page.click("#queue li:has-text('omni_waits') button")
        page.click("dialog[open] button:has-text('Cancel')")
        page.wait_for_selector("#queue-empty")
        assert "omni_waits" in page.inner_text("#said")
        assert until_error(waits) == "cancelled"
        assert page.evaluate("document.activeElement.id") == "queue-title", "focus stays in the section"
        page.click("#sessions li:has-text('omni_runs') button")
        page.click("dialog[open] button:has-text('End')")
        page.wait_for_selector("#sessions-empty")
        assert until_error(runs) == "cancelled"


def test_admin_switches_apps_and_stores_durations(browser: Browser, server: ServerProcess) -> None:
    def ids() -> list[str]:
        return [app["app_id"] for app in httpx.get(f"http://127.0.0.1:{server.port}/api/apps").json()["apps"]]

    with opened(browser, server, "/admin?lang=en") as page:
        page.focus("#app-audio_duplex")
        page.keyboard.press("Space")
        expect(page.locator("#said")).to_have_text("Voice is off.")
        assert "audio_duplex" not in ids()
        page.evaluate(HOLD_DURATIONS)
        page.click("#app-audio_duplex")
        page.wait_for_function("() => window.release")
        page.fill("#eta_chat_s", "33")  # while the page fetches the durations
        page.evaluate("window.release()")
        expect(page.locator("#said")).to_have_text("Voice is on.")
        assert "audio_duplex" in ids()
        page.click("#eta-save")
        expect(page.locator("#said")).to_have_text("Saved.")
        got = httpx.get(f"http://127.0.0.1:{server.port}/api/config/eta").json()["config"]["eta_chat_s"]
        assert got == 33, f"expected 33, got {got}"


class SpeechModels:
    """Answers of `/api/admin/models` of a worker with two models that are unloaded. changes: what was asked."""

    def __init__(self, page: Page):
        self.changes: list[tuple[str, dict[str, Any]]] = []
        slots, kind = {"total": 4, "free": 3}, "CustomVoice"
        counts = {"texts": 1234, "frames": 5678, "late_sounds": 0, "graphs": 9, "bytes": 4_520_000_000}
        self._speech: dict[str, Any] | None = {"path": "voices", "kind": kind, "slots": slots, **counts}
        slots = {"total": 16, "free": 14}
        self._conversion: dict[str, Any] | None = {"path": "s3gen", "slots": slots, "pieces": 4321}
        page.route("**/api/admin/models**", self._answer)

    def _answer(self, route: Route) -> None:
        if route.request.method == "POST":
            self.changes.append((route.request.url.rpartition("/")[2], route.request.post_data_json))
            if route.request.post_data_json.get("model") == "conversion":
                self._conversion = None
            else:
                self._speech = None
            route.fulfill(json={"state": "IDLE", "memory": None})
            return
        states = {"speech_path": "voices", "speech_error": None if self._speech else "no memory"}
        worker = {"worker_id": "worker_0", "state": "IDLE", "omni": True, "speech": self._speech, **states}
        worker |= {"conversion": self._conversion, "conversion_path": "s3gen", "conversion_error": None}
        route.fulfill(json={"workers": [worker]})


def test_admin_unloads_and_loads_models_and_adds_and_deletes_voice(browser: Browser, server: ServerProcess) -> None:
    with opened(browser, server, "/admin?lang=en") as page:
        assert page.is_hidden("#models"), "the worker has no speech model"
        models, rows = SpeechModels(page), page.locator("#models li")
        row, conversion = rows.nth(0), rows.nth(1)
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # refreshes
        used = "CustomVoice · 1 of 4 slots in use · 1,234 texts · 5,678 frames, 0 late sounds"
        expect(row).to_contain_text(f"{used} · 9 graphs · weights 4.52 GB")
        expect(conversion).to_contain_text("voice conversion · 2 of 16 slots in use · 4,321 pieces of sound")
        row.get_by_role("button", name="Unload: worker_0").click()
        page.click("dialog[open] button:has-text('Unload')")
        expect(row).to_contain_text("no memory")
        row.get_by_role("button", name="Load: worker_0", exact=True).click()
        expect(page.locator("#said")).to_have_text("worker_0 loads.")
        unloading = ("unload", {"worker_id": "worker_0", "model": "speech"})
        assert models.changes == [unloading, ("load", {"worker_id": "worker_0"})]
        conversion.get_by_role("button", name="Unload: worker_0, voice conversion").click()
        page.click("dialog[open] button:has-text('Unload')")
        expect(conversion).to_contain_text("not loaded")
        assert models.changes[2:] == [("unload", {"worker_id": "worker_0", "model": "conversion"})]
        page.set_input_files("#voice-file", str(VOICE))
        page.fill("#voice-name", "An added voice")
        page.click("#voice-send")
        page.wait_for_selector("#voices li:has-text('An added voice')")
        page.click("#voices li:has-text('An added voice') button")
        page.click("dialog[open] button:has-text('Delete')")
        page.wait_for_selector("#voices li:has-text('An added voice')", state="detached")


@pytest.mark.parametrize("path", ["/", "/admin"])
@pytest.mark.parametrize(("scheme", "lang"), [("light", "en"), ("dark", "zh")])
def test_pages_are_accessible_and_fit_a_phone(
    browser: Browser, server: ServerProcess, path: str, scheme: str, lang: str
) -> None:
    with opened(browser, server, f"{path}?lang={lang}", color_scheme=scheme, viewport=PHONE) as page:
        assert violations(page) == []
        needed, offered = page.evaluate(WIDTH)
        assert needed <= offered == PHONE["width"], f"expected at most {offered} px, got {needed}"
        if lang == "zh":
            untranslated = [
                text
                for text in ("Administration", "Workers", "Video", "Recording is")
                if text in page.inner_text("main")
            ]
            assert untranslated == []


def test_home_leads_to_enabled_apps_and_recent_sessions(browser: Browser, server: ServerProcess) -> None:
    address = f"http://127.0.0.1:{server.port}"
    httpx.put(f"{address}/api/admin/apps/audio_duplex", json={"enabled": False})
    try:
        with opened(browser, server, "/audio_duplex?lang=en") as page:  # redirects to the home page
            assert page.url.startswith(f"{address}/") and "/audio_duplex" not in page.url
            assert "Voice is switched off" in page.inner_text("#off")
            assert page.locator("#modes a[href^='/omni']").count() == 1
            assert page.locator("#modes a[href^='/audio_duplex']").count() == 0
            assert page.locator("#recent-section").is_hidden() and page.locator("#all-sessions").is_hidden()
            recent = [{"id": f"omni_{n}", "mode": "omni", "at": 1_780_000_000_000 + n} for n in (1, 2)]
            page.evaluate("(list) => localStorage.setItem('minicpmo45_recent_sessions', JSON.stringify(list))", recent)
            page.reload()
            page.wait_for_selector("#recent a[href='/s/omni_1']")
            assert page.locator("#off").is_hidden(), "the notice is shown once"
            page.click("#recent li:has(a[href='/s/omni_1']) button")
            assert page.locator("#recent a").count() == 1
            page.wait_for_selector("#state:has-text('1 of 1 places are free')")
    finally:
        httpx.put(f"{address}/api/admin/apps/audio_duplex", json={"enabled": True})


def test_live_page_fills_a_phones_screen(browser: Browser, server: ServerProcess) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{server.port}/mobile-omni?lang=en")
    page.wait_for_selector("#card-action:not(:empty)")
    assert page.url.endswith("/mobile-omni/?lang=en")
    box = page.locator("#stage").bounding_box()
    assert box["width"] == 390 and box["height"] > 700, f"expected a stage that fills the window, got {box}"
    assert page.locator("#captions").is_hidden()
    press_start(page)
    page.wait_for_selector("#stage:is([data-state=listening], [data-state=speaking])", timeout=30_000)
    page.wait_for_selector("#subtitles:not(:empty)", timeout=30_000)
    context.close()
