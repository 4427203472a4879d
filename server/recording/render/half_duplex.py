"""A half-duplex timeline as turns: the user's segment of speech, and the answer to it."""

from collections import deque
from typing import Any

import numpy as np

from models.inputs.audio_sizes import SAMPLE_RATE
from server.recording.render.built import BuiltRecording
from server.recording.render.frames import (
    WorkerMessage,
    joined,
    jsonable,
    number_of,
    samples_of,
    text_of,
    worker_message,
)
from server.recording.render.media_files import MediaFiles
from server.recording.render.replay_sound import ReplaySound
from server.recording.render.turn_writer import OpenTurn, TurnWriter
from server.recording.timeline import RecordSource, TimelineRecord
from worker.protocol.half_duplex_messages import (
    HALF_DUPLEX_CLIENT,
    HalfDuplexPrepare,
    SpeechChunk,
    SystemSound,
    SystemText,
)
from worker.protocol.wire import WireError

MAX_SPEECH_S = 300
GENERATING, CHUNK, TURN_DONE = "generating", "chunk", "turn_done"


class HalfDuplexBuilder:
    """Builds `turns`. The user's speech is the sound that ends where the worker begins to generate."""

    def __init__(self, media: MediaFiles, replay: ReplaySound):
        self._turns = TurnWriter("half_duplex_audio", media, replay)
        self._heard: deque[np.ndarray] = deque()
        self._n_heard = 0
        self._turn: OpenTurn | None = None

    def add(self, record: TimelineRecord) -> None:
        """Read the next record. Raises: OSError if a file cannot be written."""
        self._turns.built.seconds = record.at_ms / 1000
        if record.source is RecordSource.CLIENT:
            self._from_client(record.data)
        elif record.source is RecordSource.WORKER:
            self._from_worker(worker_message(record.data, "base64"), record.at_ms)

    def finish(self) -> BuiltRecording:
        """Write an answer that was not completed. Raises: OSError."""
        built = self._turns.built
        self._end_turn(1000 * built.seconds, is_complete=False)
        return built

    def _from_client(self, data: str | bytes) -> None:
        try:
            message = HALF_DUPLEX_CLIENT.read_text(data) if isinstance(data, str) else None
        except WireError:
            return  # answered with an error
        if isinstance(message, HalfDuplexPrepare):
            self._turns.built.config = _config_of(message)
        elif isinstance(message, SpeechChunk) and (samples := samples_of(message.audio_base64)) is not None:
            self._heard.append(samples)
            self._n_heard += len(samples)
            while self._n_heard - len(self._heard[0]) >= MAX_SPEECH_S * SAMPLE_RATE:
                self._n_heard -= len(self._heard.popleft())

    def _from_worker(self, message: WorkerMessage, at_ms: float) -> None:
        if message.kind == GENERATING:
            self._end_turn(at_ms, is_complete=False)
            ms = number_of(message.fields.get("speech_duration_ms"))
            speech = self._last_speech(ms)
            given = {"type": "audio", "duration_ms": 0 if speech is None else round(1000 * len(speech) / SAMPLE_RATE)}
            self._turn = OpenTurn(at_ms, given, speech)
        elif self._turn is not None and message.kind == CHUNK:
            self._turn.add_answer(message)
        elif self._turn is not None and message.kind == TURN_DONE:
            self._turn.text = text_of(message.fields.get("text")) or self._turn.text
            self._end_turn(at_ms, is_complete=True)

    def _end_turn(self, at_ms: float, *, is_complete: bool) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            speech_ms = turn.given["duration_ms"]
            self._turns.write(turn, at_ms, is_complete=is_complete, speech_input_ms=speech_ms)

    def _last_speech(self, ms: float | None) -> np.ndarray | None:
        """The last `ms` of the user's sound; all of it if that is unknown."""
        sound = joined(list(self._heard))
        self._heard.clear()
        self._n_heard = 0
        if sound is None or ms is None:
            return sound
        return sound[-max(1, round(ms * SAMPLE_RATE / 1000)) :]


def _config_of(message: HalfDuplexPrepare) -> dict[str, Any]:
    items = message.system_content or []
    texts = [item.text for item in items if isinstance(item, SystemText)]
    has_voice = any(isinstance(item, SystemSound) for item in items) or message.ref_audio_base64 is not None
    settings = message.config
    config: dict[str, Any] = jsonable(
        {
            "system_prompt": "\n".join(texts) or message.system_prompt,
            "system_content_count": len(items),
            "ref_audio": "from the client" if has_voice else None,
            "vad": settings.vad.model_dump(),
            "generation": settings.generation.model_dump(),
            "tts_enabled": settings.tts.enabled,
            "timeout_s": settings.session.timeout_s,
        }
    )
    return config
