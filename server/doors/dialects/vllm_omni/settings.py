"""The settings of a vLLM-Omni session, in the older and the newer spelling of the Realtime API, and its sound."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from server.doors.core.request_fields import RequestFields
from server.doors.dialects.vllm_omni.transcripts import OmniTranscription
from server.doors.errors import ApiError, invalid
from server.doors.live.sound.detector import DetectorSettings
from server.doors.live.sound.resample import (
    ENGINE_RATE,
    SPEECH_RATE,
    StreamResampler,
    alaw,
    floats_of,
    pcm16_of,
    ulaw,
)
from server.doors.live.sound.wire_sound import G711_RATE
from server.registry.sound_upload import MAX_FILE_BYTES
from worker.describe import cut
from worker.protocol.base64_text import strict_base64
from worker.protocol.messages import SYSTEM_PROMPT, Prepare
from worker.protocol.wire import Sound

FORMS = ("pcm16", "pcm_f32le", "g711_ulaw", "g711_alaw")
OTHER_NAMES = {"pcm_s16le": "pcm16", "s16le": "pcm16"}
SPELLINGS = {"audio/pcm": "pcm16", "audio/pcmu": "g711_ulaw", "audio/pcma": "g711_alaw"}
RATES = (8000, 16_000, 24_000, 32_000, 44_100, 48_000)
SAMPLE_BYTES = {"pcm16": 2, "pcm_f32le": 4}
POLICIES = ("listen_only", "barge_in_on_speech", "auto")
COMMIT_POLICIES = ("ack_only", "commit_all_on_done")
MAX_INSTRUCTIONS = 65_536
MAX_DETECTION_MS = 10_000
MAX_IDLE_S = 3600
SHORT_ACK_MS, LONG_OVERLAP_MS = 700, 1200  # speech over a response, by the policy `auto`: a short remark; a barge-in
MAX_REF_AUDIO = MAX_FILE_BYTES * 4 // 3 + 200


@dataclass(frozen=True)
class OmniTurnDetection:
    """The detector of the user's turns, as the client has set it.

    threshold: probability of speech. create_response: the model speaks after the user's turn.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    min_speech_duration_ms: int = 96
    create_response: bool = True

    @classmethod
    def of(cls, given: RequestFields) -> "OmniTurnDetection":
        """Raises: ApiError, also for unknown fields."""
        kind = given.text("type")
        known = {"type", "interrupt_response", *cls.__dataclass_fields__}
        if kind != "server_vad":
            raise _detection_refused(given.name("type"), "server_vad", kind)
        if unknown := sorted(given.given.keys() - known):
            raise _detection_refused(given.name(cut(unknown[0])), f"only {', '.join(sorted(known))}", "a value")
        if not given.flag("interrupt_response", default=True):
            raise _detection_refused(given.name("interrupt_response"), "true, or turn_detection null", "false")
        threshold = given.number("threshold", 0.01, 1.0)
        times = {
            name: given.whole(name, 0, MAX_DETECTION_MS)
            for name in ("prefix_padding_ms", "silence_duration_ms", "min_speech_duration_ms")
        }
        new: dict[str, Any] = {name: ms for name, ms in times.items() if ms is not None}
        if threshold is not None:
            new["threshold"] = threshold
        return cls(**new, create_response=given.flag("create_response", default=True))

    def shown(self) -> dict[str, object]:
        return {"type": "server_vad", "interrupt_response": True, **asdict(self)}

    def settings(self) -> DetectorSettings:
        return DetectorSettings(self.threshold, self.prefix_padding_ms, self.silence_duration_ms)


@dataclass(frozen=True)
class OmniSettings:
    """The effective settings.

    ref_audio: a sound file in base64, or its fingerprint. detection: None: the model decides about turns.
    transcription: None: no transcripts are made. auto_response: the model speaks unasked. initial_text: the
    user's, before the first unit. idle_s: without an event; None: the server's limit.
    """

    model: str
    instructions: str = ""
    voice: str = "default"
    ref_audio: str | None = None
    input_format: str = "pcm16"
    input_rate: int = ENGINE_RATE
    output_format: str = "pcm16"
    output_rate: int = SPEECH_RATE
    detection: OmniTurnDetection | None = None
    transcription: OmniTranscription | None = None
    overlap_policy: str = "listen_only"
    playback_commit_policy: str = "ack_only"
    temperature: float | None = None
    force_listen_count: int = 0
    auto_response: bool = True
    initial_text: str = ""
    idle_s: float | None = None

    def merged(self, given: RequestFields) -> "OmniSettings":
        """The settings with those of a `session` object. Raises: ApiError."""
        new: dict[str, Any] = {
            "instructions": given.text("instructions", self.instructions),
            "voice": given.text("voice", self.voice) if isinstance(given.given.get("voice"), str) else self.voice,
            "temperature": given.number("temperature", 0, 2) if given.has("temperature") else self.temperature,
            "playback_commit_policy": given.choice(
                "playback_commit_policy", COMMIT_POLICIES, self.playback_commit_policy
            ),
            "ref_audio": given.text("ref_audio") if given.has("ref_audio") else self.ref_audio,
            "input_format": form_of(given, "input_audio_format", self.input_format),
            "output_format": form_of(given, "output_audio_format", self.output_format),
            "idle_s": given.number("idle_timeout_s", 1, MAX_IDLE_S) or self.idle_s,
        }
        rates: dict[str, int | None] = {"input": None, "output": None}
        audio = given.group("audio")
        if audio is not None:
            _newer_spelling(audio, new, rates)
        if (extra := given.group("extra_body")) is not None:
            count = extra.whole("force_listen_count", 0, 1000)
            new["force_listen_count"] = self.force_listen_count if count is None else count
            new["auto_response"] = extra.flag("auto_response", default=self.auto_response)
            new["initial_text"] = extra.text("duplex_initial_user_text", self.initial_text)
        rate = given.whole("sample_rate_hz", min(RATES), max(RATES)) or rates["input"]
        is_g711 = new["input_format"].startswith("g711")
        new["input_rate"] = checked_rate(rate or (G711_RATE if is_g711 else self.input_rate))
        new["output_rate"] = self._output_rate(new["output_format"], rates["output"])
        new |= self._turns(given, audio) | _transcription(given, audio)
        for name, most in (
            ("instructions", MAX_INSTRUCTIONS),
            ("ref_audio", MAX_REF_AUDIO),
            ("initial_text", MAX_INSTRUCTIONS),
        ):
            if new.get(name) is not None and len(new[name]) > most:
                raise invalid(name, expected=f"at most {most} characters", got=len(new[name]))
        return replace(self, **new)

    def _output_rate(self, form: str, given: int | None) -> int:
        """Hz of the sound to the client. Raises: ApiError."""
        if form.startswith("g711"):
            if given not in (None, G711_RATE):
                raise invalid("session.audio.output", expected=f"{G711_RATE} Hz for {form}", got=given)
            return G711_RATE
        if given is None:
            return SPEECH_RATE if self.output_format.startswith("g711") else self.output_rate
        return checked_rate(given)

    def _turns(self, given: RequestFields, audio: RequestFields | None) -> dict[str, Any]:
        """Who decides about turns. Raises: ApiError."""
        own = None if audio is None else audio.group("input")
        place = own if own is not None and "turn_detection" in own.given else given
        policy = given.choice("overlap_policy", POLICIES, "") if given.has("overlap_policy") else None
        if "turn_detection" not in place.given:
            return {} if policy is None else {"overlap_policy": policy}
        group = place.group("turn_detection")
        if group is None:
            return {"detection": None, "overlap_policy": policy or "listen_only"}
        if policy not in (None, "barge_in_on_speech"):
            expected = "barge_in_on_speech, as turn_detection is given"
            raise _detection_refused(given.name("overlap_policy"), expected, str(policy))
        return {"detection": OmniTurnDetection.of(group), "overlap_policy": "barge_in_on_speech"}

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

    def shown(self) -> dict[str, object]:
        """The part of the session object that the client has set."""
        return {
            "model": self.model,
            "modalities": ["audio", "text"],
            "output_modalities": ["audio"],
            "instructions": self.instructions,
            "voice": self.voice,
            "input_audio_format": self.input_format,
            "output_audio_format": self.output_format,
            "audio": {"input": {"sample_rate_hz": self.input_rate}, "output": {"sample_rate_hz": self.output_rate}},
            "temperature": self.temperature,
            "idle_timeout_s": self.idle_s,
            "turn_detection": None if self.detection is None else self.detection.shown(),
            "input_audio_transcription": None if self.transcription is None else self.transcription.shown(),
            "overlap_policy": self.overlap_policy,
            "overlap_short_ack_ms": SHORT_ACK_MS,
            "overlap_barge_in_ms": LONG_OVERLAP_MS,
            "playback_commit_policy": self.playback_commit_policy,
        }


def _newer_spelling(audio: RequestFields, new: dict[str, Any], rates: dict[str, int | None]) -> None:
    """Take the formats, the rates and the voice from a group `audio`."""
    for direction in rates:
        group = audio.group(direction)
        if group is None:
            continue
        form = group.group("format")
        if form is not None:
            new[f"{direction}_format"] = SPELLINGS[form.choice("type", SPELLINGS)]
        for place, name in ((form, "rate"), (group, "sample_rate_hz")):
            if place is not None and (rate := place.whole(name, min(RATES), max(RATES))) is not None:
                rates[direction] = rate
        if isinstance(group.given.get("voice"), str):
            new["voice"] = group.text("voice")


def _transcription(given: RequestFields, audio: RequestFields | None) -> dict[str, Any]:
    """The settings of transcripts, from one of their places. Raises: ApiError."""
    own = None if audio is None else audio.group("input")
    places = ((own, "transcription"), (given, "input_audio_transcription"))
    for place, name in places:
        if place is not None and name in place.given:
            group = place.group(name)
            return {"transcription": None if group is None else OmniTranscription.of(group)}
    return {}


def _detection_refused(param: str, expected: str, got: str) -> ApiError:
    return invalid(param, expected=expected, got=got[:60], code="unsupported_turn_detection")


def form_of(given: RequestFields, key: str, default: str) -> str:
    """The name of an encoding in a field. Raises: ApiError."""
    name = given.choice(key, (*FORMS, *OTHER_NAMES), default)
    return OTHER_NAMES.get(name, name)


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
            data = strict_base64(text)
        except ValueError as error:  # text beyond ASCII is no `binascii.Error`
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
    """Encodes the model's sound.

    Args:
        form: one of `FORMS`.
        rate: Hz, of the encoded sound.
    """

    def __init__(self, form: str, rate: int):
        self.form, self.rate = form, rate
        self._law = {"g711_ulaw": ulaw, "g711_alaw": alaw}.get(form)
        self._resampler = StreamResampler(SPEECH_RATE, rate)

    def encode(self, pcm16: bytes) -> bytes:
        """The sound in the wire format."""
        if self.form == "pcm16" and self.rate == SPEECH_RATE:
            return pcm16
        samples = self._resampler.push(floats_of(pcm16))
        if self._law is not None:
            return self._law().encode(samples)
        return samples.tobytes() if self.form == "pcm_f32le" else pcm16_of(samples)


def unsupported(what: str) -> ApiError:
    """The error of an event that this server has no use for."""
    return ApiError(400, f"type: expected an event of a client, got {what[:60]}", param="type", code="unknown_event")
