"""The live page without a mouse, without sight, in both color schemes and on small screens."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext

from tests.e2e.accessibility import violations
from tests.e2e.browser import OpenPage
from tests.e2e.plain_server import plain_server
from tests.e2e.serving import ServerProcess

pytestmark = pytest.mark.programs

MIN_CONTRAST = 4.5
# Contrast of an element's text over a white picture: its own and its ancestors' backgrounds are laid over white.
CONTRAST = """(selector) => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], under) => [r, g, b].map((x, i) => a * x + (1 - a) * under[i]);
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = (color) => color.map((x) => linear(x / 255))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const chain = [];
  for (let one = document.querySelector(selector); one.id !== "stage"; one = one.parentElement) chain.unshift(one);
  let under = [255, 255, 255];
  for (const one of chain) under = over(numbers(getComputedStyle(one).backgroundColor), under);
  const text = over(numbers(getComputedStyle(chain.at(-1)).color), under);
  const [dark, bright] = [light(text), light(under)].sort((a, b) => a - b);
  return (bright + 0.05) / (dark + 0.05);
}"""
NAMED = "(id) => document.activeElement.id"


@pytest.mark.parametrize(("scheme", "lang"), [("light", "en"), ("dark", "zh")])
def test_no_serious_violation(browser: Browser, server: ServerProcess, scheme: str, lang: str) -> None:
    """Before, during and after a conversation, with its panels."""
    context = browser.new_context(color_scheme=scheme)
    page = OpenPage(context, server.port, lang=lang)
    page.page.wait_for_selector("#characters button")
    assert violations(page) == [], "before the start"
    page.page.click("#open-settings")
    page.page.click("#advanced summary")
    assert violations(page) == [], "settings"
    page.page.keyboard.press("Escape")
    page.start()
    page.wait_state("speaking")
    page.page.click("#open-more")
    assert violations(page) == [], "conversation"
    page.page.click("#pause")
    assert violations(page) == [], "paused"
    page.page.click("#stop")
    page.wait_state("ended")
    assert violations(page) == [], "ended"
    context.close()


def test_keyboard_and_screen_reader(context: BrowserContext, server: ServerProcess) -> None:
    """Focus, arrow keys, letters, headings, names, announcements and contrasts of one conversation."""
    texts = ["It is a red ball. ", "It rolls ", "down the hill"]
    speech = {"type": "result", "is_listen": False, "cost_all_ms": 1.0, "wall_clock_ms": 2.0, "server_send_ts": 0.0}
    units = {
        f"unit {n}": [{**speech, "kv_cache_length": 1, "current_time": n, "text": text, "end_of_turn": n == 3}]
        for n, text in enumerate(texts, 1)
    }
    plain_server(context, instead=units)
    page = OpenPage(context, server.port)
    name = page.page.get_attribute("#language", "aria-label")
    assert page.text("#language") in name, f"expected a name with the visible text, got {name!r}"
    page.page.focus("#card-action")
    page.page.keyboard.press("Enter")
    page.wait_state("listening", "speaking")
    assert page.page.evaluate(NAMED) == "interrupt", "expected the focus at the button that Space presses"
    for key, expected in (("ArrowRight", "listen"), ("Home", "mute"), ("ArrowLeft", "stop"), ("End", "stop")):
        page.page.keyboard.press(key)
        assert page.page.evaluate(NAMED) == expected, f"{key}: expected {expected}"
    stops = page.page.locator("#controls button[tabindex='0']").count()
    assert stops == 1, f"expected one tab stop in the toolbar, got {stops}"
    assert page.page.locator("h1").inner_text() == "Live conversation with video"
    page.wait_units(1)
    assert page.page.locator("#spoken p").all_inner_texts() == ["It is a red ball."], (
        "expected the first sentence at once"
    )
    page.wait_units(3)
    assert page.page.locator("#spoken p").all_inner_texts()[1] == "It rolls down the hill"
    page.page.keyboard.press("l")
    assert page.page.get_attribute("#listen", "aria-pressed") == "true", "expected L to press a button"
    page.page.focus("#interrupt")
    page.page.keyboard.press("Space")
    page.wait(lambda: page.report["flushes"], "an interrupt")
    assert not page.page.evaluate("mute.getAttribute('aria-pressed') === 'true'")
    page.page.keyboard.press("p")
    page.wait_state("paused")
    for selector in ("#card-title", "#card-text", "#badge-text", "#badge-time", ".meter.you span", "#mute span"):
        ratio = page.page.evaluate(CONTRAST, selector)
        assert ratio >= MIN_CONTRAST, (
            f"{selector}: expected at least {MIN_CONTRAST} over a white picture, got {ratio:.2f}"
        )
    level = "(id) => document.getElementById(id).style.transform"
    for source in ("mic-level", "model-level"):
        page.wait(lambda id=source: page.page.evaluate(level, id) in ("", "scaleX(0)"), f"paused: {source} to be zero")
    page.page.keyboard.press("?")
    page.wait_text("#help", "Interrupt")
    page.page.click("#set-keys")
    page.page.keyboard.press("Escape")
    page.page.keyboard.press("l")
    assert page.page.get_attribute("#listen", "aria-pressed") == "true", "expected letters to be off"
    page.page.click("#stop")
    page.wait_state("ended")
    assert page.page.evaluate(NAMED) == "card-action", "expected the focus on the button of the card"


def test_small_screen_shows_everything(browser: Browser, server: ServerProcess, tmp_path: Path) -> None:
    context = browser.new_context(viewport={"width": 320, "height": 640}, has_touch=True)
    page = OpenPage(context, server.port)
    wide = "document.documentElement.scrollWidth"
    assert page.page.evaluate(wide) == 320, "before the start"
    shown = page.page.evaluate("getComputedStyle(document.querySelector('#pace summary'), '::after').content")
    assert not page.page.evaluate("pace.open") and "▾" in shown, "expected a closed plot with a sign that it opens"
    page.page.click("#open-settings")
    edges = page.page.evaluate(
        "[document.querySelector('#settings > header').getBoundingClientRect().bottom,"
        " document.querySelector('#settings form').getBoundingClientRect().top]"
    )
    assert edges[0] <= edges[1] + 0.1, f"expected the content to scroll below the header, got {edges}"
    assert page.page.evaluate("document.querySelector('#settings form').scrollWidth") <= 320
    page.page.keyboard.press("Escape")
    page.start()
    page.page.click("#open-more")
    page.page.screenshot(path=tmp_path / "small.png")
    assert page.page.evaluate(wide) == 320, "during a conversation"
    sizes = page.page.evaluate(
        "[...document.querySelectorAll('#controls button:not([hidden])')]"
        ".map((one) => one.getBoundingClientRect().width)"
    )
    assert len(sizes) == 7 and min(sizes) >= 24, f"expected seven buttons of at least 24 pixels, got {sizes}"
    page.page.click("#stop")
    context.close()
