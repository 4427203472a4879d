"""Settings from several sources: defaults, a JSON file, the environment, flags. Torch-free.

Each source is a pydantic-settings source; pydantic-settings merges and validates them. pydantic-settings ignores
unknown variables and does not record where a value comes from, so each `SettingsLayer` checks its keys and remembers
its sources.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from worker.config.hub_id import HUB_ID, HubIdAllowed
from worker.config.settings import SettingError, SettingProblem, Settings, shown_unknown
from worker.describe import cut, shown

VARIABLE_PREFIX = "DUOLOGUE_"


class SettingField(NamedTuple):
    """One setting.

    Attributes:
        key: its full name, such as `service.compile.mode`.
        parent: the group that contains it.
        name: its name in that group.
    """

    key: str
    parent: type[Settings]
    name: str

    @property
    def info(self) -> FieldInfo:
        return self.parent.model_fields[self.name]

    @property
    def annotation(self) -> Any:
        return self.info.annotation

    @property
    def default(self) -> Any:
        return self.info.default

    @property
    def group(self) -> type[Settings] | None:
        """The group that the setting is, if it is one."""
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
        """Whether it also takes a model id of the Hugging Face hub, which stays unchanged."""
        return any(isinstance(one, HubIdAllowed) for one in self.info.metadata)

    @property
    def is_text(self) -> bool:
        """Whether a variable such as `7` is text: true for paths, text and choices of words only."""
        if get_origin(self.annotation) in (list, tuple, dict):
            return False
        kinds = (self.annotation, *get_args(self.annotation))
        return self.is_path or any(kind is str or isinstance(kind, str) for kind in kinds)

    @property
    def is_switch(self) -> bool:
        """Whether it is a group with `enabled`, for which a value of `enabled` may stand."""
        return self.group is not None and "enabled" in self.group.model_fields

    def switches_with(self, value: object) -> bool:
        """Whether `value` is a value of `enabled`: true, false, or one of its words."""
        if self.group is None or not self.is_switch:
            return False
        words = [word for kind in get_args(self.group.model_fields["enabled"].annotation) for word in get_args(kind)]
        return isinstance(value, bool) or value in words

    def allowed(self) -> str:
        """The allowed values, as `describe_type` words them."""
        if self.group is None:
            return self.parent.allowed(self.name)
        return f"{self.group.allowed('enabled')} or an object" if self.is_switch else "an object"

    @property
    def variable(self) -> str:
        """Its environment variable: DUOLOGUE_SERVICE_GATEWAY_PORT for service.gateway_port."""
        return variable_of(self.key)


def variable_of(key: str) -> str:
    """The environment variable of a setting's full name."""
    return VARIABLE_PREFIX + key.upper().replace(".", "_")


def setting_fields(settings: type[Settings], prefix: str = "") -> Iterator[SettingField]:
    """All settings, each group before its members."""
    for name in settings.model_fields:
        setting = SettingField(prefix + name, settings, name)
        yield setting
        if setting.group:
            yield from setting_fields(setting.group, f"{setting.key}.")


class LayeredSettings(Settings, BaseSettings):
    """Settings that `from_layers` reads from several sources. The constructor reads its arguments only.

    Attributes:
        unused_keys: keys of other versions' files that are accepted without effect -> what to do instead.
    """

    # As in Settings; the later of the two base classes would win otherwise.
    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    unused_keys: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @classmethod
    def from_layers(cls, layers: Sequence["SettingsLayer"]) -> Self:
        """The merged settings.

        Args:
            layers: by falling priority.
        Raises:
            SettingError: for every invalid value of every layer, with its source.
        """
        problems = [problem for layer in reversed(layers) for problem in layer.problems]
        built = None
        try:
            built = cls(_build_sources=(tuple(layers), {}))
        except SettingError as error:
            problems += with_sources(error.problems, layers)
        if built is None or problems:
            raise SettingError(problems)
        return built


class SettingsLayer(PydanticBaseSettingsSource):
    """The values of one source, nested as the settings are.

    Attributes:
        values: the known values, relative paths made absolute.
        sources: full name -> the source of its value, for errors.
        problems: unknown keys, groups that are no objects, and unknown home folders, each with its source.
        notes: one sentence for each key without effect.
    """

    def __init__(self, settings_cls: type[LayeredSettings], base: Path, root: Path | None = None):
        """
        Args:
            settings_cls: the settings.
            base: the folder that relative paths start from.
            root: second folder that may contain a two-part path that could be a model id; None: `base` alone.
        """
        super().__init__(settings_cls)
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.problems: list[SettingProblem] = []
        self.notes: list[str] = []
        self._settings, self._base, self._root = settings_cls, base, root or base
        self._known = {setting.key: setting for setting in setting_fields(settings_cls)}

    @classmethod
    def of_file(
        cls, settings_cls: type[LayeredSettings], content: Mapping[str, object], file: Path, root: Path
    ) -> Self:
        """The content of a settings file; relative paths start at its folder. root: as in the constructor."""
        layer = cls(settings_cls, file.absolute().parent, root)
        layer._add(content, _Place(file.name))
        return layer

    @classmethod
    def of_keys(cls, settings_cls: type[LayeredSettings], given: Mapping[str, object], source: str, base: Path) -> Self:
        """Values by full name, such as `service.compile.mode`; None means not given."""
        layer = cls(settings_cls, base)
        for key, value in given.items():
            if value is not None:
                layer._add_key(key, value, source)
        return layer

    @classmethod
    def of_environment(cls, settings_cls: type[LayeredSettings], environ: Mapping[str, str], base: Path) -> Self:
        """DUOLOGUE_* variables. A value is JSON, otherwise text; an empty one is not given."""
        layer = cls(settings_cls, base)
        by_variable = {setting.variable: setting for setting in layer._known.values()}
        unused = {variable_of(key): key for key in settings_cls.unused_keys}
        sections = tuple(f"{variable_of(name)}_" for name in settings_cls.model_fields)
        for variable, text in sorted(environ.items()):
            setting = by_variable.get(variable)
            if not text:
                continue
            if setting is not None:
                layer._add_key(setting.key, _from_text(text, setting), variable)
            elif variable in unused:
                layer._add_key(unused[variable], text, variable)
            elif variable.startswith(sections):
                near = next(iter(difflib.get_close_matches(variable, by_variable, n=1)), None)
                layer.problems.append(
                    SettingProblem(variable, _existing(near, "a variable"), shown_unknown(variable, text))
                )
        return layer

    def __call__(self) -> dict[str, Any]:
        return self.values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.values.get(field_name), field_name, False

    def _add_key(self, key: str, value: object, source: str) -> None:
        *groups, name = key.split(".")
        nested: dict[str, object] = {name: value}
        for group in reversed(groups):
            nested = {group: nested}
        self._add(nested, _Place(source, whole=key))

    def _add(self, given: Mapping[str, object], place: "_Place") -> None:
        self._merge(given, self.values, "", place)

    def _merge(self, given: Mapping[str, object], into: dict[str, Any], prefix: str, place: "_Place") -> None:
        for name, value in given.items():
            key = f"{prefix}{name}"
            setting = self._known.get(key)
            if key in self._settings.unused_keys:
                self.notes.append(f"setting {key} ({place.source}) has no effect: {self._settings.unused_keys[key]}")
            elif setting is None and self._is_unused_section(key, value):
                assert isinstance(value, Mapping)
                self._merge(value, {}, f"{key}.", place)
            elif setting is None:
                self._refuse(
                    cut(key if name else f'{prefix}""'), _existing(self._nearest(key) if name else None), value, place
                )
            elif "." in name:
                self._refuse(key, _nested_form(name), value, place)
            elif setting.group:
                self._merge_group(setting, value, into, place)
            elif not (setting.must_be_path and value in (None, "")):  # an empty line of a template
                self.sources[key] = place.source
                try:
                    into[name] = self._absolute(value, setting) if setting.is_path else value
                except RuntimeError:  # from `Path.expanduser`
                    self._refuse(key, "a path in a home folder that exists", value, place)

    def _merge_group(self, setting: SettingField, value: object, into: dict[str, Any], place: "_Place") -> None:
        if setting.is_switch:
            if setting.switches_with(value):
                value = {"enabled": value}
            elif isinstance(value, Mapping) and not place.whole.startswith(f"{setting.key}."):
                # An object turns the group on; a single key inside it, such as service.compile.mode, does not.
                value = {"enabled": True, **value}
        if not isinstance(value, Mapping):
            self._refuse(setting.key, setting.allowed(), value, place)
            return
        self._merge(value, into.setdefault(setting.name, {}), f"{setting.key}.", place)

    def _refuse(self, key: str, expected: str, value: object, place: "_Place") -> None:
        got = shown(value) if key in self._known else shown_unknown(key, value)
        self.problems.append(SettingProblem(key, expected, f"{got} ({place.source})"))

    def _absolute(self, value: object, setting: SettingField) -> object:
        """A path below the base folder, unless it is absolute; empty text becomes None.

        For settings that also take a model id, a relative path of two parts is first looked up below the base folder,
        then below the root. If neither contains it, it is a model id and stays unchanged.
        """
        if not isinstance(value, str | Path):
            return value
        if setting.takes_hub_id and HUB_ID.fullmatch(str(value)):
            places = [folder / value for folder in (self._base, self._root)]
            return next((place for place in places if place.exists()), value)
        return self._base / Path(value).expanduser() if str(value) else None

    def _is_unused_section(self, key: str, value: object) -> bool:
        return isinstance(value, Mapping) and any(one.startswith(f"{key}.") for one in self._settings.unused_keys)

    def _nearest(self, key: str) -> str | None:
        """The setting with the same name in another group, or the one with the most similar full name."""
        name = key.rpartition(".")[2]
        same = [known for known in self._known if known.rpartition(".")[2] == name]
        return next(iter([*same, *difflib.get_close_matches(key[:80], self._known, n=1)]), None)


@dataclass(frozen=True)
class _Place:
    """The origin of a value. whole: the full name it was given under; "" for a file."""

    source: str
    whole: str = ""


def with_sources(problems: Sequence[SettingProblem], layers: Sequence[SettingsLayer]) -> list[SettingProblem]:
    """The problems, each value followed by its source. layers: by falling priority."""
    sources: dict[str, str] = {}
    for layer in reversed(layers):
        sources |= layer.sources
    return [
        problem._replace(got=f"{problem.got} ({sources[problem.setting]})") if problem.setting in sources else problem
        for problem in problems
    ]


def _from_text(text: str, setting: SettingField) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if setting.is_text and not isinstance(value, str | bool | None):
        return text
    return text if isinstance(value, bool) and setting.is_text and bool not in get_args(setting.annotation) else value


def _nested_form(key: str) -> str:
    """The objects that a file needs for a setting given by its full name."""
    *groups, name = key.split(".")
    opened = "".join(f'{{"{group}": ' for group in groups)
    return f'{opened}{{"{name}": ...}}' + "}" * len(groups)


def _existing(near: str | None, what: str = "a setting") -> str:
    return f"{what} that exists, such as {near}" if near else f"{what} that exists"
