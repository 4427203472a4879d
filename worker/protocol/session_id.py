"""The session id in log lines, messages and URLs. Torch-free."""

import re

MAX_CHARS = 128
DEFAULT_ID = "duplex"
_INVALID = re.compile(r"[^A-Za-z0-9_-]")


def session_id_of(given: str | None, default: str = DEFAULT_ID) -> str:
    """A client's id with every character except letters, digits, `_` and `-` replaced by `_`; idempotent."""
    return _INVALID.sub("_", given or "")[:MAX_CHARS] or default
