"""Typed chat messages of text, images and sound, and their validation. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image

from models.errors import MessageError
from models.inputs.image import EncodedImage

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = get_args(Role)
Picture = Image.Image | EncodedImage
Part = str | Picture | np.ndarray


@dataclass(frozen=True)
class MessageCall:
    """A call of a function in an assistant's message. arguments: by name."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, eq=False)
class ChatMessage:
    """One turn.

    Attributes:
        role: "tool" is the result of a call; only checkpoints with a chat template for tools take it.
        parts: text, images, and sound ([n] mono float samples at 16 kHz), in order.
        calls: of an assistant; they need such a template, too.
    """

    role: Role | Literal["tool"]
    parts: tuple[Part, ...]
    calls: tuple[MessageCall, ...] = ()

    @property
    def needs_template(self) -> bool:
        """Whether only a chat template for tools takes it."""
        return self.role == "tool" or bool(self.calls)


def parse_messages(messages: object) -> tuple[ChatMessage, ...]:
    """The messages of a conversation: a non-empty list of `{"role": ..., "content": text or a list of parts}`.

    Raises: MessageError naming the invalid message or part.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise MessageError("messages", expected="a list of messages", got=type(messages).__name__)
    if not messages:
        raise MessageError("messages", expected="at least one message", got="none")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(messages))


def check_role(what: str, role: object) -> Role:
    """`role` as one of ROLES. Raises: MessageError naming `what`."""
    for known in ROLES:
        if role == known:
            return known
    raise MessageError(f"{what}.role", expected=f"one of {', '.join(ROLES)}", got=repr(role))


def _message(what: str, message: object) -> ChatMessage:
    if isinstance(message, ChatMessage):
        if message.needs_template:
            for i, part in enumerate(message.parts):
                _check_part(f"{what}.content[{i}]", part)
            return message
        message = {"role": message.role, "content": message.parts}
    if not isinstance(message, Mapping):
        raise MessageError(what, expected="an object with role and content", got=type(message).__name__)
    if set(message) != {"role", "content"}:
        raise MessageError(what, expected="keys role, content", got=f"keys {', '.join(map(str, message))}")
    role, content = check_role(what, message["role"]), message["content"]
    if isinstance(content, bytes) or not isinstance(content, Sequence):
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
    elif not isinstance(part, str | Picture):
        raise MessageError(what, expected="text, a PIL image or a NumPy array of samples", got=type(part).__name__)
