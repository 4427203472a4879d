"""Response bodies of the routes for the start of a conversation: presets, sounds, defaults of the page."""

from typing import Literal

from pydantic import BaseModel


class VoiceLimits(BaseModel):
    """Limits of uploaded reference voices. max_bytes: of the file. max_count: of all uploaded voices."""

    min_s: float
    max_s: float
    max_bytes: int
    max_count: int


class FrontendDefaults(BaseModel):
    """apps: ids of the enabled ones. default_lang: left out if there is none. recording: sessions are recorded."""

    playback_delay_ms: int
    chat_vocoder: str
    default_lang: str | None = None
    recording: bool = False
    apps: list[str] = []
    voices: VoiceLimits


class DefaultSound(BaseModel):
    """duration: s. base64: float32 samples, little endian."""

    name: str
    duration: float
    sample_rate: int
    samples: int
    base64: str


class VoiceInfo(BaseModel):
    """data: always null; the route of the preset's audio returns it. duration: s."""

    data: None = None
    path: str
    name: str
    duration: float


class TextPart(BaseModel):
    type: Literal["text"] = "text"
    text: str


class AudioPart(VoiceInfo):
    type: Literal["audio"] = "audio"


class PresetInfo(BaseModel):
    """A preset. In the modes turnbased and half_duplex_audio, system_content has the text of system_prompt too."""

    id: str
    order: int
    name: str
    description: str
    lang: str | None = None
    system_prompt: str | None = None
    system_content: list[TextPart | AudioPart] | None = None
    ref_audio: VoiceInfo | None = None


class PresetSound(BaseModel):
    """data: float32 at 16 kHz, little endian, base64; null if the file was removed. duration: s."""

    data: str | None
    name: str
    duration: float


class PresetReport(BaseModel):
    """State of the presets. modes: number of presets. problems: a sentence for each file that is left out."""

    folders: list[str]
    modes: dict[str, int]
    problems: list[str]


class PresetSounds(BaseModel):
    """Sounds of a preset; fields without a sound are left out."""

    system_content_audio: list[PresetSound] | None = None
    ref_audio: PresetSound | None = None
