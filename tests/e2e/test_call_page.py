"""The example page calls over WebRTC from another origin; its Chromium may use loopback addresses."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect

from tests.e2e.browser import WAIT_S, open_browser
from tests.e2e.serving import ServerProcess, gateway_with_fake_worker
from tests.programs.start import ROOT

pytestmark = pytest.mark.programs

# The frequency with the most energy in what the page plays, in Hz, once it is loud.
LOUDEST = """
    async () => {
        const room = new AudioContext();
        const analyser = new AnalyserNode(room, { fftSize: 8192, smoothingTimeConstant: 0 });
        room.createMediaStreamSource(document.getElementById("speaker").srcObject).connect(analyser);
        const bins = new Float32Array(analyser.frequencyBinCount);
        for (let i = 0; i < 200; i++) {
            await new Promise((resolve) => setTimeout(resolve, 50));
            analyser.getFloatFrequencyData(bins);
            const top = bins.reduce((best, value, index) => (value > bins[best] ? index : best), 0);
            if (bins[top] > -40) return (top * room.sampleRate) / 8192;
        }
        return null;
    }
"""


@pytest.fixture(scope="module")
def browser(media: tuple[Path, Path]) -> Iterator[Browser]:
    with open_browser(media, "--allow-loopback-in-peer-connection") as one:
        yield one


@pytest.fixture(scope="module")
def page_port() -> Iterator[int]:
    """Port of another server, which has the example page."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(ROOT / "examples"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, page_port: int) -> Iterator[ServerProcess]:
    service = {"allowed_origins": [f"http://127.0.0.1:{page_port}"], "webrtc": {"addresses": ["127.0.0.1"]}}
    flags = ("--listen", "1", "--speak", "30")
    with gateway_with_fake_worker(tmp_path_factory.mktemp("calls"), *flags, config={"service": service}) as one:
        yield one


def test_the_example_page_talks_and_hangs_up(context: BrowserContext, server: ServerProcess, page_port: int) -> None:
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{page_port}/webrtc_page.html")
    page.fill("#server", f"http://127.0.0.1:{server.port}")
    page.check("#camera")
    page.click("#call")
    expect(page.locator("#state")).to_have_text("connected", timeout=1000 * WAIT_S)
    events = page.locator("#events")
    expect(events).to_contain_text("output_audio_buffer.started", timeout=1000 * WAIT_S)
    assert (events.text_content() or "").startswith("session.created\n")
    hz = page.evaluate(LOUDEST)
    assert hz is not None and abs(hz - 440) < 12, f"expected the worker's tone of 440 Hz, got {hz}"
    # The microphone plays speech: it reaches the detector, which ends the playback.
    expect(events).to_contain_text("conversation.item.truncated", timeout=1000 * WAIT_S)
    heard = (events.text_content() or "").split("\n")
    assert heard.index("input_audio_buffer.speech_started") < heard.index("output_audio_buffer.cleared")
    page.click("#hangup")
    server.wait_line("ended: client gone", WAIT_S)
    expect(page.locator("#state")).to_have_text("not connected")
