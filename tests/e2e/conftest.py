"""One browser for most files, and the media of its devices."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext

from tests.e2e.browser import make_media, open_browser
from tests.e2e.serving import TALKATIVE, ServerProcess, gateway_with_fake_worker
from tests.scheduling import at_group_end


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_media(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="session")
def shared_browser(media: tuple[Path, Path], pytestconfig: pytest.Config) -> Iterator[Browser]:
    """Started once: a start takes as much processor time as several tests of a page."""
    with ExitStack() as stack:
        at_group_end(pytestconfig, stack.close)
        yield stack.enter_context(open_browser(media))


@pytest.fixture(scope="module")
def browser(shared_browser: Browser) -> Browser:
    """The browser of most files. Those that need other media or a shared worker have a `browser` of their own."""
    return shared_browser


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
def shared_server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[ServerProcess]:
    """A gateway with a talkative fake worker."""
    config, folder = {"service": {"allowed_hosts": ["duologue.test"]}}, tmp_path_factory.mktemp("gateway")
    with ExitStack() as stack:
        at_group_end(pytestconfig, stack.close)
        yield stack.enter_context(gateway_with_fake_worker(folder, *TALKATIVE, config=config))


@pytest.fixture(scope="session")
def server(shared_server: ServerProcess) -> ServerProcess:
    """The server of most files. Those that need other flags or settings have a `server` of their own."""
    return shared_server
