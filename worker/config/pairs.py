"""KEY=VALUE arguments of command lines. Torch-free."""

import json
from collections.abc import Sequence
from typing import Any

from models.errors import SettingsError
from worker.describe import shown


def with_pairs(given: dict[str, Any], pairs: Sequence[str], *, plain_text: bool) -> dict[str, Any]:
    """Settings with the pairs of `--set` laid over them; a key `a.b` sets `b` inside the object `a`.

    Args:
        given: the settings; not modified.
        pairs: KEY=VALUE, the value in JSON.
        plain_text: whether a value that is not JSON is taken as text.
    Raises:
        SettingsError: for an argument without a key or `=`, and for a value that is not JSON.
    """
    merged = dict(given)
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise SettingsError("--set", expected="KEY=VALUE", got=shown(pair))
        value = _value(key, text, plain_text=plain_text)
        group, dot, name = key.partition(".")
        if dot:
            value = {name: value}
        previous = merged.get(group)
        merged[group] = {**previous, **value} if isinstance(previous, dict) and isinstance(value, dict) else value
    return merged


def _value(key: str, text: str, *, plain_text: bool) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if plain_text:
            return text
        expected = 'a value in JSON, such as 5, true, null or "text"'
        raise SettingsError(f"--set {key}", expected=expected, got=shown(text)) from None
