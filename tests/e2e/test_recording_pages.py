"""The pages of recordings: the viewer of a session and the list."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page

from server.recording.recordings import Recordings
from tests.e2e.accessibility import violations
from tests.e2e.browser import OpenPage
from tests.e2e.serving import ServerProcess, gateway_with_fake_worker
from tests.server.recording.recorded import Conversation, recordings_in, result, tone, wait_done
from tests.server.recording.test_duplex import MODEL, USER, picture
from tests.server.recording.test_turns import b64
from worker.protocol.text_messages import InsertText, TextInserted
from worker.protocol.wire import json_text

pytestmark = pytest.mark.programs

N_UNITS = 6
PAINTED = """(side) => {
  const canvas = document.querySelector("#wave-canvas");
  const half = canvas.height / 2;
  const { data } = canvas.getContext("2d").getImageData(0, side ? half : 0, canvas.width, half);
  let n = 0;
  for (let i = 3; i < data.length; i += 4) n += data[i] > 0;
  return n / (data.length / 4);
}"""
NARROW = "() => document.documentElement.scrollWidth <= window.innerWidth"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def ids(data: Path) -> dict[str, str]:
    """Complete recordings by kind."""
    with recordings_in(data / "data") as recordings:
        made = {"duplex": _talk(recordings), "chat": _chat(recordings), "doomed": _chat(recordings)}
        for one in made.values():
            wait_done(recordings, one)
    return made


@pytest.fixture(scope="module")
def server(data: Path, ids: dict[str, str]) -> Iterator[ServerProcess]:
    with gateway_with_fake_worker(data, config={"recording": {"enabled": True}}) as one:
        yield one


def _talk(recordings: Recordings) -> str:
    recording = recordings.start("omni_duplex", "omni_red_ball")
    talk = Conversation(recording, system_prompt="Be kind.", config={"temperature": 0.5})
    for number in range(1, N_UNITS + 1):
        speaks = number in (3, 4)
        if number == 3:
            talk.client(InsertText(text="What is it?"))
            talk.worker(TextInserted(n_rows=5))
        talk.chunk(USER if number < 3 else 0.02 * USER, picture("red", (160, 120)))
        words = {3: "It is ", 4: "a red ball."}.get(number, "")
        talk.worker(result(number, text=words, sound=MODEL if speaks else None, ends=number == 4))
    recording.end()
    return recording.recording_id


def _chat(recordings: Recordings) -> str:
    recording = recordings.start("chat", "chat_x")
    sound = b64(tone(440, 1, 16_000).astype("<f4").tobytes())
    content = [{"type": "text", "text": "What is this?"}, {"type": "image", "data": b64(picture("blue"))}]
    content.append({"type": "audio", "data": sound})
    recording.from_client(json_text({"messages": [{"role": "user", "content": content}]}))
    answer = {"type": "done", "text": "Something blue.", "generated_tokens": 4, "audio_data": b64(bytes(4 * 24_000))}
    recording.from_worker(json_text(answer))
    recording.end()
    return recording.recording_id


def check(opened: OpenPage) -> None:
    """No console error, no serious finding of axe-core in both color schemes, no scrolling sideways on a phone."""
    for scheme in ("dark", "light"):
        opened.page.emulate_media(color_scheme=scheme)
        assert violations(opened) == [], scheme
    opened.page.set_viewport_size({"width": 320, "height": 640})
    assert opened.page.evaluate(NARROW), "expected no horizontal scrolling at 320 px"
    opened.page.set_viewport_size({"width": 1280, "height": 800})
    assert opened.errors == []


def test_viewer_replays_a_duplex_session(context: BrowserContext, server: ServerProcess, ids: dict[str, str]) -> None:
    opened = OpenPage(context, server.port, f"/s/{ids['duplex']}")
    page = opened.page
    assert page.inner_text("h1") == "Video conversation"
    assert page.locator("#entries > li").count() == N_UNITS
    assert page.locator("#entries .words").all_inner_texts() == ["It is ", "a red ball."]
    assert page.locator("#entries .written").all_inner_texts() == ["You: What is it?"]
    assert page.locator("#entries img").count() == N_UNITS
    page.wait_for_function(
        "() => document.querySelector('#media').duration > 5 && document.querySelector('#clock').value"
    )
    assert page.evaluate(PAINTED, 0) > 0.05 and page.evaluate(PAINTED, 1) > 0.05, "expected both channels"

    page.click("#wave", position={"x": page.locator("#wave").bounding_box()["width"] / 2, "y": 20})
    page.wait_for_function("() => Math.abs(document.querySelector('#media').currentTime - 3) < 0.1")
    page.wait_for_selector("#entries > li:nth-child(4)[aria-current]")
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('#media').currentTime > 5.9")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => document.querySelector('#media').currentTime < 1.2")
    assert page.get_attribute("#wave", "aria-valuetext") == "0:01 of 0:06"

    page.fill("#comment", "Well seen.")
    page.click("#comment-form button")
    page.wait_for_selector("#comment-state:has-text('Saved')")
    page.click("#copy")
    page.wait_for_selector("#state:has-text('copied')")
    assert page.evaluate("navigator.clipboard.readText()").endswith(f"/s/{ids['duplex']}")
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == f"{ids['duplex']}.zip"
    check(opened)

    upload = {"file": {"name": "x.wav", "mimeType": "audio/wav", "buffer": _replay(server, ids["duplex"], page)}}
    api = f"http://127.0.0.1:{server.port}/api/sessions/{ids['duplex']}"
    assert page.request.post(f"{api}/upload-recording", multipart=upload).ok
    again = OpenPage(context, server.port, f"/s/{ids['duplex']}")
    assert again.page.input_value("#comment") == "Well seen."
    again.page.wait_for_function("() => document.querySelector('#uploaded-media').duration > 5")
    assert again.errors == []


def _replay(server: ServerProcess, recording_id: str, page: Page) -> bytes:
    path = f"/api/sessions/{recording_id}/assets/merged_replay.wav"
    return page.request.get(f"http://127.0.0.1:{server.port}{path}").body()


def test_viewer_shows_the_transcript_of_turns(
    context: BrowserContext, server: ServerProcess, ids: dict[str, str]
) -> None:
    opened = OpenPage(context, server.port, f"/s/{ids['chat']}")
    assert opened.page.locator("#entries .words").all_inner_texts() == ["What is this?", "Something blue."]
    assert opened.page.locator("#entries audio").count() == 2 and opened.page.locator("#entries img").count() == 1
    opened.page.click("#language")
    assert opened.page.inner_text("h1") == "聊天" and opened.page.inner_text("#entries h3 >> nth=0") == "你"
    check(opened)


def test_list_opens_and_deletes_recordings(context: BrowserContext, server: ServerProcess, ids: dict[str, str]) -> None:
    opened = OpenPage(context, server.port, "/sessions")
    page = opened.page
    assert page.url.endswith("/recordings?lang=en")
    n = page.locator("#list > li").count()
    assert n == len(ids) and page.request.get(f"http://127.0.0.1:{server.port}/sessions").json()["total"] == 0
    check(opened)
    page.click(f"a[href='/s/{ids['doomed']}']")
    page.wait_for_selector("#entries > li")
    page.click("#delete")
    page.keyboard.press("Escape")
    assert page.locator("#entries > li").count() == 1, "expected Escape to keep the recording"
    page.click("#delete")
    page.click("dialog button[value=yes]")
    page.wait_for_selector(f"#list > li >> nth={n - 2}")
    assert page.locator("#list > li").count() == n - 1
    assert opened.errors == []
    answer = page.goto(f"http://127.0.0.1:{server.port}/s/{ids['doomed']}")
    assert answer.status == 404 and page.inner_text("h1") == "Recording not found"
    programs = page.request.get(answer.url, headers={"Accept": "application/json"})
    assert programs.status == 404 and "Session not found" in programs.json()["detail"]
