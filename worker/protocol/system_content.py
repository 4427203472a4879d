"""`prepare.system_content`: a system prompt as a list of text and sound items, as other clients send it. Torch-free.

Contains the parser only; the caller builds the prompt.
"""

from worker.describe import shown
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import WireError


def texts_and_sound(items: object) -> tuple[list[str], str | None]:
    """The texts of `system_content`, and its first sound in base64. Raises: WireError bad_message."""
    texts, sound = [], None
    for item in known_items(items):
        if item["type"] == "text":
            texts.append(item["text"])
        else:
            sound = sound or item["data"]
    return texts, sound


def known_items(items: object) -> list[dict[str, str]]:
    """The items of `system_content` without empty ones, each as its `type` with `text` or, in base64, `data`.

    Raises: WireError bad_message.
    """
    if isinstance(items, str):
        items = [{"type": "text", "text": items}]
    if not isinstance(items, list):
        raise _bad_content("", "a list of texts and sounds", items)
    found = []
    for i, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind not in ("text", "audio"):
            raise _bad_content(f"[{i}]", 'an object whose type is "text" or "audio"', item)
        key = "text" if kind == "text" else "data"
        value = item.get(key)
        if value is not None and not isinstance(value, str):
            raise _bad_content(f"[{i}].{key}", "text", value)
        if value:
            found.append({"type": kind, key: value})
    return found


def _bad_content(where: str, expected: str, got: object) -> WireError:
    what = f"prepare.system_content{where}"
    return WireError(ErrorCode.BAD_MESSAGE, what, expected=expected, got=shown(got))
