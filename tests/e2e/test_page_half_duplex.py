"""The half-duplex page with a worker of the embedded checkpoint and a microphone that plays a sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from playwright.sync_api import Browser

from tests.conformance.servers import Servers
from tests.e2e.accessibility import overflow, violations
from tests.e2e.browser import OpenPage, open_browser
from worker.protocol.wire import Sound

pytestmark = pytest.mark.programs

PATH = "/half_duplex"
SHORT = {"vad.threshold": 0.5, "generation.max_new_tokens": 6, "tts.enabled": False}


@pytest.fixture(scope="module")
def speaking(media: tuple[Path, Path], root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser whose microphone plays a sentence and 3 s of silence in a loop."""
    wave, rate = soundfile.read(root / "tests/data/greeting.wav", dtype="float32")
    path = tmp_path_factory.mktemp("sentence") / "microphone.wav"
    soundfile.write(path, np.concatenate((np.zeros(2 * rate), wave, np.zeros(3 * rate))), rate, "PCM_16")
    with open_browser((path, media[1])) as browser:
        yield browser


def open_page(browser: Browser, server: Servers, config: dict[str, Any], **options: Any) -> OpenPage:
    context = browser.new_context(reduced_motion="reduce", **options)
    stored = json.dumps({"preset": "", "prompt": "You are kind.", "config": config})
    context.add_init_script(f"localStorage.duologue_half_duplex ??= {json.dumps(stored)}")
    return OpenPage(context, server.gateway, PATH)


def test_turn_from_the_microphone(speaking: Browser, servers: Servers) -> None:
    page = open_page(speaking, servers, SHORT)
    page.page.click("#start")
    page.wait_state("listening")
    page.wait_state("hearing")
    page.wait(lambda: any(not turn["isOpen"] for turn in page.report["turns"]), "a turn")
    page.wait_state("listening", "hearing")
    turn = page.report["turns"][0]
    assert turn["text"] and turn["heardMs"] > 500 and turn["text"] in page.text("#turns"), f"got {turn}"
    assert page.text("#remaining").startswith(("4:", "5:00")) and int(page.text("#count")) >= 1
    assert page.text("#spoken").strip(), "expected the answer in the live region"
    page.page.click("#stop")
    page.wait_state("ended")
    page.page.click("#open-settings")
    page.wait(lambda: page.page.locator("#set-mic option").count() > 1, "the microphones")

    [prepare] = page.sent_kind("prepare")
    assert prepare["config"] == {
        "vad": {"threshold": 0.5},
        "generation": {"max_new_tokens": 6},
        "tts": {"enabled": False},
    }
    assert prepare["system_content"][-1] == {"type": "text", "text": "You are kind."}
    sizes = {Sound(chunk["audio_base64"]).samples("sound").size for chunk in page.sent_kind("audio_chunk")}
    assert sizes == {8000}, f"expected half a second in each message, got {sizes} samples"
    assert page.sent_kind("stop") and page.errors == []


def test_spoken_answer_is_interrupted(speaking: Browser, servers: Servers) -> None:
    # The most likely token is not the end of the answer, whose score is divided by 5.
    endless = {"generation.max_new_tokens": 4096, "generation.length_penalty": 5, "generation.temperature": 0}
    config = {**SHORT, "tts.enabled": True, **endless}
    page = open_page(speaking, servers, config)
    page.page.click("#start")
    page.wait_state("speaking")
    page.page.wait_for_timeout(1500)  # some of it is played; the answer is much longer
    page.page.click("#interrupt")
    page.wait(lambda: not page.report["turns"][0]["isOpen"], "the end of the turn")
    page.wait_state("listening", "hearing")
    page.page.click("#stop")
    page.wait_state("ended")
    assert page.report["turns"][0]["stopped"] == "interrupted" and page.text("#failure") == "" and page.errors == []
    with page.page.expect_download() as saved:
        page.page.click("#save-sound")
    sound, rate = soundfile.read(saved.value.path())
    you, answer = np.abs(sound).max(axis=0)
    assert rate == 16000 and sound.shape[1] == 2 and min(you, answer) > 0.01, f"got peaks {you:.3f} and {answer:.3f}"


def test_time_is_over(speaking: Browser, servers: Servers) -> None:
    page = open_page(speaking, servers, {**SHORT, "session.timeout_s": 1})
    page.page.click("#start")
    page.wait_state("ended")
    page.wait_text("#failure", "The time of this conversation is over")
    assert page.page.is_visible("#start") and page.errors == []


@pytest.mark.parametrize(("scheme", "lang"), [("light", "en"), ("dark", "zh")])
def test_accessible_on_a_phone(speaking: Browser, servers: Servers, scheme: str, lang: str) -> None:
    page = open_page(speaking, servers, SHORT, color_scheme=scheme, viewport={"width": 320, "height": 640})
    page.page.goto(f"{page.page.url.split('?')[0]}?lang={lang}")
    page.page.wait_for_selector("#random")  # the checkpoint is a test model
    assert (violations(page), overflow(page)) == ([], 0), "before the start"
    page.page.click("#open-settings")
    assert (violations(page), overflow(page)) == ([], 0), "settings"
    page.page.keyboard.press("Escape")
    page.page.focus("#start")
    page.page.keyboard.press("Enter")
    page.wait_state("listening", "hearing", "thinking")
    focused = page.page.evaluate("document.activeElement.closest('#controls') !== null")
    assert focused, "expected the focus to stay in the controls"
    assert (violations(page), overflow(page)) == ([], 0), "conversation"
    assert page.errors == []
