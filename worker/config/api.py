"""The section `api` of `config.json`: names in requests of the OpenAI API. Torch-free."""

from typing import Annotated

from pydantic import Field

from worker.config.settings import Settings
from worker.describe import TypeWords


class ApiSection(Settings):
    """Names in requests of the OpenAI API, and what its sessions may use."""

    model_name: str | None = Field(
        None, min_length=1, max_length=200, description="name of the model; null: the last part of model.model_path"
    )
    model_aliases: tuple[str, ...] = Field(
        (
            "gpt-realtime*",
            "gpt-4o*realtime*",
            "gpt-audio*",
            "gpt-live*",
            "tts-1*",
            "gpt-4o-mini-tts*",
        ),
        strict=False,
        examples=["gpt-realtime*", "my-model"],
        description="further names of the model, which clients have as defaults; `*` stands for any text",
    )
    speech_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="name of the speech model; null: the last part of model.speech_path",
    )
    speech_model_aliases: tuple[str, ...] = Field(
        ("tts-1*", "gpt-4o-mini-tts*", "qwen3-tts*"),
        strict=False,
        examples=["tts-1*", "my-voice-model"],
        description="further names of the speech model; without one they are names of the model",
    )
    transcriptions: int = Field(
        2,
        ge=0,
        le=64,
        description="transcriptions of users' speech that one worker makes at the same time, in slots that no session "
        "needs; 0: none, so that sessions show `transcription: null`",
    )
    image_hosts: tuple[str, ...] = Field(
        (),
        strict=False,
        examples=["images.example.org", "*.example.net"],
        description="hosts from whose https addresses pictures of chats and sessions are fetched; `*` stands for any "
        "text; none: pictures come as data URLs only",
    )
    voices: Annotated[dict[str, str], TypeWords("an object, each value text")] = Field(
        {},
        description="voices of the OpenAI API, such as alloy, and the reference voice that speaks for each; "
        "the others speak with the default voice",
    )
    live_barge_in_ms: int = Field(
        400,
        ge=0,
        le=10_000,
        description="ms of a client's speech that silence a GPT-Live reply; 0: none do",
    )
    audio_mode_s: float | None = Field(
        None, gt=0, le=3600, description="seconds that a session of `?mode=audio` may last; null: an hour"
    )
    video_mode_s: float | None = Field(
        None, gt=0, le=3600, description="seconds that a session of `?mode=video` may last; null: an hour"
    )
