"""Groups of settings with strict types and ranges, and errors that name every invalid setting. Torch-free.

Does not define any setting.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from models.errors import SettingsError
from worker.describe import MAX_SHOWN, cut, describe_type, shown

MAX_NOTES = 20  # unknown keys with a sentence of their own
NOT_SHOWN = "a value that is not shown"
# Parts of the names of unknown settings whose values may be secret, such as a misspelt `turn_credential`.
SECRET_PARTS = frozenset(
    {"credential", "credentials", "key", "keys", "pass", "passwd", "password", "secret", "secrets", "token", "turn"}
)


class HiddenValue(NamedTuple):
    """Annotation metadata of a setting whose invalid values are left out of errors: they may be secret."""


HIDDEN = HiddenValue()


class SettingProblem(NamedTuple):
    """One invalid setting: its name, the allowed values, and its value."""

    setting: str
    expected: str
    got: str


class SettingError(SettingsError):
    """One or more invalid settings; the text names all of `problems`."""

    def __init__(self, problems: list[SettingProblem]):
        self.problems = problems
        if len(problems) == 1:
            [(setting, expected, got)] = problems
            super().__init__(f"setting {setting}", expected=expected, got=got)
            return
        expected = "; ".join(f"{one.setting} {one.expected}" for one in problems)
        got = "; ".join(f"{one.setting} {one.got}" for one in problems)
        super().__init__(f"settings {', '.join(one.setting for one in problems)}", expected=expected, got=got)


class Settings(BaseModel):
    """Frozen, strictly typed settings: a bool is not a number, text is not a number, an integer is a valid float.

    The constructor raises SettingError for unknown keys and for values outside their range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    hides_values: ClassVar[bool] = False  # whether errors leave out the invalid values, which may be secret

    def __init__(self, /, **given: Any):
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise SettingError(_problems(type(self), error)) from None
        if problems := self._conflicts():
            raise SettingError(problems)

    def _conflicts(self) -> list[SettingProblem]:
        """Settings that are valid alone but not together."""
        return []

    @classmethod
    def allowed(cls, name: str) -> str:
        """The allowed values of a setting, such as `a whole number from 0 to 4096`."""
        field = cls.model_fields[name]
        return describe_type(field.annotation, field.metadata, examples=field.examples, with_null=True)


def overlaid(defaults: Settings, given: Mapping[str, object]) -> tuple[dict[str, Any], list[str]]:
    """The values of `defaults` replaced by those in `given`, and the unknown keys of `given`."""
    known = type(defaults).model_fields
    values = {name: getattr(defaults, name) for name in known}
    values.update((key, value) for key, value in given.items() if key in known)
    return values, [str(key) for key in given if key not in known]


def notes(settings: type[Settings], ignored: list[str]) -> list[str]:
    """One sentence for each of the first unknown keys, with the most similar setting."""
    sentences = []
    for key in ignored[:MAX_NOTES]:
        near = _nearest(key, settings)
        sentences.append(
            f"setting {cut(key)} does not exist and is ignored" + (f"; did you mean {near}?" if near else "")
        )
    if len(ignored) > MAX_NOTES:
        sentences.append(f"{len(ignored) - MAX_NOTES} more settings do not exist and are ignored")
    return sentences


def shown_unknown(key: str, value: object) -> str:
    """The value of an unknown setting in the words of an error; without it if the key's name says that it is secret."""
    return shown(value) if SECRET_PARTS.isdisjoint(re.split(r"[^a-z]", key.lower())) else NOT_SHOWN


def _problems(settings: type[Settings], error: ValidationError) -> list[SettingProblem]:
    found: list[SettingProblem] = []
    for entry in error.errors(include_url=False):
        name = str(entry["loc"][0])
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            found += [one._replace(setting=f"{name}.{one.setting}") for one in cause.problems]
        elif name in settings.model_fields:
            is_hidden = settings.hides_values or HIDDEN in settings.model_fields[name].metadata
            got = NOT_SHOWN if is_hidden else shown(entry["input"])
            found.append(SettingProblem(name, settings.allowed(name), got))
        else:
            near = _nearest(name, settings)
            expected = f"a setting that exists, such as {near}" if near else "a setting that exists"
            got = NOT_SHOWN if settings.hides_values else shown_unknown(name, entry["input"])
            found.append(SettingProblem(cut(name), expected, got))
    return list(dict.fromkeys(found))  # a union reports one error per member


def _nearest(key: str, settings: type[Settings]) -> str | None:
    """The setting with the most similar name, including those inside groups."""
    names = list(settings.model_fields)
    for name, field in settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            names += [f"{name}.{inner}" for inner in field.annotation.model_fields]
    return next(iter(difflib.get_close_matches(key[:MAX_SHOWN], names, n=1)), None)
