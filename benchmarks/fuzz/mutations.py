"""Messages that are nearly valid: values for typed fields, and changes to objects and bytes. All from one generator."""

import base64
import json
import random
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from worker.protocol.wire import Sound

MAX_DEPTH = 5
TEXTS = (
    "", "a", "hello", "0", "null", "true", "NaN", "default", "auto", "none", "user", "assistant", "system", "a" * 300,
    "\x00", "\u202e\u0000", "\ufffd", "é" * 70, "😀" * 20, "../../etc/passwd", "data:image/png;base64,", "http://127.0.0.1:1/x",
    "file:///etc/passwd", "<unit>", "<|tool_call_start|>", "%s%n", "1e309", "-1", "İ", "\r\n\r\n", "pcm16", "audio/pcm",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 16, 255, 256, 1000, 65_536, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, 2**64, 10**30,
    -(10**400), 0.5, -0.0, 1e-320, 1e308, 0.1, 24_000, 16_000, 3600,
)  # fmt: skip
LITERALS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-",
    "01",
    "0x10",
    "'a'",
    "tru",
    '"\\ud800"',
    '"\\u0000"',
    "[",
    "}",
)


class Mutator:
    """Draws values and changes. rng: decides everything, so that a seed repeats a message."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    # --- values -------------------------------------------------------------------------------

    def any_value(self, depth: int = 0) -> Any:
        """Any JSON value."""
        kind = self.rng.randrange(8 if depth < MAX_DEPTH else 5)
        if kind == 0:
            return None
        if kind == 1:
            return self.rng.random() < 0.5
        if kind == 2:
            return self.rng.choice(NUMBERS)
        if kind in (3, 4):
            return self.text()
        if kind == 5:
            return [self.any_value(depth + 1) for _ in range(self.rng.randrange(4))]
        return {self.text(): self.any_value(depth + 1) for _ in range(self.rng.randrange(4))}

    def text(self) -> str:
        if self.rng.random() < 0.2:
            return self.sound_text()
        if self.rng.random() < 0.02:
            return self.rng.choice(TEXTS[1:]) * 6000
        return self.rng.choice(TEXTS)

    def sound_text(self) -> str:
        """Base64 of sound, sometimes damaged."""
        n = self.rng.choice((0, 1, 2, 3, 4, 5, 320, 800, 1600))
        text = base64.b64encode(self.rng.randbytes(n) if self.rng.random() < 0.3 else bytes(4 * n)).decode()
        if self.rng.random() < 0.2:
            place = self.rng.randrange(len(text) + 1)
            text = text[:place] + self.rng.choice(("=", "*", "\n", "é", "-", "")) + text[place + 1 :]
        return text

    def of_type(self, annotation: Any, depth: int = 0) -> Any:
        """A JSON value for a field with this type."""
        origin = get_origin(annotation)
        if annotation is Sound:
            return self.sound_text()
        if origin is Annotated:
            return self.of_type(get_args(annotation)[0], depth)
        if origin in (Union, types.UnionType):
            return self.of_type(self.rng.choice(get_args(annotation)), depth)
        if origin is Literal:
            return self.rng.choice(get_args(annotation))
        if origin in (list, tuple, typing.Sequence) and depth < MAX_DEPTH:
            inner = (get_args(annotation) or (Any,))[0]
            return [self.of_type(inner, depth + 1) for _ in range(self.rng.randrange(1, 3))]
        if isinstance(annotation, type):
            if issubclass(annotation, BaseModel):
                return self.of_model(annotation, depth + 1)
            simple: dict[type, Callable[[], Any]] = {
                bool: lambda: self.rng.random() < 0.5,
                int: lambda: self.rng.choice((0, 1, 2, 3, 5, 20, 100, 500, 1000, 24_000)),
                float: lambda: self.rng.choice((0, 0.1, 0.5, 0.7, 1.0, 1.5, 2, 10)),
                str: lambda: self.rng.choice(("a", "default", "hello", self.text())),
                type(None): lambda: None,
                bytes: self.sound_text,
            }
            if annotation in simple:
                return simple[annotation]()
        return self.any_value(depth + 1)

    def of_model(self, model: type[BaseModel], depth: int = 0) -> dict[str, Any]:
        """An object with the fields of a model: those required, and some others."""
        given = {}
        for name, annotation, default, is_required in _fields(model):
            if is_required:
                given[name] = self.of_type(annotation, depth)
            elif name == "type" and isinstance(default, str):
                given[name] = default
            elif depth < MAX_DEPTH and self.rng.random() < 0.4:
                given[name] = self.of_type(annotation, depth)
        return given

    # --- changes ------------------------------------------------------------------------------

    def changed(self, given: Any) -> Any:
        """The value with a few changes somewhere inside. given: JSON; it is changed itself."""
        for _ in range(self.rng.choice((0, 1, 1, 1, 2, 3))):
            places = list(_places(given))
            if not places:
                return self.any_value()
            holder, key = self.rng.choice(places)
            self._change(holder, key)
        return given

    def _change(self, holder: Any, key: Any) -> None:
        kind = self.rng.randrange(7)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            holder[key] = self.any_value()
        elif kind == 2 and isinstance(holder, dict):
            holder[self.text()] = holder.pop(key)
        elif kind == 3:
            holder[key] = [holder[key]] * self.rng.choice((1, 2, 40))
        elif kind == 4:
            holder[key] = self.rng.choice(NUMBERS)
        elif kind == 5:
            holder[key] = self.text()
        elif isinstance(holder, dict):
            holder[self.rng.choice(("x", "type", "__class__", "model_config", "", *TEXTS[:4]))] = self.any_value()
        else:
            holder.append(self.any_value())

    def as_text(self, given: Any) -> str:
        """JSON, sometimes damaged as text."""
        text = json.dumps(given, ensure_ascii=self.rng.random() < 0.5)
        if self.rng.random() < 0.85:
            return text
        kind, place = self.rng.randrange(6), self.rng.randrange(len(text) + 1)
        if kind == 0:
            return text[:place]
        if kind == 1:
            return text[:place] + self.rng.choice(LITERALS) + text[place + 1 :]
        if kind == 2:
            n = self.rng.choice((10, 250, 3000))
            return text[:-1] + ',"deep":' + "[" * n + "]" * n + text[-1:]
        if kind == 3:
            return text[:-1] + "," + text[1:] if len(text) > 2 else text * 2  # every key twice
        if kind == 4:
            return text + self.rng.choice((" ", "\x00", "{}", "\ufeff"))
        return "".join(rf"\u{ord(c):04x}" if c.isalpha() and self.rng.random() < 0.3 else c for c in text)

    def damaged(self, data: bytes) -> bytes:
        """Bytes with a few changes: cut, flipped, repeated, moved, or with numbers at their bounds."""
        changed = bytearray(data)
        for _ in range(self.rng.choice((0, 1, 1, 2, 4))):
            if not changed:
                return self.rng.randbytes(8)
            kind, place = self.rng.randrange(6), self.rng.randrange(len(changed))
            if kind == 0:
                del changed[place:]
            elif kind == 1:
                changed[place] ^= 1 << self.rng.randrange(8)
            elif kind == 2:
                changed[place : place + 4] = self.rng.choice(
                    (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\0\0\x80")
                )
            elif kind == 3:
                del changed[place : place + self.rng.choice((1, 4, 64))]
            elif kind == 4:
                changed[place:place] = self.rng.randbytes(self.rng.choice((1, 2, 16)))
            else:
                changed += changed[place : place + 256]
        return bytes(changed)


@cache
def _fields(model: type[BaseModel]) -> list[tuple[str, Any, Any, bool]]:
    return [
        (
            field.alias or name,
            field.annotation,
            field.default,
            field.default is PydanticUndefined and field.is_required(),
        )
        for name, field in model.model_fields.items()
    ]


def _places(given: Any) -> typing.Iterator[tuple[Any, Any]]:
    """Every element of every object and list inside a value, as its holder and key."""
    for key in list(given) if isinstance(given, dict) else range(len(given)) if isinstance(given, list) else ():
        yield given, key
        yield from _places(given[key])
