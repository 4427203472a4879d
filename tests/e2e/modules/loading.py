"""Functions of the pages' modules, called from Python."""

from typing import Any

from playwright.sync_api import Page

STATIC = "/static"


def call(page: Page, module: str, body: str, given: Any = None) -> Any:
    """Run `body` with the module's exports as `lib`, and with `given`."""
    return page.evaluate(f"async (given) => {{ const lib = await import('{STATIC}/{module}'); {body} }}", given)
