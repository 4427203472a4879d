"""The page in the system's Chromium, whose microphone and camera play files."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from imageio_ffmpeg import get_ffmpeg_exe
from playwright.sync_api import Browser, BrowserContext, Page, WebSocket, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from worker.protocol.wire import Sound, unpack_frame

VIDEO = Path(__file__).parents[2] / "assets" / "warmup.mp4"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DISABLED_FEATURES = (
    *("WebUIOmniboxPopup", "WebUIOmniboxAimPopup"),
    *("HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable", "MediaRouter", "OptimizationHints", "PreconnectToSearch"),
    *("NetworkTimeServiceQuerying", "PaintHolding", "DestroyProfileOnBrowserClose"),
)
CHROMIUM_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # In place of Playwright's list. The pop-ups of the address bar are pages, which every context loads: 0.8 s of CPU.
    "--disable-features=" + ",".join(DISABLED_FEATURES),
    *("--autoplay-policy=no-user-gesture-required", "--use-fake-device-for-media-stream"),
    "--host-resolver-rules=MAP duologue.test 127.0.0.1",  # a host name without TLS, which browsers treat as insecure
)
WAIT_S = 30.0
CLICKS = 5
POLL_MS = 50
SHOWS_TEXT = """([selector, expected]) => {
    const shown = document.querySelector(selector);
    return shown?.checkVisibility() && shown.innerText.includes(expected);
}"""


def chromium() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, f"expected a Chromium on this machine ({', '.join(NAMES)}), got none: apt-get install chromium"
    return found


def make_media(folder: Path) -> tuple[Path, Path]:
    """The warm-up video as files that Chromium plays in a loop: microphone (WAV) and camera (Y4M)."""
    sound, picture = folder / "microphone.wav", folder / "camera.y4m"
    ffmpeg = [get_ffmpeg_exe(), "-y", "-loglevel", "error", "-i", str(VIDEO)]
    subprocess.run([*ffmpeg, "-ar", "48000", "-ac", "1", str(sound)], check=True, timeout=60)
    scale = "fps=5,scale=320:240:force_original_aspect_ratio=increase,crop=320:240"
    subprocess.run([*ffmpeg, "-vf", scale, "-t", "4", "-pix_fmt", "yuv420p", str(picture)], check=True, timeout=60)
    return sound, picture


@contextmanager
def open_browser(media: tuple[Path, Path], *flags: str) -> Iterator[Browser]:
    """A browser that grants microphone and camera. flags: further flags of Chromium."""
    sound, picture = media
    files = [f"--use-file-for-fake-audio-capture={sound}", f"--use-file-for-fake-video-capture={picture}"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium(),
            args=[*CHROMIUM_FLAGS, *files, "--use-fake-ui-for-media-stream", *flags],
            ignore_default_args=["--headless", "--mute-audio"],
        )
        try:
            yield browser
        finally:
            browser.close()


def press_start(page: Page) -> None:
    """Press the button of the stage, again if it moved away during the click because the page has just loaded."""
    before = page.evaluate("duologue.state")
    for _ in range(CLICKS):
        page.click("#card-action")
        if page.evaluate("duologue.state") != before:
            return


class OpenPage:
    """One open page. errors: errors on its console and of its scripts. sent: its messages, objects and bytes."""

    def __init__(
        self,
        context: BrowserContext,
        port: int,
        path: str = "/omni",
        *,
        host: str = "127.0.0.1",
        barge_in: bool = False,
        **query: Any,
    ):
        """
        Args:
            barge_in: whether speech stops the reply. The microphone file contains speech, which would do so.
            query: parameters of the URL; objects are encoded as JSON.
        """
        self.page: Page = context.new_page()
        if not barge_in:
            self.page.add_init_script("localStorage.duologue_settings ??= JSON.stringify({bargeIn: false})")
        self.sent: list[Any] = []
        self.addresses: list[str] = []
        self.page.on("websocket", self._follow)
        self.errors: list[str] = []
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in query.items()}
        self.page.goto(f"http://{host}:{port}{path}?{urlencode({'lang': 'en', **texts})}")
        self.wait(lambda: self.page.evaluate("'duologue' in window"), "the page to start")

    def start(self, *states: str) -> "OpenPage":
        """Press the button and wait for one of `states`; by default for a running conversation."""
        press_start(self.page)
        self.wait_state(*(states or ("listening", "speaking")))
        return self

    @property
    def state(self) -> str:
        return self.page.evaluate("duologue.state")

    @property
    def report(self) -> dict[str, Any]:
        return self.page.evaluate("duologue.report")

    def wait_state(self, *states: str, timeout: float = WAIT_S) -> None:
        what = f"state {' or '.join(states)}"
        self._wait_in_page("(states) => states.includes(duologue.state)", list(states), what, timeout)

    def wait_units(self, n: int, timeout: float = WAIT_S) -> dict[str, Any]:
        """Wait for this number of answered units. Returns: the page's report."""
        self._wait_in_page("(n) => duologue.report.results.length >= n", n, f"{n} units answered", timeout)
        return self.report

    def _wait_in_page(self, holds: str, argument: Any, what: str, timeout: float) -> None:
        """Wait until a function of the page returns true. Asking the page again and again takes a tenth of a core."""
        try:
            self.page.wait_for_function(holds, arg=argument, timeout=1000 * timeout, polling=POLL_MS)
        except PlaywrightTimeoutError:
            raise AssertionError(f"expected {what} within {timeout:g} s, got {self._summary()}") from None

    def wait(self, holds: Any, what: str, timeout: float = WAIT_S) -> None:
        until = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < until, f"expected {what} within {timeout:g} s, got {self._summary()}"
            self.page.wait_for_timeout(POLL_MS)

    def _summary(self) -> str:
        report = self.page.evaluate("window.duologue?.report ?? {}")
        return f"{ {**report, 'results': len(report.get('results', []))} }, console {self.errors}"

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def wait_text(self, selector: str, expected: str, timeout: float = WAIT_S) -> None:
        """Wait until a visible element contains this text."""
        self._wait_in_page(SHOWS_TEXT, [selector, expected], f"{expected!r} in {selector}", timeout)

    def wait_frames(self) -> None:
        """Wait until the page has drawn what it knows by now."""
        self.page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")

    def _follow(self, socket: WebSocket) -> None:
        self.addresses.append(socket.url)
        socket.on("framesent", lambda data: self.sent.append(json.loads(data) if isinstance(data, str) else data))

    def sent_units(self) -> list[tuple[dict[str, Any], np.ndarray, list[bytes]]]:
        """Header, samples and pictures of each unit that was sent as a binary frame."""
        frames = [unpack_frame(data) for data in list(self.sent) if isinstance(data, bytes)]
        return [(header, Sound(sound, "pcm16").samples("sound"), pictures) for header, sound, pictures in frames]

    def sent_kind(self, kind: str) -> list[dict[str, Any]]:
        """Text messages of this type that were sent."""
        return [message for message in list(self.sent) if isinstance(message, dict) and message["type"] == kind]
