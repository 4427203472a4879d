"""The settings of a vLLM-Omni session, in the older and the newer spelling of the Realtime API, and its sound."""

import base64
import binascii
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from server.doors.core.request_fields import RequestFields
from server.doors.errors import ApiError, invalid
from server.doors.live.sound.resample import ENGINE_RATE, StreamResampler, alaw, floats_of, ulaw
from server.doors.live.sound.wire_sound import SoundOutput, WireFormat
from server.registry.sound_upload import MAX_FILE_BYTES
from worker.protocol.messages import SYSTEM_PROMPT, Prepare
from worker.protocol.wire import Sound

OUTPUTS: dict[str, WireFormat] = {
    "pcm16": "audio/pcm",
    "pcm_f32le": "audio/pcm",
    "g711_ulaw": "audio/pcmu",
    "g711_alaw": "audio/pcma",
}
SPELLINGS = {"audio/pcm": "pcm16", "audio/pcmu": "g711_ulaw", "audio/pcma": "g711_alaw"}
RATES = (8000, 16_000, 24_000, 32_000, 44_100, 48_000)
SAMPLE_BYTES = {"pcm16": 2, "pcm_f32le": 4}
POLICIES = ("listen_only", "barge_in_on_speech", "auto")
COMMIT_POLICIES = ("ack_only", "commit_all_on_done")
MAX_INSTRUCTIONS = 65_536
MAX_REF_AUDIO = MAX_FILE_BYTES * 4 // 3 + 200


@dataclass(frozen=True)
class OmniSettings:
    """The effective settings. ref_audio: a sound file in base64. config: settings of the unit protocol."""

    model: str
    instructions: str = ""
    voice: str = "default"
    ref_audio: str | None = None
    input_format: str = "pcm16"
    input_rate: int = ENGINE_RATE
    output_format: str = "pcm16"
    overlap_policy: str = "listen_only"
    playback_commit_policy: str = "ack_only"
    temperature: float | None = None
    force_listen_count: int = 0

    def merged(self, given: RequestFields) -> "OmniSettings":
        """The settings with those of a `session` object. Raises: ApiError."""
        new: dict[str, Any] = {
            "instructions": given.text("instructions", self.instructions),
            "voice": given.text("voice", self.voice) if isinstance(given.given.get("voice"), str) else self.voice,
            "temperature": given.number("temperature", 0, 2) if given.has("temperature") else self.temperature,
            "overlap_policy": given.choice("overlap_policy", POLICIES, self.overlap_policy),
            "playback_commit_policy": given.choice(
                "playback_commit_policy", COMMIT_POLICIES, self.playback_commit_policy
            ),
            "ref_audio": given.text("ref_audio") if given.has("ref_audio") else self.ref_audio,
            "input_format": given.choice("input_audio_format", OUTPUTS, self.input_format),
            "output_format": given.choice("output_audio_format", OUTPUTS, self.output_format),
        }
        if (audio := given.group("audio")) is not None:
            _newer_spelling(audio, new)
        if (extra := given.group("extra_body")) is not None:
            count = extra.whole("force_listen_count", 0, 1000)
            new["force_listen_count"] = self.force_listen_count if count is None else count
        rate = given.whole("sample_rate_hz", min(RATES), max(RATES)) or new.pop("input_rate", None)
        is_g711 = new["input_format"].startswith("g711")
        new["input_rate"] = checked_rate(rate or (8000 if is_g711 else self.input_rate))
        for name, most in (("instructions", MAX_INSTRUCTIONS), ("ref_audio", MAX_REF_AUDIO)):
            if new[name] is not None and len(new[name]) > most:
                raise invalid(name, expected=f"at most {most} characters", got=len(new[name]))
        return replace(self, **new)

    def prepare(self, voice: dict[str, object]) -> Prepare:
        """The message that begins the context. voice: fields of `tts` of a chat's request."""
        config: dict[str, Any] = {"force_listen_count": self.force_listen_count, "generate_audio": True}
        if self.temperature is not None:
            config["temperature"] = self.temperature
        given, named = voice.get("ref_audio_data"), voice.get("ref_audio_path")
        return Prepare(
            system_prompt=self.instructions if self.instructions.strip() else SYSTEM_PROMPT,
            ref_audio_base64=Sound(given) if isinstance(given, str) else None,
            ref_audio_path=named if isinstance(named, str) else None,
            config=config,
        )


def _newer_spelling(audio: RequestFields, new: dict[str, Any]) -> None:
    """Take the formats and the voice from a group `audio`."""
    for direction in ("input", "output"):
        group = audio.group(direction)
        form = None if group is None else group.group("format")
        if form is not None:
            new[f"{direction}_format"] = SPELLINGS[form.choice("type", SPELLINGS)]
            if direction == "input" and (rate := form.whole("rate", min(RATES), max(RATES))) is not None:
                new["input_rate"] = rate
        if group is not None and isinstance(group.given.get("voice"), str):
            new["voice"] = group.text("voice")


def checked_rate(rate: int) -> int:
    """The rate. Raises: ApiError for another one than those of `RATES`."""
    if rate not in RATES:
        raise invalid("sample_rate_hz", expected=f"one of {', '.join(map(str, RATES))}", got=rate)
    return rate


class OmniInput:
    """Decodes the client's sound, whose format and rate may change between chunks."""

    def __init__(self) -> None:
        self._rate = ENGINE_RATE
        self._resampler = StreamResampler(ENGINE_RATE, ENGINE_RATE)

    def decode(self, text: str, form: str, rate: int) -> np.ndarray:
        """[n] float32 at 16 kHz. text: base64. Raises: ApiError."""
        try:
            data = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise invalid("audio", expected="base64", got=error, code="bad_audio") from None
        size = SAMPLE_BYTES.get(form, 1)
        if len(data) % size:
            raise invalid("audio", expected=f"{size} bytes a sample", got=f"{len(data)} bytes", code="bad_audio")
        if rate != self._rate:
            self._rate, self._resampler = rate, StreamResampler(rate, ENGINE_RATE)
        if form == "pcm16":
            samples = floats_of(data)
        elif form == "pcm_f32le":
            samples = np.nan_to_num(np.frombuffer(data, "<f4")).clip(-1, 1)
        else:
            samples = (ulaw() if form == "g711_ulaw" else alaw()).decode(data)
        return self._resampler.push(samples)


class OmniOutput:
    """Encodes the model's sound. rate: Hz, of the encoded sound."""

    def __init__(self, form: str):
        self.form, self.rate = form, 8000 if form.startswith("g711") else 24_000
        self._encoder = SoundOutput(OUTPUTS[form])

    def encode(self, pcm16: bytes) -> bytes:
        """The sound in the wire format."""
        if self.form == "pcm_f32le":
            return floats_of(pcm16).tobytes()
        return self._encoder.push(pcm16)


def unsupported(what: str) -> ApiError:
    """The error of an event that this server has no use for."""
    return ApiError(400, f"type: expected an event of a client, got {what[:60]}", param="type", code="unknown_event")
