"""Ids of recordings: they sort by time and cannot be guessed."""

import re
import secrets
from datetime import datetime

from worker.protocol.session_id import session_id_of

TOKEN_BYTES = 16
MAX_NAME_CHARS = 64  # of the session's id within the recording's
_ID = re.compile(rf"[0-9]{{8}}_[0-9]{{6}}_[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}_[0-9a-f]{{{2 * TOKEN_BYTES}}}")


def new_recording_id(session_id: str, started_at: datetime) -> str:
    """An id such as `20260501_101500_omni_x_<token>`; the token is 128 random bits in hexadecimal digits.

    Args:
        session_id: its prefix, such as `omni_`, stays readable in the id.
        started_at: in UTC.
    """
    name = session_id_of(session_id)[:MAX_NAME_CHARS]
    return f"{started_at:%Y%m%d_%H%M%S}_{name}_{secrets.token_hex(TOKEN_BYTES)}"


def is_recording_id(text: str) -> bool:
    """Whether `text` has the form of a recording's id. Such a text is a safe name of a folder."""
    return _ID.fullmatch(text) is not None
