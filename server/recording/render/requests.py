"""A timeline of requests as turns: chat over a WebSocket or HTTP, and the legacy streaming protocol.

A turn's input is the last message of the user. Earlier messages of the request are its history and are not repeated.
"""

import io
from typing import Any

import numpy as np
import soundfile
import soxr

from server.recording.render.built import BuiltRecording
from server.recording.render.frames import joined, jsonable, number_of, text_of, worker_message
from server.recording.render.media_files import MediaFiles
from server.recording.render.replay_sound import ReplaySound
from server.recording.render.turn_writer import OpenTurn, TurnWriter
from server.recording.render.user_input import UserInput
from server.recording.timeline import RecordSource, TimelineRecord
from worker.protocol.wire import SOUND_RATE, WireError, base64_bytes, read_object

GENERATE, CHUNK, DONE, ERROR, PREFILL_DONE = "generate", "chunk", "done", "error", "prefill_done"


class RequestBuilder:
    """Builds `turns`. kind: `chat` or `streaming`."""

    def __init__(self, kind: str, media: MediaFiles, replay: ReplaySound):
        self._turns = TurnWriter(kind, media, replay)
        self._input = UserInput(media)
        self._turn: OpenTurn | None = None
        self._input_tokens: object = None

    def add(self, record: TimelineRecord) -> None:
        """Read the next record. Raises: OSError if a file cannot be written."""
        self._turns.built.seconds = record.at_ms / 1000
        if record.source is RecordSource.CLIENT:
            self._from_client(record)
        elif record.source is RecordSource.WORKER:
            self._from_worker(record)

    def finish(self) -> BuiltRecording:
        """Write an answer that was not completed. Raises: OSError."""
        built = self._turns.built
        self._end_turn(1000 * built.seconds, is_complete=False)
        built.notes += self._input.notes
        return built

    def _from_client(self, record: TimelineRecord) -> None:
        try:
            given = read_object(record.data)
        except WireError:
            return
        messages = given.get("messages")
        if isinstance(messages, list):
            self._turns.built.config = _config_of(given, messages)
            self._input.read(messages)
        if isinstance(messages, list) or given.get("type") == GENERATE:
            # A legacy `generate` follows its `prefill`; the answer counts from the later of the two.
            self._turn = OpenTurn(record.at_ms, self._input.fields, joined(self._input.sounds))

    def _from_worker(self, record: TimelineRecord) -> None:
        message = worker_message(record.data, "base64")
        turn, kind, fields = self._turn, message.kind, message.fields
        if turn is None:
            return
        if kind == PREFILL_DONE:
            self._input_tokens = fields.get("input_tokens")
        elif kind == CHUNK:
            turn.add_answer(message)
        elif kind == DONE:
            turn.text = text_of(fields.get("text")) or turn.text
            if message.samples is not None:
                turn.sounds.append(message.samples)
            self._end_turn(record.at_ms, is_complete=True, fields=fields)
        elif kind == ERROR:
            turn.error = text_of(fields.get("error"))
            self._end_turn(record.at_ms, is_complete=False)
        elif not kind and "success" in fields:
            self._add_response(turn, record.data, fields)
            self._end_turn(record.at_ms, is_complete=fields.get("success") is True, fields=fields)

    def _add_response(self, turn: OpenTurn, data: str | bytes, fields: dict[str, Any]) -> None:
        """Take the answer of an HTTP response, whose sound is a file."""
        turn.text = text_of(fields.get("text"))
        if fields.get("error"):
            turn.error = text_of(fields["error"])
        sound = _file_sound(read_object(data).get("audio_data"))
        if sound is not None:
            turn.sounds.append(sound)

    def _end_turn(self, at_ms: float, *, is_complete: bool, fields: dict[str, Any] | None = None) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        fields = fields or {}
        stats = fields.get("token_stats")
        stats = stats if isinstance(stats, dict) else {}
        first = number_of(fields.get("generated_tokens"))
        tokens = next((one for one in (first, fields.get("tokens_generated"), stats.get("generated_tokens")) if one), 0)
        inputs = (fields.get("input_tokens"), stats.get("input_tokens"), self._input_tokens)
        input_tokens = next((one for one in inputs if one is not None), None)
        self._turns.write(turn, at_ms, is_complete=is_complete, tokens=tokens, input_tokens=input_tokens)


def _config_of(given: dict[str, Any], messages: list[Any]) -> dict[str, Any]:
    """The settings of a request, without its messages and sounds."""
    systems = [one for one in messages if isinstance(one, dict) and one.get("role") == "system"]
    tts = given.get("tts")
    has_voice = isinstance(tts, dict) and bool(tts.get("ref_audio_data"))
    kept = ("generation", "image", "use_tts_template", "omni_mode", "enable_thinking")
    config: dict[str, Any] = jsonable({key: given[key] for key in kept if key in given})
    return {
        **config,
        "system_prompt": "\n".join(text for one in systems for text in texts_of(one.get("content"))),
        "streaming": given.get("streaming") is not False,
        "tts_enabled": isinstance(tts, dict) and tts.get("enabled") is True,
        "ref_audio": "from the client" if has_voice else None,
    }


def texts_of(content: object) -> list[str]:
    """The texts of a message's content."""
    if isinstance(content, str):
        return [content]
    items = content if isinstance(content, list) else []
    return [text for one in items if isinstance(one, dict) and (text := text_of(one.get("text")))]


def _file_sound(given: object) -> np.ndarray | None:
    """[n] float32 at 24 kHz from a base64 WAV file, or from base64 samples."""
    try:
        data = base64_bytes(given, "audio_data") if isinstance(given, str) else b""
    except WireError:
        return None
    if not data.startswith(b"RIFF"):
        return np.frombuffer(data[: len(data) // 4 * 4], "<f4").astype(np.float32) if len(data) >= 4 else None
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError:
        return None
    mono = samples.mean(axis=1)
    return np.asarray(mono if rate == SOUND_RATE else soxr.resample(mono, rate, SOUND_RATE), np.float32)
