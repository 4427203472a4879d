"""A duplex timeline as units: what the user sent in each second, and what the model answered.

Every message of the client is answered in order, so the oldest unanswered chunk belongs to the next result. Sound that
came in pieces is put together.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.inputs.audio_sizes import SAMPLE_RATE
from server.recording.render.built import BuiltRecording, Caption, Slide
from server.recording.render.frames import (
    WorkerMessage,
    form_of,
    joined,
    jsonable,
    number_of,
    samples_of,
    text_of,
    worker_message,
)
from server.recording.render.media_files import MediaFiles
from server.recording.render.replay_sound import ReplaySound
from server.recording.timeline import RecordSource, TimelineRecord
from worker.protocol.adjust_messages import Adjust, Adjusted
from worker.protocol.messages import (
    PLAIN_SPEC,
    AudioChunk,
    ClientDiagnostic,
    Error,
    Interrupt,
    Interrupted,
    Partial,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Result,
    Resume,
    Resumed,
    Spec,
    Stop,
    Stopped,
    VideoFrame,
    read_binary,
    read_text,
)
from worker.protocol.text_messages import InsertText, TextInserted
from worker.protocol.wire import SOUND_RATE, WireError

# The kind of an answer -> the kind of message that it answers.
ANSWERED = {
    Prepared.kind(): Prepare.kind(),
    Paused.kind(): Pause.kind(),
    Resumed.kind(): Resume.kind(),
    Interrupted.kind(): Interrupt.kind(),
    Stopped.kind(): Stop.kind(),
    Result.kind(): AudioChunk.kind(),
    Adjusted.kind(): Adjust.kind(),
    TextInserted.kind(): InsertText.kind(),
}
# Field of `timing` -> field of the result.
TIMING = {
    "llm_ms": "cost_llm_ms",
    "tts_prep_ms": "cost_tts_prep_ms",
    "tts_ms": "cost_tts_ms",
    "token2wav_ms": "cost_token2wav_ms",
    "all_ms": "cost_all_ms",
    "wall_clock_ms": "wall_clock_ms",
    "n_tokens": "n_tokens",
    "n_tts_tokens": "n_tts_tokens",
    "kv_cache_length": "kv_cache_length",
    "vision_slices": "vision_slices",
    "vision_tokens": "vision_tokens",
}
MAX_PARTS = 64  # of a unit; partial results beyond them are left out


@dataclass(eq=False)
class _Pending:
    """A message of the client that is not answered yet. samples, pictures: of a chunk. text: of `insert_text`."""

    kind: str
    at_ms: float
    text: str = ""
    samples: np.ndarray | None = None
    pictures: list[bytes] = field(default_factory=list)

    def joined_to(self, before: "_Pending | None") -> "_Pending":
        """This chunk with the pieces of its unit before it."""
        if before is None:
            return self
        samples = joined([one.samples for one in (before, self) if one.samples is not None])
        return _Pending(self.kind, self.at_ms, samples=samples, pictures=[*before.pictures, *self.pictures][:1])


class DuplexBuilder:
    """Builds `chunks`, their media files and the replay's sound."""

    def __init__(self, media: MediaFiles, replay: ReplaySound):
        self._media, self._replay = media, replay
        self._built = BuiltRecording("duplex", "chunks")
        self._spec_in = PLAIN_SPEC
        self._form_out = PLAIN_SPEC.sound_out
        self._pending: deque[_Pending] = deque()
        self._frames: list[bytes] = []
        self._pieces: _Pending | None = None  # of a unit that is not complete
        self._parts: list[np.ndarray] = []
        self._texts: list[str] = []  # inserted since the last unit
        self._turn = self._chunk_of_turn = 0
        self._turn_text = ""

    def add(self, record: TimelineRecord) -> None:
        """Read the next record. Raises: OSError if a file cannot be written."""
        self._built.seconds = record.at_ms / 1000
        if record.source is RecordSource.CLIENT:
            self._from_client(record)
        elif record.source is RecordSource.WORKER:
            self._from_worker(worker_message(record.data, self._form_out))
        else:
            self._pending.clear()  # which answers are missing is unknown
            self._pieces = None
            self._parts.clear()

    def finish(self) -> BuiltRecording:
        """Add the chunks that were not answered any more. Raises: OSError."""
        for pending in self._pending:
            if pending.samples is not None:
                whole = pending.joined_to(self._pieces)
                is_whole = whole.samples is not None and len(whole.samples) >= SAMPLE_RATE
                self._pieces = None if is_whole else whole
                if is_whole:
                    self._add_unanswered(whole)
        if self._pieces is not None:
            self._add_unanswered(self._pieces)
        return self._built

    # --- client ----------------------------------------------------------------------------------

    def _from_client(self, record: TimelineRecord) -> None:
        try:
            data = record.data
            message = read_text(data) if isinstance(data, str) else read_binary(data, self._spec_in)
        except WireError:
            self._pending.append(_Pending("", record.at_ms))  # answered with an error
            return
        match message:
            case ClientDiagnostic():
                return
            case VideoFrame():
                self._add_frame(message)
                return
            case AudioChunk():
                self._pending.append(self._chunk(message, record.at_ms))
                return
            case Prepare():
                self._spec_in = message.spec
                self._built.config = _config_of(message)
        text = message.text if isinstance(message, InsertText) else ""
        self._pending.append(_Pending(message.type, record.at_ms, text))

    def _add_frame(self, message: VideoFrame) -> None:
        try:
            self._frames.append(message.picture())
        except WireError:
            self._pending.append(_Pending("", 0.0))

    def _chunk(self, message: AudioChunk, at_ms: float) -> _Pending:
        frames, self._frames = self._frames, []
        try:
            pictures = frames + message.pictures()
        except WireError:
            pictures = frames
        return _Pending(message.type, at_ms, samples=samples_of(message.audio_base64), pictures=pictures[:1])

    # --- worker ----------------------------------------------------------------------------------

    def _from_worker(self, message: WorkerMessage) -> None:
        kind = message.kind
        if kind == Partial.kind():
            if message.samples is not None and len(self._parts) < MAX_PARTS:
                self._parts.append(message.samples)
        elif kind == Error.kind():
            if self._pending:
                self._pending.popleft()
        elif kind in ANSWERED:
            if kind == Prepared.kind():
                self._form_out = form_of(message.fields.get("spec"), "sound_out")
                self._pieces = None
                self._end_turn()
            asked = self._take(ANSWERED[kind])
            if kind == TextInserted.kind() and asked is not None:
                self._texts.append(asked.text)
            if kind == Result.kind():
                asked = (asked or _Pending(AudioChunk.kind(), 1000 * self._built.seconds)).joined_to(self._pieces)
                self._pieces = asked if message.fields.get("incomplete") is True else None
                if self._pieces is None:
                    self._add_chunk(asked, message)

    def _take(self, kind: str) -> _Pending | None:
        """Remove and return the oldest message of this kind, with the unanswered messages before it."""
        if all(one.kind != kind for one in self._pending):
            return None
        while self._pending[0].kind != kind:
            self._pending.popleft()
        return self._pending.popleft()

    # --- units -----------------------------------------------------------------------------------

    def _add_unanswered(self, asked: _Pending) -> None:
        self._add_chunk(asked, WorkerMessage(Result.kind(), {"is_listen": True}, None), unanswered=True)

    def _add_chunk(self, asked: _Pending, message: WorkerMessage, *, unanswered: bool = False) -> None:
        index, fields = len(self._built.entries), message.fields
        parts, self._parts = self._parts, []
        entry: dict[str, Any] = {"index": index, "receive_ts_ms": round(asked.at_ms, 1)}
        entry["user_audio"] = None if asked.samples is None else self._media.user_audio(index, asked.samples)
        entry["user_frame"] = self._media.user_frame(index, asked.pictures[0]) if asked.pictures else None
        is_listen = bool(fields.get("is_listen"))
        sound = None if is_listen else joined([*parts, *([] if message.samples is None else [message.samples])])
        at_s = self._replay.add(asked.samples, sound)
        entry["replay_ms"] = round(1000 * at_s)
        if asked.pictures:
            self._built.slides.append(Slide(at_s, entry["user_frame"]))
        entry["result"] = self._heard(fields) if is_listen else self._said(fields, sound, at_s)
        if unanswered:
            entry["unanswered"] = True
        if self._texts:
            entry["user_text"] = "\n".join(self._texts)
            self._texts.clear()
        self._built.entries.append(entry)

    def _heard(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._end_turn()
        return {"mode": "LISTEN", "timing": _timing(fields)}

    def _said(self, fields: dict[str, Any], sound: np.ndarray | None, at_s: float) -> dict[str, Any]:
        text, ends = text_of(fields.get("text")), fields.get("end_of_turn") is True
        self._turn_text += text
        if self._turn_text.strip():
            self._built.captions.append(Caption(at_s, self._turn_text))
        path = None if sound is None else self._media.chunk_audio(self._turn, self._chunk_of_turn, sound)
        self._chunk_of_turn += 1
        if ends:
            self._end_turn()
        return {
            "mode": "SPEAK",
            "timing": _timing(fields),
            "text": text,
            "ai_audio": path,
            "ai_audio_duration_ms": 0 if sound is None else round(1000 * len(sound) / SOUND_RATE),
            "end_of_turn": ends,
            **({"shift_ms": number_of(fields.get("shift_ms")) or 0} if fields.get("early") is True else {}),
        }

    def _end_turn(self) -> None:
        if self._chunk_of_turn:
            self._turn, self._chunk_of_turn, self._turn_text = self._turn + 1, 0, ""


def _timing(fields: dict[str, Any]) -> dict[str, float]:
    """The numbers of a result; 0 where the worker sent none, since viewers format each of them."""
    timing = {name: number_of(fields.get(field)) or 0 for name, field in TIMING.items()}
    stages = fields.get("stages")
    prefill = number_of(stages.get("prefill")) if isinstance(stages, dict) else None
    if prefill is None:
        prefill = max(timing["wall_clock_ms"] - timing["all_ms"], 0)
    return {"prefill_ms": round(prefill, 3), **timing}


def _config_of(message: Prepare) -> dict[str, Any]:
    """The settings of a session; of the voice only where it comes from."""
    voice = message.ref_audio_path or ("from the client" if message.ref_audio_base64 else None)
    spec: Spec = message.spec
    return {
        **jsonable(message.config),
        "system_prompt": message.system_prompt,
        "ref_audio": voice,
        "deferred_finalize": message.deferred_finalize,
        "max_slice_nums": message.max_slice_nums,
        "spec": spec.model_dump(),
    }
