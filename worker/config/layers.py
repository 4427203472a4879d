"""Settings from several places laid over each other: a JSON file, the environment, flags. Torch-free.

Knows where a value came from and where a relative path starts; does not know what any setting means.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

from models.errors import ConfigError
from worker.config.hub_id import HubIdAllowed, hub_id
from worker.config.settings import SettingError, SettingProblem, Settings, shown

VARIABLE_PREFIX = "DUOLOGUE_"
MAX_FILE_BYTES = 1 << 20
_EXCERPT = 24  # characters of the file in an error


class SettingField(NamedTuple):
    """One setting by its full name. parent: the group it is in. name: its own name there."""

    key: str
    parent: type[Settings]
    name: str

    @property
    def annotation(self) -> Any:
        return self.parent.model_fields[self.name].annotation

    @property
    def default(self) -> Any:
        return self.parent.model_fields[self.name].default

    @property
    def group(self) -> type[Settings] | None:
        """The settings inside, if it is a group of them."""
        kind = self.annotation
        return kind if isinstance(kind, type) and issubclass(kind, Settings) else None

    @property
    def is_path(self) -> bool:
        return Path in (self.annotation, *get_args(self.annotation))

    @property
    def must_be_path(self) -> bool:
        return self.annotation is Path

    @property
    def takes_hub_id(self) -> bool:
        """Whether it also takes a model id of the Hugging Face hub, which stays as it is."""
        return any(isinstance(one, HubIdAllowed) for one in self.parent.model_fields[self.name].metadata)

    @property
    def is_text(self) -> bool:
        """Whether a number on its own would be text: a path, a word, one of some words."""
        kinds = (self.annotation, *get_args(self.annotation))
        return self.is_path or any(kind is str or isinstance(kind, str) for kind in kinds)

    @property
    def variable(self) -> str:
        """The environment's name of it: DUOLOGUE_SERVICE_GATEWAY_PORT for service.gateway_port."""
        return VARIABLE_PREFIX + self.key.upper().replace(".", "_")


def setting_fields(settings: type[Settings], prefix: str = "") -> Iterator[SettingField]:
    """Every setting, a group in front of what is inside."""
    for name in settings.model_fields:
        knob = SettingField(prefix + name, settings, name)
        yield knob
        if knob.group:
            yield from setting_fields(knob.group, f"{knob.key}.")


@dataclass
class Layers:
    """What has been given so far. values: as the settings nest. sources: full name -> where its value came from."""

    settings: type[Settings]
    dead: Mapping[str, str]  # keys that others know and that do nothing here -> why
    switches: frozenset[str]  # groups with an `enabled` that true, false or auto alone may stand for
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[SettingProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known = {knob.key: knob for knob in setting_fields(self.settings)}

    def add(self, given: Mapping[str, object], source: str, base: Path) -> None:
        """Lay nested values over those so far. base: where relative paths start."""
        self._merge(given, self.values, "", source, base)

    def add_dotted(self, given: Mapping[str, object], source: str, base: Path) -> None:
        """The same for full names, such as `service.compile.mode`; a value of None is not given."""
        for key, value in given.items():
            if value is not None:
                self._add_one(key, value, source, base)

    def add_environment(self, environ: Mapping[str, str], base: Path) -> None:
        """Variables named as settings; a value is JSON, or the text itself where it is not, or nothing if empty."""
        by_variable = {knob.variable: knob for knob in self._known.values()}
        sections = tuple(f"{VARIABLE_PREFIX}{name.upper()}_" for name in self.settings.model_fields)
        for variable, text in sorted(environ.items()):
            knob = by_variable.get(variable)
            if not text:
                continue
            if knob is not None:
                self._add_one(knob.key, _from_text(text, knob), variable, base)
            elif variable.startswith(sections):
                near = next(iter(difflib.get_close_matches(variable, by_variable, n=1)), None)
                self.problems.append(SettingProblem(variable, _existing(near, "a variable"), shown(text)))

    def build(self) -> Any:
        """The settings. Raises: SettingError naming every value that cannot be and where it came from."""
        built = None
        try:
            built = self.settings(**self.values)
        except SettingError as error:
            self.problems += error.problems
        self.raise_problems()
        return built

    def raise_problems(self) -> None:
        """Raises: SettingError if there are any."""
        if self.problems:
            raise SettingError([self._with_source(one) for one in self.problems])

    def _add_one(self, key: str, value: object, source: str, base: Path) -> None:
        *groups, name = key.split(".")
        nested: dict[str, object] = {name: value}
        for group in reversed(groups):
            nested = {group: nested}
        # A knob inside a switched group does not turn the switch, an object for the whole group does.
        self._merge(nested, self.values, "", source, base, whole=key)

    def _merge(
        self, given: Mapping[str, object], into: dict[str, Any], prefix: str, source: str, base: Path, whole: str = ""
    ) -> None:
        for name, value in given.items():
            key = f"{prefix}{name}"
            knob = self._known.get(key)
            if key in self.dead:
                self.notes.append(f"setting {key} ({source}) has no effect: {self.dead[key]}")
            elif knob is None:
                self.problems.append(SettingProblem(key[:80], _existing(self._near(key)), f"{shown(value)} ({source})"))
            elif knob.group:
                self._merge_group(knob, value, into, source, base, whole)
            elif not (knob.must_be_path and value in (None, "")):  # a line there to be filled in
                into[name] = _placed(value, base, knob) if knob.is_path else value
                self.sources[key] = source

    def _merge_group(
        self, knob: SettingField, value: object, into: dict[str, Any], source: str, base: Path, whole: str
    ) -> None:
        can_switch = knob.key in self.switches
        if can_switch and (isinstance(value, bool) or value == "auto"):
            value = {"enabled": value}
        elif can_switch and isinstance(value, Mapping) and not whole.startswith(f"{knob.key}."):
            value = {"enabled": True, **value}
        if not isinstance(value, Mapping):
            expected = "true, false, 'auto' or an object" if can_switch else "an object"
            self.problems.append(SettingProblem(knob.key, expected, f"{shown(value)} ({source})"))
            return
        inner = into.setdefault(knob.name, {})
        self._merge(value, inner, f"{knob.key}.", source, base, whole)

    def _near(self, key: str) -> str | None:
        """The setting that may have been meant: of the same name elsewhere, or a name much like it."""
        name = key.rpartition(".")[2]
        same = [known for known in self._known if known.rpartition(".")[2] == name]
        return next(iter([*same, *difflib.get_close_matches(key[:80], self._known, n=1)]), None)

    def _with_source(self, problem: SettingProblem) -> SettingProblem:
        source = self.sources.get(problem.knob)
        return problem._replace(got=f"{problem.got} ({source})") if source else problem


def read_json(path: Path) -> dict[str, Any]:
    """A settings file. Raises: ConfigError naming file, line and column for anything but one JSON object."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), expected="a settings file", got=error.strerror or str(error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(str(path), expected=f"at most {MAX_FILE_BYTES} bytes", got="more")
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_no_key_twice)
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), expected="UTF-8 text", got=f"byte {error.start} that is none") from None
    except json.JSONDecodeError as error:
        raise _syntax_error(path, text, error) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), expected="JSON", got=str(error)) from None
    if not isinstance(value, dict):
        raise ConfigError(str(path), expected="an object of sections", got=shown(value))
    return value


def _syntax_error(path: Path, text: str, error: json.JSONDecodeError) -> ConfigError:
    rest = text[error.pos :].splitlines()
    there = shown(rest[0][:_EXCERPT]) if rest and rest[0] else "the end of the line" if rest else "the end of the file"
    start, _, expected = error.msg.partition("Expecting ")
    if start:  # Python's words are about what it found
        expected, there = "valid JSON", f"{error.msg[:1].lower()}{error.msg[1:]}: {there}"
    return ConfigError(f"{path} line {error.lineno} column {error.colno}", expected=expected, got=there)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"a key given twice: {', '.join(map(shown, twice))}")
    return found


def _from_text(text: str, knob: SettingField) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, bool) and bool in get_args(knob.annotation):
        return value
    return text if knob.is_text and value is not None and not isinstance(value, str) else value


def _placed(value: object, base: Path, knob: SettingField) -> object:
    """A path with its start; text without a character means none."""
    if not isinstance(value, str | Path) or (knob.takes_hub_id and hub_id(value, base)):
        return value
    return base / Path(value).expanduser() if str(value) else None


def _existing(near: str | None, what: str = "a setting") -> str:
    return f"{what} that exists, such as {near}" if near else f"{what} that exists"
