"""The page in all its states: queue, pause, mute, interrupt, missing permissions, errors, settings."""

import io
import json
import signal
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, BrowserContext

from tests.e2e.browser import OpenPage
from tests.e2e.plain_server import Answers, plain_server
from tests.e2e.serving import TALKATIVE, CutProxy, ServerProcess, fake_worker, gateway, gateway_with_fake_worker
from worker.protocol.wire import Sound

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def open_page(context: BrowserContext, server: ServerProcess) -> Callable[..., OpenPage]:
    return lambda *args, **query: OpenPage(context, server.port, *args, **query)


def test_sends_complete_units_with_pictures(open_page: Callable[..., OpenPage]) -> None:
    page = open_page().start()
    page.wait_units(2)
    units = page.sent_units()
    assert all(len(samples) == 16000 for _, samples, _ in units), [len(samples) for _, samples, _ in units]
    assert max(np.abs(samples).max() for _, samples, _ in units) > 0.01, "expected the microphone's sound, got silence"
    for number, (_, _, pictures) in enumerate(units[1:], 2):
        assert len(pictures) == 1, f"unit {number}: expected one picture, got {len(pictures)}"
        image = Image.open(io.BytesIO(pictures[0]))
        assert (image.format, image.size) == ("JPEG", (320, 240)), (image.format, image.size)
    assert "/ws/duplex/omni_" in page.addresses[0]

    for button in ("#mute", "#listen", "#camera"):
        page.page.click(button)
    n = page.report["units"]
    page.wait_units(n + 2)  # a part of the first one was captured before the click
    header, samples, pictures = page.sent_units()[n + 1]
    assert np.abs(samples).max() == 0, f"muted: expected silence, got a peak of {np.abs(samples).max()}"
    assert header["force_listen"] is True, f"holding: expected force_listen, got {header}"
    assert not pictures, f"camera off: expected no picture, got {len(pictures)}"
    assert "muted" in page.text("#badge")
    assert not page.errors, page.errors


def test_early_units_take_sound_in_pieces(open_page: Callable[..., OpenPage]) -> None:
    """Pieces have 100 ms, or 40 ms beside speech; one ends with each unit, and one in its middle has a picture."""
    page = open_page(config={"early_unit": "auto"}).start()
    page.wait_units(2)
    page.wait(lambda: sum(len(samples) for _, samples, _ in page.sent_units()) > 16_000, "a unit")
    page.wait(lambda: any(pictures for _, _, pictures in page.sent_units()), "a picture")
    page.page.click("#listen")
    n = page.report["units"]
    page.wait(lambda: len(page.sent_units()) > n + 1, "two more pieces")
    pieces, report = page.sent_units(), page.report
    sizes = [len(samples) for _, samples, _ in pieces]
    assert max(sizes) < 1600 + 640 and sizes[0] == 1600, sizes
    early = [result for result in report["results"] if result.get("early")]
    if not early:  # the browser's microphone may pause at any time
        assert 16_000 in np.cumsum(sizes), f"expected a message that ends with the unit, got {sizes}"
        with_picture = [number for number, (_, _, pictures) in enumerate(pieces) if pictures]
        begins = {sum(sizes[:number]) % 16_000 for number in with_picture}
        assert all(6_000 < begin < 10_000 for begin in begins), f"expected them in the middle, got {begins}"
    assert pieces[n + 1][0]["force_listen"] is True
    assert not page.errors, page.errors


def test_messages_wait_for_one_whose_picture_is_late(context: BrowserContext, server: ServerProcess) -> None:
    """Pictures take 250 ms to encode, and messages have 40 ms of sound: each unit has one picture all the same."""
    context.add_init_script(
        """const { toBlob } = HTMLCanvasElement.prototype;
        HTMLCanvasElement.prototype.toBlob = function (done, ...how) {
            toBlob.call(this, (blob) => setTimeout(done, 250, blob), ...how);
        };
        window.heard = [];
        const ears = Object.getOwnPropertyDescriptor(MessagePort.prototype, "onmessage");
        Object.defineProperty(MessagePort.prototype, "onmessage", { ...ears, set(hear) {
            ears.set.call(this, (event) => {
                if (event.data?.type === "unit") window.heard.push(Math.round(32767 * event.data.samples[0]));
                return hear(event);
            });
        } });"""
    )
    page = OpenPage(context, server.port, config={"early_unit": "auto"}).start()
    page.wait_units(4)
    units, heard = page.sent_units(), page.page.evaluate("heard")
    sent = [round(32767 * float(samples[0])) for _, samples, _ in units]
    assert any(sent), "expected sound"
    swapped = [number for number, (got, due) in enumerate(zip(sent, heard, strict=False)) if abs(got - due) > 1]
    assert not swapped, f"expected messages in their order, got others from {swapped[0]} on"
    n_pictures = sum(len(pictures) for *_, pictures in units)
    assert 2 <= n_pictures <= page.report["results"][-1]["current_time"] + 1, f"expected one a unit, got {n_pictures}"


def test_audio_page_has_no_camera(open_page: Callable[..., OpenPage]) -> None:
    page = open_page("/audio_duplex").start()
    page.wait_units(1)
    assert "/ws/duplex/adx_" in page.addresses[0]
    assert page.sent_units()[0][2] == [] and not page.page.is_visible("#camera")
    page.page.click("#stop")
    page.wait_state("ended")
    page.wait_text("#card-title", "Until next time")
    [summary] = [one for one in page.sent_kind("client_diagnostic") if one["event"] == "session_summary"]
    assert summary["units"] >= 1 and summary["gaps"] == 0, summary
    assert page.sent[-1] == {"type": "stop"}


def test_interrupt_silences_rest_of_turn(context: BrowserContext, server: ServerProcess) -> None:
    """Later sound of the interrupted turn is dropped; the next turn is played."""
    got = plain_server(context, ends=(3, 5))
    page = OpenPage(context, server.port).start()
    page.wait_state("speaking")
    page.page.keyboard.press("Escape")
    page.wait(lambda: page.report["flushes"], "a flush")
    [flush] = page.report["flushes"]
    assert flush["why"] == "interrupt" and flush["lost_samples"] > 0, flush
    assert '{"type":"interrupt"}' in got, "expected an interrupt to be sent"
    assert page.text(".turn.cut .mark") == "interrupted"
    page.wait_units(3)
    [cut] = page.report["turns"]
    assert cut["cut"] and cut["over"] and cut["sound_ms"] < 3000 and page.report["dropped_ms"] >= 1000, page.report
    assert page.state == "listening", f"expected the rest of the turn to stay silent, got {page.state}"
    page.wait_state("speaking")
    assert page.report["turns"][1]["sound_ms"] > 0, page.report["turns"]


def test_pause_and_resume(open_page: Callable[..., OpenPage]) -> None:
    page = open_page().start()
    page.wait_units(1)
    page.page.click("#pause")
    page.wait_state("paused")
    page.wait_text("#card-text", "Your place is kept for another")
    n = page.report["units"]
    page.page.wait_for_timeout(1300)  # longer than a unit, which must not be sent
    assert page.report["units"] == n, f"paused: expected no more than {n} units, got {page.report['units']}"
    page.page.click("#card-action")
    page.wait_units(n + 1)
    assert page.state in ("listening", "speaking") and not page.report["errors"], page.report["errors"]


def test_settings_are_remembered_and_sent(open_page: Callable[..., OpenPage]) -> None:
    page = open_page()
    page.page.click("#open-settings")
    page.page.fill("#set-prompt", "Be brief.")
    page.page.select_option("#set-voice", "own")
    page.page.set_input_files("#voice-file", ROOT / "assets" / "ref_audio" / "high.wav")
    page.wait_text("#voice-state", "high.wav")
    page.page.click("#settings summary")
    page.page.fill("#set-extra", '{"seed": 5}')
    page.page.press("#set-extra", "Tab")

    again = open_page(config={"temperature": 0.5}, lang="zh")
    assert again.text("#card-action") == "开始对话"
    again.page.click("#open-settings")
    assert again.page.input_value("#set-prompt") == "Be brief."
    again.page.keyboard.press("Escape")
    again.start()
    [prepare] = again.sent_kind("prepare")
    assert prepare["system_prompt"] == "Be brief." and prepare["config"] == {"seed": 5, "temperature": 0.5}, prepare
    spec = {"version": 1, "partial_results": True, "sound_in": "pcm16", "sound_out": "pcm16", "resume": True}
    assert prepare["spec"] == spec, prepare["spec"]
    voice = Sound.of(prepare["ref_audio_base64"]).samples("voice")
    assert 16000 < len(voice) <= 20 * 16000 and np.abs(voice).max() > 0.05, (
        f"expected a voice, got {len(voice)} samples"
    )


def test_plain_protocol_without_spec(context: BrowserContext, server: ServerProcess) -> None:
    """Without `spec` in `prepared`, the page sends no binary frame and plays complete results."""
    got = plain_server(context, ends=(2,))
    page = OpenPage(context, server.port).start()
    report = page.wait_units(2)
    assert not any(isinstance(one, bytes) for one in got), "expected text only, got a binary frame"
    chunk = json.loads(next(one for one in got if '"audio_chunk"' in one))
    assert len(Sound.of(chunk["audio_base64"]).samples("sound")) == 16000
    assert report["sound_seconds"] >= 2 and report["turns"][0]["text"] == "plain plain ", report["turns"]


def test_error_replaces_only_its_own_result(context: BrowserContext, server: ServerProcess) -> None:
    """An error about a unit replaces its result, other errors do not; an unreadable message ends the conversation."""
    refused = {"type": "error", "code": "bad_image", "error": "not an image"}
    unrelated = {"type": "error", "code": "unknown_type", "error": "Unknown message type: news"}
    broken = {"type": "partial", "current_time": 3, "part": 1, "audio_data": "no sound!"}
    plain_server(context, ends=(2,), instead={"unit 1": [refused], "before 2": [unrelated], "after 2": [broken]})
    page = OpenPage(context, server.port).start()
    page.wait_text("#card-title", "The answer could not be read")
    assert page.text("#card-action") == "Reconnect"
    report = page.report
    assert [result["unit"] for result in report["results"]] == [2], report["results"]
    assert [error["code"] for error in report["errors"]] == ["bad_image", "unknown_type", "unreadable"]


def test_each_timeout_has_its_message(context: BrowserContext, server: ServerProcess) -> None:
    answers: Answers = {"after prepare": [{"type": "timeout", "reason": "Idle timeout (30.0s)"}]}
    plain_server(context, instead=answers)
    page = OpenPage(context, server.port).start("failed")
    page.wait_text("#card-title", "No sound was received")
    answers.clear()
    answers["pause"] = [{"type": "paused", "timeout": 0.0}, {"type": "timeout", "reason": "Pause timeout (0.0s)"}]
    page.start()
    page.page.click("#pause")
    page.wait_text("#card-title", "The pause was too long")


def test_queue_positions_and_full_queue(browser: Browser, tmp_path: Path) -> None:
    with gateway_with_fake_worker(tmp_path, "--slots", "1", queue=1) as server:
        first, second, third = (OpenPage(browser.new_context(), server.port) for _ in range(3))
        first.start()
        second.start("queued")
        second.wait_text("#card-title", "You are number 1 in line")
        second.wait_text("#card-text", "About ")
        third.start("failed")
        third.wait_text("#card-title", "The queue is full")
        first.page.click("#stop")
        second.wait_state("listening", "speaking")
        third.page.click("#card-action")
        third.wait_state("queued")
        third.page.click("#card-action")
        third.wait_state("ended")
        assert third.text("#card-title") == "Talk face to face", "expected to be back at the start"


def test_reconnects_by_itself_after_each_kind_of_loss(context: BrowserContext, tmp_path: Path) -> None:
    """Cut connection, killed gateway, killed worker, stopped gateway: the page says so and keeps the transcript.

    It goes on with the same session after the first and the third, and reconnects after the others.
    """
    with ExitStack() as stack:
        worker = stack.enter_context(fake_worker(*TALKATIVE))
        with gateway(tmp_path, [worker.port]) as server:
            proxy = CutProxy(server.port)
            stack.callback(proxy.close)
            page = OpenPage(context, proxy.port).start()
            page.wait_text("#turns", "second 2")
            for n_connections in (2, 3):
                n = page.report["units"]
                page.wait(lambda n=n: page.report["units"] > n, "a unit that was just sent")
                proxy.cut()
                page.wait(lambda n=n_connections: len(page.addresses) >= n, "another connection")
                page.wait_state("listening", "speaking")
                page.wait_units(page.report["units"] + 1)
            report, prepares = page.report, page.sent_kind("prepare")
            assert len({address.partition("?")[0] for address in page.addresses}) == 1, page.addresses
            assert len(prepares) == 1 and not report["errors"], f"expected one session, got {prepares}, {report}"
            times = [result["current_time"] for result in report["results"]]
            assert times == list(range(1, len(times) + 1)), f"expected each result once, got {times}"
        page.wait_text("#card-title", "Connection lost")
        page.wait_text("#card-text", "The conversation is kept")
        server = stack.enter_context(gateway(tmp_path, [worker.port], "--drain-timeout", "0.1", port=server.port))
        page.wait_state("listening", "speaking")
        n = len(page.report["results"])
        page.wait_units(n + 1)
        worker.kill()
        worker = stack.enter_context(fake_worker(*TALKATIVE, "--port", str(worker.port)))
        page.wait_text("#notice", "Another worker")
        page.wait_units(len(page.report["results"]) + 1)
        text = page.text("#turns")
        assert "second 2" in text and text.count("Connected again") == 1, text
        server.process.send_signal(signal.SIGTERM)
        page.wait_text("#card-title", "The server is restarting")
        page.page.click("#card-action")  # now, not after the delay
        page.wait_state("connecting", "reconnecting")
        # What the next connection meets depends on how far the server has shut down.
        codes = [error["code"] for error in page.report["errors"]]
        assert codes[:1] == ["draining"], codes


def test_disabled_app_is_reported(open_page: Callable[..., OpenPage], server: ServerProcess) -> None:
    page = open_page()
    try:
        switch(server, "omni", on=False)
        page.start("failed")  # it was enabled when the page was loaded
        page.wait_text("#card-title", "Video is disabled")
        switch(server, "audio_duplex", on=False)
        none = open_page("/static/live/live.html")  # the route of the app redirects to the home page
        none.wait_text("#card-action", "Check again")
        switch(server, "audio_duplex", on=True)
        none.page.click("#card-action")
        none.wait_text("#card-action", "Talk by voice")
        assert not none.addresses, "expected no connection"
        none.page.click("#card-action")
        none.page.wait_for_url("**/audio_duplex?lang=en")
        none.wait_text("#card-title", "Just talk")
    finally:
        for app_id in ("omni", "audio_duplex"):
            switch(server, app_id, on=True)


def switch(server: ServerProcess, app_id: str, *, on: bool) -> None:
    url = f"http://127.0.0.1:{server.port}/api/admin/apps/{app_id}"
    body, headers = json.dumps({"enabled": on}).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers, method="PUT"), timeout=10) as answer:
        assert answer.status == 200, f"expected 200, got {answer.status}"


# Makes getUserMedia wait until the test grants it, as a permission dialog does.
PERMISSION_DIALOG = """
    const devices = MediaDevices.prototype, real = devices.getUserMedia;
    const asking = { kind: "audio", held: [], tracks: [] };
    window.asking = asking;
    devices.getUserMedia = async function (wanted) {
      if (wanted[asking.kind]) await new Promise((resolve) => asking.held.push(resolve));
      const stream = await real.call(this, wanted);
      asking.tracks.push(...stream.getTracks());
      return stream;
    };"""


def test_stopped_start_leaves_no_device_open(context: BrowserContext, open_page: Callable[..., OpenPage]) -> None:
    """Start, cancel, start again, then grant both requests, in either order."""
    context.add_init_script(PERMISSION_DIALOG)
    page = open_page()
    for kind, order in (("audio", ""), ("audio", ".reverse()"), ("video", "")):
        case = f"{kind}{order}"
        page.page.evaluate("(kind) => (asking.kind = kind)", kind)
        for n in (1, 2):
            page.start("asking")
            page.wait(lambda n=n: page.page.evaluate("asking.held.length") == n, f"{case}: request {n}")
            if n == 1:
                page.page.click("#card-action")
                page.wait_state("ended")
        page.page.evaluate(f"for (const give of asking.held.splice(0){order}) give()")
        page.wait_state("listening", "speaking")
        n_live = len(page.page.evaluate(LIVE_TRACKS))
        page.page.click("#stop")
        page.wait_state("ended")
        left = page.page.evaluate(LIVE_TRACKS)
        assert (n_live, left) == (2, []), f"{case}: expected microphone and camera, then none, got {n_live} and {left}"


LIVE_TRACKS = "asking.tracks.filter((track) => track.readyState === 'live').map((track) => track.kind)"


def test_missing_microphone_is_reported_and_a_missing_camera_too(
    context: BrowserContext, server: ServerProcess
) -> None:
    """Without a microphone there is no conversation, without a camera there is one without pictures."""
    context.add_init_script(REFUSING)
    page = OpenPage(context, server.port)
    for error, title in (("NotAllowedError", "No microphone yet"), ("NotFoundError", "No microphone found")):
        page.page.evaluate("(error) => (refused = { audio: error })", error)
        page.start("failed")
        page.wait_text("#card-title", title)
        assert page.text("#card-action") == "Start talking" and not page.addresses
        assert page.text("#badge-text") == "Not started"
    page.page.evaluate("refused = { video: 'NotAllowedError' }")
    page.start()
    page.wait_text("#notice", "No permission for the camera")
    page.wait_units(1)
    assert page.sent_units()[0][2] == []


def test_insecure_address_is_reported(context: BrowserContext, server: ServerProcess) -> None:
    page = OpenPage(context, server.port, host="duologue.test").start("failed")
    page.wait_text("#card-title", "This page needs a secure address")


# Makes getUserMedia reject requests for the kinds of devices that are in `refused`, with the errors named there.
REFUSING = """
    window.refused = {};
    const devices = MediaDevices.prototype, real = devices.getUserMedia;
    devices.getUserMedia = function (wanted) {
      const kind = Object.keys(refused).find((kind) => wanted[kind]);
      return kind ? Promise.reject(new DOMException("refused", refused[kind])) : real.call(this, wanted);
    };"""
