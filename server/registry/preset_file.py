"""One preset's file, JSON or YAML: its fields, and the sounds that it names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationError, model_validator

from models.errors import AudioError, ConfigError, SettingsError
from server.registry.reference_sound import duration_of
from worker.config.json_file import MAX_FILE_BYTES, read_json
from worker.config.service import FOREIGN_VOICE, ROOT, AudioSection
from worker.voice_registry import voice_file, voice_folder

ASSETS = ROOT / "assets"
SUFFIXES = (".json", ".yaml", ".yml")
DEFAULT_ORDER = 999  # of presets without `order`, which come last


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PresetVoice(_Part):
    """A sound file. path: relative to the folder above the presets or to `assets`, or the name of a voice."""

    path: str = Field(min_length=1)
    name: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Without a name, the sound is called like its file."""
        if isinstance(given, Mapping) and "name" not in given and isinstance(given.get("path"), str):
            return {**given, "name": PurePosixPath(given["path"]).stem or given["path"]}
        return given


class TextItem(_Part):
    """A paragraph of the instructions."""

    type: Literal["text"]
    text: str


class AudioItem(PresetVoice):
    """A sound between paragraphs of the instructions."""

    type: Literal["audio"]


class Preset(_Part):
    """One preset. It has either `system_prompt`, or `system_content` with sounds between the paragraphs.

    lang: language of the text, such as en. order: presets are sorted by it, smallest first. In a file, `ref_audio_path`
    stands for `ref_audio` with that path.
    """

    id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    order: int = DEFAULT_ORDER
    name: str = Field(min_length=1)
    description: str = ""
    lang: str | None = None
    system_prompt: str | None = None
    system_content: list[Annotated[TextItem | AudioItem, Discriminator("type")]] | None = None
    ref_audio: PresetVoice | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_voice(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "ref_audio_path" not in given:
            return given
        if "ref_audio" in given:
            raise ValueError("expected either ref_audio or ref_audio_path")
        rest = {key: value for key, value in given.items() if key != "ref_audio_path"}
        return rest if given["ref_audio_path"] is None else {**rest, "ref_audio": {"path": given["ref_audio_path"]}}

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.system_prompt is None) == (self.system_content is None):
            raise ValueError("expected either system_prompt or system_content")
        return self

    @property
    def sounds(self) -> list[AudioItem]:
        """The sounds between paragraphs, in order."""
        return [item for item in self.system_content or () if isinstance(item, AudioItem)]

    @property
    def voices(self) -> Iterator[PresetVoice]:
        """All sounds of the preset."""
        yield from self.sounds
        if self.ref_audio is not None:
            yield self.ref_audio


@dataclass(frozen=True)
class PresetSoundFile:
    """A sound file of a preset. duration: s."""

    file: Path
    duration: float


@dataclass(frozen=True)
class LoadedPreset:
    """A preset and the files of its sounds, by their `path`."""

    preset: Preset
    sounds: Mapping[str, PresetSoundFile]


def read_preset(file: Path) -> LoadedPreset:
    """The preset in `<folder>/presets/<mode>/<name>`. Raises: ConfigError with the file, the field and the problem."""
    try:
        preset = Preset.model_validate(read_json(file) if file.suffix == ".json" else _read_yaml(file))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(str(file), expected="a preset", got=f"{where}: {first['msg']}") from None
    folders = (file.parent.parent.parent, ASSETS)
    return LoadedPreset(preset, {voice.path: _sound(file, folders, voice) for voice in preset.voices})


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(file), expected="a readable file", got=error.strerror) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(str(file), expected=f"at most {MAX_FILE_BYTES} bytes", got="more")
    try:
        value = yaml.safe_load(data)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" line {mark.line + 1} column {mark.column + 1}"
        raise ConfigError(f"{file}{where}", expected="YAML", got=error.problem) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(str(file), expected="YAML", got=str(error)[:200]) from None
    if not isinstance(value, dict):
        raise ConfigError(str(file), expected="a mapping", got=type(value).__name__)
    return value


def _registered(folder: Path, name: str) -> Path | None:
    """The file of the voice with this name, of the server or registered in the folder; None if it is no known name."""
    if "/" in name or "\\" in name:
        return None
    try:
        return voice_file(name, ASSETS / "ref_audio", voice_folder(folder))
    except SettingsError:
        return None


def _sound(file: Path, folders: Sequence[Path], voice: PresetVoice) -> PresetSoundFile:
    """The sound in one of the folders. A path that begins with `assets/` may mean the folder of that name itself."""
    allowed = [folder.resolve() for folder in folders]
    candidates = [(folder / voice.path).resolve() for folder in (*allowed, ASSETS.parent)]
    inside = [path for path in candidates if any(path.is_relative_to(folder) for folder in allowed)]
    if not inside:
        expected = f"a sound inside {' or '.join(dict.fromkeys(folder.name for folder in allowed))}"
        raise ConfigError(str(file), expected=expected, got=voice.path)
    path = next((path for path in inside if path.is_file()), None) or _registered(folders[0], voice.path) or inside[0]
    default = AudioSection().ref_audio_path
    if path.name == FOREIGN_VOICE and not path.is_file() and default is not None:
        path = ROOT / default  # presets of the public implementation name its voice
    try:
        return PresetSoundFile(path, duration_of(path))
    except AudioError as error:
        raise ConfigError(str(file), expected=f"a sound at {voice.path}", got=error.got) from None
