"""docs/gateway.md lists every route, and its examples match the responses."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from server.app import build_app
from tests.server.routes.asgi_gateway import IDLE, asgi_client, gateway_of


def routes_of(app: FastAPI) -> set[str]:
    found = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    for route in app.routes:
        path, methods = getattr(route, "path", None), getattr(route, "methods", None)
        if path is not None and path != "/docs/oauth2-redirect":
            found |= {f"{method} {path}" for method in (methods or ()) if method != "HEAD"} or {path}
    return found


def test_documentation_lists_all_routes(root: Path) -> None:
    text = (root / "docs" / "gateway.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `((?:[A-Z]+ )?/[^`]*)` \|", text, re.M))
    expected = routes_of(build_app(gateway_of()))
    assert named == expected, f"missing {sorted(expected - named)}, too many {sorted(named - expected)}"


def test_documented_examples_match_responses(root: Path) -> None:
    """A response has every field of its documented example."""
    text = (root / "docs" / "gateway.md").read_text(encoding="utf-8")
    examples = re.findall(r"`GET (/\S+)`:\n\n```json\n(.*?)```", text, re.S)
    assert len(examples) >= 3
    for path, example in examples:
        got = asyncio.run(_live_answer(path))
        assert _names(json.loads(example)) <= _names(got), f"{path}: expected {example}, got {got}"


async def _live_answer(path: str) -> Any:
    gateway = gateway_of()
    gateway.dispatcher.workers.record_health(
        gateway.dispatcher.workers.all[0], {**IDLE, "slots": {"total": 1, "free": 1}}
    )
    gateway.dispatcher.submit("omni_duplex", "omni_a")
    gateway.dispatcher.submit("omni_duplex", "omni_b")
    async with asgi_client(gateway) as http:
        return await http.get(path)


def _names(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return set().union(*({f"{path}.{key}"} | _names(one, f"{path}.{key}") for key, one in value.items()))
    if isinstance(value, list):
        return set().union(*(_names(one, f"{path}[]") for one in value))
    return set()
