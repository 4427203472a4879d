"""What the live page offers around a conversation: queue and loading, stalls, leaving, sources, recording, changes."""

import base64
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import BrowserContext, Page

from tests.e2e.browser import VIDEO, OpenPage
from tests.e2e.plain_server import TONE, Answers, plain_server
from tests.e2e.serving import ServerProcess

pytestmark = pytest.mark.programs

PREPARED = {"type": "prepared", "prompt_length": 3}


def _png(width: int, height: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (30, 90, 200)).save(data, "PNG")
    return data.getvalue()


PICTURE = _png(60, 40)


def test_end_while_it_speaks_adds_nothing(context: BrowserContext, server: ServerProcess) -> None:
    """Partial results that arrive between End and `stopped` are ignored."""
    late = [{"type": "partial", "current_time": 2, "part": n, "text": "too late", "audio_data": TONE} for n in (1, 2)]
    answers: Answers = {"stop": [*late, {"type": "stopped"}], "unit 2": []}
    plain_server(context, instead=answers)
    page = OpenPage(context, server.port).start()
    page.wait(lambda: page.report["units"] >= 2, "two units")
    page.page.click("#pause")
    assert page.page.locator(".live .turn.open").count() == 0, "paused: expected no turn that still speaks"
    page.page.click("#pause")
    page.page.click("#stop")
    page.wait_state("ended")
    page.wait_frames()
    assert page.text("#turns p").strip() == "plain" and page.page.locator(".turn.open").count() == 0, page.text(
        "#turns"
    )
    assert not page.errors, page.errors
    with page.page.expect_download() as download:
        page.page.click("#save-text")
    saved = Path(download.value.path()).read_text()
    heard = re.search(r"\] (\w*) ?—\n$", saved)  # the part of the text whose sound was played
    assert heard and "plain".startswith(heard[1]), saved
    with page.page.expect_download() as download:
        page.page.click("#save-json")
    saved = json.loads(Path(download.value.path()).read_text())
    assert saved["transcript"][0]["text"] == "plain " and saved["statistics"]["units"] >= 2, saved


def test_loading_is_not_a_queue(context: BrowserContext, server: ServerProcess) -> None:
    """A wait for a worker that loads shows its progress; the end of the wait is announced."""
    progress = {"what": "warming up", "done": 3, "total": 10}
    wait = {"position": 1, "estimated_wait_s": 0.0, "queue_length": 1}
    loading = {"type": "queued", "ticket_id": "q_000000000000", **wait, "reason": "loading", "progress": progress}
    answers: Answers = {"open": [loading]}
    plain_server(context, instead=answers)
    slots = {"total": 0, "free": 0, "leased": 0}
    status = {"slots": slots, "loading_workers": 1, "random_weights": True}
    workers = {"workers": [{"status": "loading", "progress": {"what": "loading", "done": 1, "total": 2}}]}
    context.route("**/status", lambda route: route.fulfill(json=status))
    context.route("**/workers", lambda route: route.fulfill(json=workers))
    context.add_init_script(COUNT_TONES)
    page = OpenPage(context, server.port)
    page.wait_text("#card-hint", "The model is still loading")
    page.wait_text("#random", "random weights")
    page.start("queued")
    page.wait_text("#card-title", "The model is loading")
    assert page.text("#card-text") == "warming up: 3 of 10"
    assert page.page.evaluate("document.getElementById('card-progress').value") == 0.3
    assert page.page.title() == "(1) In line – Duologue"
    page.page.click("#card-action")
    for reason, title in (("no_worker", "No worker is running"), ("busy", "You are number 1 in line")):
        answers["open"] = [{**loading, "reason": reason, "progress": None}]
        page.start("queued")
        page.wait_text("#card-title", title)
        page.page.click("#card-action")
    answers["open"] = [loading, {"type": "queue_done"}]
    page.start()
    assert page.page.evaluate("tones") == 2, "expected two tones after the wait"
    assert page.page.title() in ("Listening – Duologue", "Speaking – Duologue")


COUNT_TONES = """
    window.tones = 0;
    const start = OscillatorNode.prototype.start;
    OscillatorNode.prototype.start = function (at) { window.tones += 1; return start.call(this, at); };"""


def test_stall_is_shown_with_its_duration(context: BrowserContext, server: ServerProcess) -> None:
    """Also: a server that cannot change a running conversation does not end it."""
    unknown = {"type": "error", "code": "unknown_type", "error": "Unknown message type: adjust"}
    plain_server(context, instead={"adjust": [unknown], **{f"unit {n}": [] for n in range(2, 9)}})
    page = OpenPage(context, server.port).start()
    page.page.click("#open-more")
    page.page.select_option("#length", "long")
    page.wait_text("#notice", "at the next start")
    page.wait_units(1)
    page.wait_text("#stall", "No answer for 3 s", timeout=8)
    page.wait_text("#stall", "No answer for 4 s", timeout=8)


def test_leaving_asks_first(context: BrowserContext, server: ServerProcess) -> None:
    page = OpenPage(context, server.port).start()
    link = "#apps a[href='/audio_duplex']"
    page.page.click(link)
    page.wait_text("dialog.box[open]", "End this conversation?")
    page.page.click("dialog[open] button[value=no]")
    page.wait_units(len(page.report["results"]) + 1)
    page.page.click(link)
    page.page.click("dialog[open] button[value=yes]")
    page.page.wait_for_url("**/audio_duplex")
    page.wait_text("#card-title", "Just talk")


def test_recorded_session_is_announced_and_shared(context: BrowserContext, server: ServerProcess) -> None:
    sent = []
    context.route(
        "**/api/sessions/**", lambda route: (sent.append(route.request), route.fulfill(json={"status": "ok"}))
    )
    plain_server(context, instead={"prepare": [{**PREPARED, "recording_session_id": "rec_1"}]})
    page = OpenPage(context, server.port).start()
    page.wait_text("#rec", "Recorded")
    page.page.click("#open-more")
    page.page.click("#record")
    page.wait_units(3)
    page.page.click("#stop")
    page.wait_state("ended")
    page.wait_text("#card-more", "Share")
    assert not page.page.is_visible("#rec")
    with page.page.expect_download() as download:
        page.page.click("#card-more button:has-text('Save recording')")
    assert Path(download.value.path()).stat().st_size > 10_000 and download.value.suggested_filename.endswith(".webm")
    page.page.click("#card-more button:has-text('Share')")
    link = page.page.input_value("#share-link")
    assert link == f"http://127.0.0.1:{server.port}/s/rec_1"
    page.page.fill("#share-comment", "Listen!")
    page.page.click("#share-send")
    page.wait_text("#share-state", "Done")
    assert [request.url.rpartition("/")[2] for request in sent] == ["comment", "upload-recording"], sent
    assert sent[0].post_data_json == {"comment": "Listen!"}
    assert page.page.evaluate("navigator.clipboard.readText()") == link
    recent = page.page.evaluate("JSON.parse(localStorage.minicpmo45_recent_sessions)")
    assert [(one["id"], one["mode"]) for one in recent] == [("rec_1", "omni")], recent
    assert not page.errors, page.errors


def test_changes_during_a_conversation(context: BrowserContext, server: ServerProcess) -> None:
    """HD, answer length, instructions, settings, text and pictures take effect at once; volume and file are local."""
    inserted = {"type": "text_inserted", "n_rows": 4}
    answers: Answers = {"adjust": [{"type": "adjusted"}], "insert_text": [inserted]}
    got = plain_server(context, instead=answers)
    context.add_init_script(FAKE_RECOGNITION)
    page = OpenPage(context, server.port).start()
    page.wait_units(1)
    page.page.click("#open-more")
    page.page.check("#set-detailed")
    page.page.select_option("#length", "short")
    page.wait_text("#notice", "in effect")
    page.page.keyboard.press("Escape")
    page.page.click("#open-settings")
    page.page.fill("#set-prompt", "Whisper.")
    page.page.press("#set-prompt", "Tab")
    page.page.check("#set-own-words")
    page.wait_text("#turns", "words of my own")
    names = page.page.locator("#set-voice option").all_inner_texts()
    assert "high" in names, f"expected the registered voices, got {names}"
    page.page.click("#advanced summary")
    page.page.fill("#field-temperature", "0.3")
    page.page.press("#field-temperature", "Tab")
    page.page.select_option("#field-window_mode", "context")
    page.page.set_input_files("#source-file", VIDEO)
    page.wait_text("#source-state", "warmup.mp4")
    page.wait(lambda: re.fullmatch(r".*\d LUFS", page.text("#lufs-file")), "a level of the file")
    page.page.keyboard.press("Escape")
    page.page.set_input_files("#type-file", [{"name": "a.png", "mimeType": "image/png", "buffer": PICTURE}])
    page.page.wait_for_selector("#type-pictures img")
    page.page.fill("#type-text", "What is m?")
    page.page.press("#type-text", "Enter")
    n = page.report["units"]
    page.wait_units(n + 2)
    answers["insert_text"] = [{"type": "error", "code": "context_full", "error": "context: expected fewer rows"}]
    page.page.fill("#type-text", "Too much")
    page.page.press("#type-text", "Enter")
    page.wait_text("#turns .own .mark", "no room")
    assert page.page.locator("#turns .own img").count() == 1 and page.page.input_value("#type-text") == ""
    page.page.click("#stop")
    page.wait_state("ended")
    assert not page.page.is_visible("#type")
    messages = [json.loads(one) for one in got if isinstance(one, str)]
    changes = [message for message in messages if message["type"] == "adjust"]
    expected = [
        {"type": "adjust", "config": {"length_penalty": 0.9}},
        {"type": "adjust", "system_prompt": "Whisper."},
        {"type": "adjust", "config": {"temperature": 0.3}},
        {"type": "adjust", "config": {"window": {"mode": "context"}}},
    ]
    assert changes == expected, changes
    at = messages.index({"type": "insert_text", "text": "What is m?", "role": "user"})
    first, second = [message for message in messages[at:] if message["type"] == "audio_chunk"][:2]
    [shown] = first["frame_base64_list"]
    size = Image.open(io.BytesIO(base64.b64decode(shown))).size
    assert size == (60, 40), f"expected the picture, got one of {size}"
    # A unit that is sent before the server has accepted the text does not have to answer it.
    forced = [one.get("force_speak") for one in (first, second)]
    assert True in forced, f"expected an answer in one of the next two units, got {forced}"
    chunks = [message for message in messages if message["type"] == "audio_chunk"]
    assert "max_slice_nums" not in chunks[0] and chunks[-1]["max_slice_nums"] == 2, [one.keys() for one in chunks]
    assert chunks[-1].get("frame_base64_list"), "expected a picture of the file"
    page.start()
    prepare = [json.loads(one) for one in got if isinstance(one, str) and '"prepare"' in one][-1]
    wanted = {"length_penalty": 0.9, "temperature": 0.3, "window": {"mode": "context"}}
    assert prepare["config"] == wanted and prepare["system_prompt"] == "Whisper.", prepare


# Chromium recognizes speech on the device only after a download: this stands for it.
FAKE_RECOGNITION = """
    window.SpeechRecognition = class {
      static available = async () => "available";
      abort() {}
      start(track) {
        const words = [{ transcript: ` words of my own on the ${track.kind} track` }];
        setTimeout(() => this.onresult({ resultIndex: 0, results: [Object.assign(words, { isFinal: true })] }), 200);
      }
    };"""


def test_screen_replaces_the_camera(context: BrowserContext, server: ServerProcess) -> None:
    context.add_init_script(FAKE_SCREEN)
    page = OpenPage(context, server.port).start()
    page.wait_units(1)
    page.page.click("#open-more")
    page.page.click("#screen")
    page.wait(lambda: screen_size(page.page) == [640, 480], "the screen's picture")
    n = page.report["units"]
    page.wait_units(n + 2)
    assert page.sent_units()[n + 1][2], "expected pictures of the screen"
    page.page.click("#open-more")
    page.wait_text("#screen", "Stop sharing")
    page.page.click("#screen")
    page.wait(lambda: screen_size(page.page) == [320, 240], "the camera's picture")
    assert not page.errors, page.errors


def screen_size(page: Page) -> list[int]:
    return page.evaluate("[preview.videoWidth, preview.videoHeight]")


# Headless browsers have no screen to share: a canvas stands for it.
FAKE_SCREEN = """
    MediaDevices.prototype.getDisplayMedia = async () => {
      const canvas = Object.assign(document.createElement("canvas"), { width: 640, height: 480 });
      const pen = canvas.getContext("2d");
      setInterval(() => pen.fillRect(0, 0, 640 * Math.random(), 480), 100);
      return canvas.captureStream(5);
    };"""
