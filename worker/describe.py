"""Types and values in words, for error messages and generated tables. Torch-free.

Contains no settings and no messages: `worker.config` and `worker.protocol` pass their annotations and values.
"""

import json
import reprlib
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from worker.key_text import scrubbed

MAX_SHOWN = 60  # characters of a name or value in an error
TYPE_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    Any: "any value",
}


class TypeWords(NamedTuple):
    """Annotation metadata that replaces the generated description of a type."""

    words: str


def describe_type(
    annotation: Any, metadata: Iterable[object] = (), *, examples: Sequence[str] | None = None, with_null: bool = False
) -> str:
    """The allowed values of a field, such as `a whole number from 0 to 4096`.

    Args:
        annotation: the field's type.
        metadata: the bounds and `TypeWords` beside the type, as in `FieldInfo.metadata`.
        examples: values that stand for a text whose pattern is hard to read.
        with_null: whether to mention that null is allowed.
    """
    origin, inner, metadata = get_origin(annotation), get_args(annotation), list(metadata)
    if origin is Annotated:
        return describe_type(inner[0], [*inner[1:], *metadata], examples=examples, with_null=with_null)
    if given := next((one for one in metadata if isinstance(one, TypeWords)), None):
        return given.words
    if origin in (types.UnionType, Union):
        members = [one for one in inner if one is not types.NoneType]
        bounds = metadata if len(members) == 1 else []
        words = " or ".join(dict.fromkeys(describe_type(one, bounds, examples=examples) for one in members))
        words += _bounds(metadata) if not bounds else ""
        return f"null or {words}" if with_null and len(members) < len(inner) else words
    if origin is Literal:
        words = " or ".join(map(json.dumps, inner))
    elif origin in (list, tuple):
        most = next((one.max_length for one in metadata if hasattr(one, "max_length")), None)
        size = "" if most is None else f" of at most {most}"
        return f"a list{size}, each {describe_type(inner[0], examples=examples)}"
    elif annotation is str and examples:
        words = f"text like {', '.join(map(json.dumps, examples))}"
    else:
        words = next(
            (TYPE_WORDS[base] for base in (annotation, *_bases(annotation)) if base in TYPE_WORDS), "an object"
        )
    return words + _bounds(metadata)


def shown(value: object) -> str:
    """A bad value for an error message, cut to a few hundred characters; null, true and false as JSON writes them.

    Keys of the server are left out of texts.
    """
    return _SHOWN.repr(value)


def cut(text: str) -> str:
    """Text of at most `MAX_SHOWN` characters, and `...` where characters are left out."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class _Shown(reprlib.Repr):
    """Reads only the first few items of a container, so that a huge value costs nothing."""

    def repr1(self, value: Any, level: int) -> str:
        if value is None or isinstance(value, bool):
            return json.dumps(value)
        return super().repr1(value, level)

    def repr_str(self, value: str, level: int) -> str:
        return super().repr_str(scrubbed(value), level)

    def repr_int(self, value: int, level: int) -> str:
        return super().repr_int(value, level) if value.bit_length() < 1000 else "a number too large to show"


_SHOWN = _Shown()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = MAX_SHOWN
_SHOWN.maxlevel = 2


def _bases(annotation: Any) -> tuple[type, ...]:
    return annotation.__mro__ if isinstance(annotation, type) else ()


def _bounds(metadata: Iterable[object]) -> str:
    found = {name: getattr(one, name) for one in metadata for name in ("ge", "le", "max_length") if hasattr(one, name)}
    low, high = found.get("ge"), found.get("le")
    if low is not None and high is not None:
        return f" from {_plain(low)} to {_plain(high)}"
    if low is not None or high is not None:
        return f", at least {_plain(low)}" if low is not None else f", at most {_plain(high)}"
    return f" of at most {found['max_length']} characters" if found.get("max_length") is not None else ""


def _plain(number: Any) -> str:
    """A bound without an exponent and without trailing zeros: 2, 0.000001."""
    return str(number) if isinstance(number, int) else f"{number:.6f}".rstrip("0").rstrip(".")
