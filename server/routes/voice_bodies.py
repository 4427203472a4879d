"""Request and response bodies of the registry of reference voices."""

from typing import Literal

from pydantic import BaseModel, Field

from server.routes.bodies import RequestBody


class VoiceUpload(RequestBody):
    """audio_base64: a sound file, or a video file with sound, in base64. transcript: what is said in it."""

    name: str
    audio_base64: str
    transcript: str = Field("", max_length=4096)


class ExternalVoice(RequestBody):
    """A file on the server's machine, which is always refused."""

    name: str
    path: str


class RefAudioInfo(BaseModel):
    """A registered voice. source_type: builtin voices come with the server and cannot be deleted."""

    id: str
    name: str
    filename: str
    source_type: Literal["upload", "builtin"]
    duration_ms: int
    sample_rate: int
    created_at: str
    transcript: str = ""


class RefAudioList(BaseModel):
    total: int
    ref_audios: list[RefAudioInfo]


class RefAudioChanged(BaseModel):
    """name: null after a deletion, as clients of this protocol expect."""

    success: Literal[True] = True
    id: str
    name: str | None = None
    message: str


class RefAudioSound(BaseModel):
    """data: mono float32 at 16 kHz, little endian, base64. duration: s."""

    data: str
    name: str
    duration: float = Field(description="seconds")
