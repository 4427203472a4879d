"""The pages of a gateway with keys: the link with a key, the cookie, the page to sign in, a live conversation."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from server.access.keys import hash_of
from tests.e2e.browser import OpenPage
from tests.e2e.serving import gateway_with_fake_worker
from worker.key_text import new_key

pytestmark = pytest.mark.programs


def test_pages_open_with_a_link_and_with_the_form(browser: Browser, tmp_path: Path) -> None:
    """The key leaves the address, the pages and their sockets work with the cookie, and no log has the key."""
    key = new_key()
    config = {"service": {"api_keys": [{"name": "visitor", "hash": hash_of(key)}]}}
    with gateway_with_fake_worker(tmp_path, "--listen", "1", "--speak", "8", config=config) as server:
        context = browser.new_context()
        page = context.new_page()
        address = f"http://127.0.0.1:{server.port}"
        page.goto(f"{address}/omni?lang=en#{key}")
        page.wait_for_selector("#card-action")
        assert key not in page.url and page.url.startswith(f"{address}/omni?lang=en"), page.url
        assert key not in page.evaluate("document.cookie"), "expected an HttpOnly cookie"
        [cookie] = [one for one in context.cookies() if one["name"] == "duologue_access"]
        assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and key not in cookie["value"], cookie
        talk = OpenPage(context, server.port).start()
        talk.wait_units(2)
        assert not any("401" in text for text in talk.errors), talk.errors
        talk.page.click("#stop")
        context.close()

        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}/?lang=en")
        assert "Sign in" in page.title()
        page.fill("#key", "duo_wrong")
        page.click("button")
        page.wait_for_selector("#note:not([hidden])")
        page.fill("#key", key)
        page.click("button")
        page.wait_for_selector("#form", state="detached")
        assert "Sign in" not in page.title(), page.title()
        context.close()
    assert key not in server.log, "expected no key in the gateway's log"
