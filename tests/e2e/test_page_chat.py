"""The chat page with a worker of the embedded checkpoint."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, FilePayload

from tests.conformance.servers import Servers
from tests.e2e.accessibility import overflow, violations
from tests.e2e.browser import OpenPage, open_browser

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def browser(media: tuple[Path, Path]) -> Iterator[Browser]:
    """Of this file alone, which runs among those that share the worker."""
    with open_browser(media) as one:
        yield one


PATH = "/turnbased"
SHORT = {"max_new_tokens": 6}
LONG = {"max_new_tokens": 4000, "length_penalty": 5, "temperature": 0}  # the most likely tokens never end it


def picture() -> FilePayload:
    data = io.BytesIO()
    Image.new("RGB", (160, 120), (200, 60, 40)).save(data, "PNG")
    return {"name": "red.png", "mimeType": "image/png", "buffer": data.getvalue()}


def open_chat(context: BrowserContext, server: Servers, chat: dict[str, Any] = SHORT, **settings: Any) -> OpenPage:
    stored = json.dumps({"preset": "", "prompt": "You are kind.", "chat": chat, **settings})
    context.add_init_script(f"localStorage.duologue_chat ??= {json.dumps(stored)}")
    return OpenPage(context, server.gateway, PATH)


def ask(page: OpenPage, text: str) -> None:
    page.page.fill("#text", text)
    page.page.press("#text", "Enter")


def answers(page: OpenPage) -> list[dict[str, Any]]:
    return [one for one in page.report["messages"] if one["role"] == "assistant"]


def wait_answers(page: OpenPage, n: int) -> list[dict[str, Any]]:
    page.wait(lambda: page.state == "idle" and len(answers(page)) == n, f"{n} answers")
    return answers(page)


def test_turns_with_a_picture(context: BrowserContext, servers: Servers) -> None:
    page = open_chat(context, servers)
    page.page.set_input_files("#file", [picture()])
    page.page.wait_for_selector("#attached img")
    ask(page, "What is it?")
    [first] = wait_answers(page, 1)
    assert first["text"] and "error" not in first, f"got {first}"
    ask(page, "And then?")
    _, second = wait_answers(page, 2)
    assert second["text"] and page.page.locator("#messages img").count() == 1

    request = page.sent[-1]
    roles = [message["role"] for message in request["messages"]]
    assert roles == ["system", "user", "assistant", "user"], f"expected the whole conversation, got {roles}"
    assert [item["type"] for item in request["messages"][1]["content"]] == ["image", "text"]
    assert request["streaming"] is True and request["generation"] == SHORT and "tts" not in request

    page.page.reload()
    page.wait(lambda: len(page.report["messages"]) == 4, "the stored conversation")
    page.page.get_by_role("button", name="Edit").first.click()
    assert page.page.input_value("#text") == "What is it?" and page.page.locator("#attached img").count() == 1
    ask(page, "Which color?")
    [edited] = wait_answers(page, 1)
    assert edited["text"] and page.report["messages"][0]["text"] == "Which color?"
    page.page.click("#open-chats")
    with page.page.expect_download() as saved:
        page.page.click("#save-text")
    text = Path(saved.value.path()).read_text(encoding="utf-8")
    assert text.startswith("You: [red.png] Which color?\n\nAnswer: "), f"got {text!r}"
    with page.page.expect_download() as saved:
        page.page.click("#export")
    kept = json.loads(Path(saved.value.path()).read_text(encoding="utf-8"))
    [question, reply] = kept["messages"]
    types = [item["type"] for item in question["content"]]
    assert types == ["image", "text"] and reply["content"][0]["text"] == edited["text"], kept

    prompt = [{"type": "text", "text": "Be brief."}, {"type": "image", "name": "b.png", "data": kept_picture(question)}]
    page.page.set_input_files("#import", [as_file({**kept, "system": prompt})])
    page.wait(lambda: page.page.locator("#messages img").count() == 1, "the imported chat")
    page.page.click("#new")
    assert page.report["messages"] == []
    page.page.click("#open-chats")
    page.wait(lambda: page.page.locator("#chats-list li").count() == 2, "the chat and its imported copy")
    assert page.page.locator("#chats-list .open").all_inner_texts()[0].startswith("Which color?")
    page.page.locator("#chats-list .quiet").first.click()
    page.page.click("dialog.box[open] button[value=yes]")
    page.wait(lambda: page.page.locator("#chats-list li").count() == 1, "one chat less")
    page.page.set_input_files("#import", [{"name": "x.json", "mimeType": "application/json", "buffer": b"[3]"}])
    page.wait_text("#chats-state", "Expected an exported chat")
    page.page.locator("#chats-list .open").click()
    page.wait(lambda: len(page.report["messages"]) == 2, "the other chat")
    assert page.errors == []


def kept_picture(message: dict[str, Any]) -> str:
    return next(item["data"] for item in message["content"] if item["type"] == "image")


def as_file(body: dict[str, Any]) -> FilePayload:
    return {"name": "chat.json", "mimeType": "application/json", "buffer": json.dumps(body).encode()}


def test_spoken_answer_is_played_and_kept(context: BrowserContext, servers: Servers) -> None:
    page = open_chat(context, servers, spoken=True)
    ask(page, "Hello")
    page.wait(lambda: page.report["isSpeaking"], "speech")
    page.page.click("#stop")
    page.wait(lambda: page.state == "idle" and not page.report["isSpeaking"], "silence")
    [answer] = answers(page)
    assert answer["soundBytes"] > 44, f"expected speech to replay, got {answer}"
    page.page.wait_for_selector("#messages audio")
    request = page.sent[-1]
    assert request["tts"]["enabled"] and request["messages"][0]["content"][1]["type"] == "audio"

    page.page.click("#open-settings")
    page.page.click("#items-toggle")
    page.page.wait_for_selector("#items li")
    page.page.set_input_files("#items input[data-type=image]", [picture()])
    page.page.wait_for_selector("#items img")
    page.page.get_by_role("button", name="Move item 4 up").click()
    page.page.keyboard.press("Enter")  # the focus follows the item
    page.page.keyboard.press("Escape")
    page.page.focus("#text")
    page.page.keyboard.down("Space")
    page.page.wait_for_selector("#record[aria-pressed=true]")
    page.wait_text("#record-time", "0:01")
    page.page.keyboard.up("Space")
    page.page.wait_for_selector("#attached audio")
    page.page.click("#send")
    page.wait(lambda: page.state == "answering", "a prompt that the worker has read")
    page.page.click("#stop")
    request = page.sent[-1]
    assert [item["type"] for item in request["messages"][0]["content"]] == ["text", "image", "audio", "text"]
    assert [item["type"] for item in request["messages"][-1]["content"]] == ["audio"]
    assert page.errors == []


def test_stop_ends_the_answer(context: BrowserContext, servers: Servers) -> None:
    page = open_chat(context, servers, LONG)
    ask(page, "Tell me a long story")
    page.wait(lambda: answers(page) and answers(page)[-1]["text"], "the begin of the answer")
    page.page.click("#stop")
    [answer] = wait_answers(page, 1)
    assert answer["stopped"] == "user" and answer["text"]
    page.wait_text("#messages", "Stopped.")


def test_refused_request_is_shown(context: BrowserContext, servers: Servers) -> None:
    page = open_chat(context, servers)
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"not a picture"}
    page.page.set_input_files("#file", [broken])
    ask(page, "What is it?")
    [answer] = wait_answers(page, 1)
    assert answer["error"] and page.text(".failure") == answer["error"]
    page.page.set_input_files("#file", [{"name": "a.txt", "mimeType": "text/plain", "buffer": b"text"}])
    page.wait_text("#status", "a.txt: expected a picture, a sound or a video")


@pytest.mark.parametrize(("scheme", "lang"), [("light", "en"), ("dark", "zh")])
def test_accessible_on_a_phone(browser: Browser, servers: Servers, scheme: str, lang: str) -> None:
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce", viewport={"width": 320, "height": 640})
    page = OpenPage(context, servers.gateway, PATH, lang=lang)
    page.page.set_input_files("#file", [picture()])
    page.page.wait_for_selector("#attached img")
    page.page.wait_for_selector("#random")  # the warning that the checkpoint is a test model
    assert (violations(page), overflow(page)) == ([], 0), "composer"
    page.page.click("#send")
    wait_answers(page, 1)
    assert (violations(page), overflow(page)) == ([], 0), "transcript"
    page.page.click("#open-settings")
    page.page.click("#items-toggle")
    page.page.wait_for_selector("#items textarea")
    assert (violations(page), overflow(page)) == ([], 0), "settings"
    page.page.keyboard.press("Escape")
    page.page.click("#page-help")
    page.wait_text("#help summary", "添加哪些文件" if lang == "zh" else "Which files can I add?")
    if scheme == "dark":
        page.page.keyboard.press("Escape")
        page.page.click("#open-chats")
        page.page.wait_for_selector("#chats-list li")
    assert (violations(page), overflow(page)) == ([], 0), "chats" if scheme == "dark" else "help"
    assert page.errors == []
    context.close()
