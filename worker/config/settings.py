"""Groups of settings that say what each knob may be, and name every knob that is not. Torch-free.

Knows types, ranges and how to tell of them; does not know which settings there are.
"""

import difflib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from models.errors import SettingsError

MAX_SHOWN = 60  # characters of a bad value in an error
MAX_NOTES = 20  # unknown keys that are told one by one


class SettingProblem(NamedTuple):
    """One knob that cannot be as asked for."""

    knob: str
    expected: str
    got: str


class SettingError(SettingsError):
    """One or more knobs outside their range; `problems` and the text name every one of them."""

    def __init__(self, problems: list[SettingProblem]):
        self.problems = problems
        if len(problems) == 1:
            [(knob, expected, got)] = problems
            super().__init__(f"setting {knob}", expected=expected, got=got)
            return
        expected = "; ".join(f"{one.knob} {one.expected}" for one in problems)
        got = "; ".join(f"{one.knob} {one.got}" for one in problems)
        super().__init__(f"settings {', '.join(one.knob for one in problems)}", expected=expected, got=got)


class Settings(BaseModel):
    """Frozen, strictly typed: a bool is no number, text is no number, a whole number will do for a float.

    Raises: SettingError when made with a key it does not have or a value outside its range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    def __init__(self, /, **given: Any):
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise SettingError(_problems(type(self), error)) from None
        if problems := self._misfits():
            raise SettingError(problems)

    def _misfits(self) -> list[SettingProblem]:
        """Knobs that are in range and do not fit each other."""
        return []


def allowed(settings: type[Settings], knob: str) -> str:
    """What a knob may be, in words, as errors and documentation say it: `a whole number from 0 to 4096`."""
    field = settings.model_fields[knob]
    annotation, null = field.annotation, ""
    if get_origin(annotation) is Union:
        [words] = set(get_args(annotation)) - {bool}
        return f"true or false or {_choice(words)}"
    if get_origin(annotation) is types.UnionType:
        [annotation] = set(get_args(annotation)) - {types.NoneType}
        null = "null or "
    bounds = ("ge", "le", "max_length")
    limits = {bound: getattr(one, bound) for one in field.metadata for bound in bounds if hasattr(one, bound)}
    if get_origin(annotation) is tuple:
        [words] = set(get_args(annotation)) - {...}
        likes = ", ".join(map(repr, field.examples or ()))
        return f"{null}a list of {f'text like {likes}' if words is str else _choice(words)}"
    if get_origin(annotation) is Literal:
        return null + _choice(annotation)
    if annotation in (int, float):
        kind = "a whole number" if annotation is int else "a number"
        return f"{null}{kind} from {_plain(limits['ge'])} to {_plain(limits['le'])}"
    if annotation is str and field.examples:
        return f"{null}text like {', '.join(map(repr, field.examples))}"
    if annotation is str:
        return f"{null}text of at most {limits['max_length']} characters"
    return null + {bool: "true or false", Path: "a path"}.get(annotation, f"an object of {annotation.__name__}")


def overlaid(defaults: Settings, given: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The defaults' values with known keys of `given` laid over them, and the keys that are not known."""
    known = type(defaults).model_fields
    values = {name: getattr(defaults, name) for name in known}
    values.update((key, value) for key, value in given.items() if key in known)
    return values, [str(key) for key in given if key not in known]


def notes(settings: type[Settings], ignored: list[str]) -> list[str]:
    """One sentence for each of the first keys that are not known, with the knob that may have been meant."""
    sentences = []
    for key in ignored[:MAX_NOTES]:
        near = _nearest(key, settings)
        sentences.append(
            f"setting {_cut(key)} does not exist and is ignored" + (f"; did you mean {near}?" if near else "")
        )
    if len(ignored) > MAX_NOTES:
        sentences.append(f"{len(ignored) - MAX_NOTES} more settings do not exist and are ignored")
    return sentences


def shown(value: object) -> str:
    """A bad value for an error's text, cut to a readable length."""
    try:
        return _cut(repr(value))
    except (ValueError, RecursionError):  # more digits than Python will print, or nested too deep
        return f"{type(value).__name__} too large to show"


def _problems(settings: type[Settings], error: ValidationError) -> list[SettingProblem]:
    found: list[SettingProblem] = []
    for entry in error.errors(include_url=False):
        knob = str(entry["loc"][0])
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            found += [one._replace(knob=f"{knob}.{one.knob}") for one in cause.problems]
        elif knob in settings.model_fields:
            found.append(SettingProblem(knob, allowed(settings, knob), shown(entry["input"])))
        else:
            near = _nearest(knob, settings)
            expected = f"a setting that exists, such as {near}" if near else "a setting that exists"
            found.append(SettingProblem(_cut(knob), expected, shown(entry["input"])))
    return list(dict.fromkeys(found))  # a union reports one error per member


def _nearest(key: str, settings: type[Settings]) -> str | None:
    """The knob whose name is most like `key`, looked for inside sections too."""
    names = list(settings.model_fields)
    for name, field in settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            names += [f"{name}.{inner}" for inner in field.annotation.model_fields]
    return next(iter(difflib.get_close_matches(key[:MAX_SHOWN], names, n=1)), None)


def _choice(words: Any) -> str:
    return " or ".join(map(repr, get_args(words)))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _plain(number: float) -> str:
    """A bound as people write it: 2 rather than 2.0, 0.000001 rather than 1e-06."""
    return str(number) if isinstance(number, int) else f"{number:.6f}".rstrip("0").rstrip(".")
