"""Presets: instructions and a voice for the start of a conversation, one JSON file each in `assets/presets/<mode>/`.

The files are read and validated once. `reference_sound` decodes the sounds.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationError, model_validator

from models.errors import AudioError, ConfigError
from server.registry.reference_sound import duration_of
from worker.config.json_file import read_json
from worker.config.service import ROOT

FOLDER = ROOT / "assets" / "presets"
MODES = ("audio_duplex", "half_duplex_audio", "omni", "turnbased")
DEFAULT_ORDER = 999  # of presets without `order`, which come last


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PresetVoice(_Part):
    """A sound file. path: relative to the folder that contains the folder of presets."""

    path: str
    name: str


class TextItem(_Part):
    """A paragraph of the instructions."""

    type: Literal["text"]
    text: str


class AudioItem(PresetVoice):
    """A sound between paragraphs of the instructions."""

    type: Literal["audio"]


class Preset(_Part):
    """One preset. It has either `system_prompt`, or `system_content` with sounds between the paragraphs.

    lang: language of the text, such as en. order: presets are sorted by it, smallest first.
    """

    id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    order: int = DEFAULT_ORDER
    name: str = Field(min_length=1)
    description: str = ""
    lang: str | None = None
    system_prompt: str | None = None
    system_content: list[Annotated[TextItem | AudioItem, Discriminator("type")]] | None = None
    ref_audio: PresetVoice | None = None

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


class Presets:
    """All presets. modes: mode -> its presets, in order. durations: seconds of each sound, by its path."""

    def __init__(self, folder: Path, modes: Mapping[str, list[Preset]], durations: Mapping[str, float]):
        self._folder = folder
        self.modes = {mode: modes.get(mode, []) for mode in MODES}
        self.durations = dict(durations)

    @classmethod
    def load(cls, folder: Path = FOLDER) -> Self:
        """Read all presets. A mode without a folder has none. Raises: ConfigError with the file and the problem."""
        modes: dict[str, list[Preset]] = {}
        durations: dict[str, float] = {}
        for inner in sorted(one for one in folder.glob("*") if one.is_dir()):
            if inner.name not in MODES:
                raise ConfigError(str(inner), expected=f"a folder named {' or '.join(MODES)}", got=inner.name)
            found: dict[str, Preset] = {}
            for file in sorted(inner.glob("*.json")):
                preset = _read(file)
                if preset.id in found:
                    raise ConfigError(str(file), expected="an id that no other preset of its mode has", got=preset.id)
                found[preset.id] = preset
                for voice in preset.voices:
                    durations[voice.path] = _duration(file, folder.parent, voice)
            modes[inner.name] = sorted(found.values(), key=lambda one: (one.order, one.id))
        return cls(folder, modes, durations)

    def find(self, mode: str, preset_id: str) -> Preset | None:
        return next((one for one in self.modes.get(mode, []) if one.id == preset_id), None)

    def file_of(self, voice: PresetVoice) -> Path:
        return self._folder.parent / voice.path


def _read(file: Path) -> Preset:
    try:
        return Preset.model_validate(read_json(file))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(str(file), expected="a preset", got=f"{where}: {first['msg']}") from None


def _duration(file: Path, assets: Path, voice: PresetVoice) -> float:
    path = (assets / voice.path).resolve()
    if not path.is_relative_to(assets.resolve()):
        raise ConfigError(str(file), expected=f"a sound inside {assets.name}", got=voice.path)
    try:
        return duration_of(path)
    except AudioError as error:
        raise ConfigError(str(file), expected=f"a sound at {voice.path}", got=error.got) from None


NO_PRESETS = Presets(FOLDER, {}, {})
