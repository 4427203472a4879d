"""One browser for all tests of a file, and the media of its devices."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext

from tests.e2e.browser import make_media, open_browser
from tests.e2e.serving import TALKATIVE, ServerProcess, gateway_with_fake_worker


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_media(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def browser(media: tuple[Path, Path]) -> Iterator[Browser]:
    with open_browser(media) as one:
        yield one


@pytest.fixture(autouse=True)
def _pages_end_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close the contexts that a test leaves open: their pages would go on talking beside the next tests."""
    browser = request.getfixturevalue("browser") if "browser" in request.fixturenames else None
    kept = [] if browser is None else browser.contexts
    yield
    for left in [] if browser is None else browser.contexts:
        if left not in kept:
            left.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser context with its own storage."""
    one = browser.new_context(
        viewport={"width": 1280, "height": 800}, permissions=["clipboard-write", "clipboard-read"]
    )
    yield one
    one.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A gateway with a talkative fake worker. Files that need other flags or settings have a `server` of their own."""
    config = {"service": {"allowed_hosts": ["duologue.test"]}}
    with gateway_with_fake_worker(tmp_path_factory.mktemp("gateway"), *TALKATIVE, config=config) as one:
        yield one
