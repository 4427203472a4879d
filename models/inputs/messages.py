"""What a chat request says: typed messages of text, images and sound, checked on entry. Torch-free.

Knows no tokens and no template.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image

from models.errors import MessageError

Role = Literal["system", "user", "assistant"]
ROLES = get_args(Role)
Part = str | Image.Image | np.ndarray


@dataclass(frozen=True, eq=False)
class ChatMessage:
    """One turn. parts: text, images and sound (mono float samples at 16 kHz, [n]) in the order they are said."""

    role: Role
    parts: tuple[Part, ...]


def parse_messages(messages: object) -> tuple[ChatMessage, ...]:
    """Check a conversation: a non-empty list of `{"role": ..., "content": text, or list of parts}`.

    Raises: MessageError naming the message and part that is wrong.
    """
    if not _is_list(messages):
        raise MessageError("messages", expected="a list of messages", got=type(messages).__name__)
    if not messages:
        raise MessageError("messages", expected="at least one message", got="none")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def check_role(what: str, role: object) -> Role:
    if role not in ROLES:
        raise MessageError(f"{what}.role", expected=f"one of {', '.join(ROLES)}", got=repr(role))
    return role


def _message(what: str, message: object) -> ChatMessage:
    if isinstance(message, ChatMessage):
        message = {"role": message.role, "content": message.parts}
    if not isinstance(message, Mapping):
        raise MessageError(what, expected="an object with role and content", got=type(message).__name__)
    if set(message) != {"role", "content"}:
        raise MessageError(what, expected="keys role, content", got=f"keys {', '.join(map(str, message))}")
    role, content = check_role(what, message["role"]), message["content"]
    if not isinstance(content, str) and not _is_list(content):
        raise MessageError(f"{what}.content", expected="text or a list of parts", got=type(content).__name__)
    parts = (content,) if isinstance(content, str) else tuple(content)
    if all(isinstance(part, str) and not part for part in parts):
        raise MessageError(f"{what}.content", expected="text, an image or sound", got="nothing")
    for i, part in enumerate(parts):
        _check_part(f"{what}.content[{i}]", part)
    return ChatMessage(role, parts)


def _check_part(what: str, part: object) -> None:
    if isinstance(part, np.ndarray):
        if part.ndim != 1 or part.size == 0 or not np.issubdtype(part.dtype, np.floating):
            raise MessageError(what, expected="mono float samples, [n]", got=f"{part.dtype} of shape {part.shape}")
    elif not isinstance(part, str | Image.Image):
        raise MessageError(what, expected="text, a PIL image or a NumPy array of samples", got=type(part).__name__)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
