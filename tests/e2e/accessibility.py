"""What axe-core finds on a page."""

from importlib.resources import files
from typing import Any

from tests.e2e.browser import OpenPage

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


def violations(page: OpenPage) -> list[dict[str, Any]]:
    """Serious and critical findings of axe-core."""
    if page.page.evaluate("typeof axe === 'undefined'"):
        page.page.evaluate(AXE)
    # By default axe-core also describes every element that passes.
    found = page.page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [
        {
            "rule": one["id"],
            "nodes": [(node["html"][:160], node["any"] and node["any"][0]["message"]) for node in one["nodes"]],
        }
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def overflow(page: OpenPage) -> int:
    """Pixels by which the page is wider than the window."""
    return page.page.evaluate("document.documentElement.scrollWidth - innerWidth")
