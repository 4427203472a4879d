"""Turns of a recording: their entries, media files and the replay's sound."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from server.recording.render.built import BuiltRecording
from server.recording.render.frames import WorkerMessage, joined, number_of, text_of
from server.recording.render.media_files import MediaFiles
from server.recording.render.replay_sound import ReplaySound
from worker.protocol.wire import SOUND_RATE


@dataclass(eq=False)
class OpenTurn:
    """A turn that is not answered completely.

    Attributes:
        asked_at_ms: when the answer was asked for, since the start of the recording.
        given: the `input` of the entry.
        speech: [n] float32 at 16 kHz: what the user said.
        text, sounds: of the answer so far; sounds are [n] float32 at 24 kHz.
        error: why there is no answer.
    """

    asked_at_ms: float
    given: dict[str, Any]
    speech: np.ndarray | None = None
    text: str = ""
    sounds: list[np.ndarray] = field(default_factory=list)
    error: str = ""

    def add_answer(self, message: WorkerMessage) -> None:
        """Add a part of the answer, a `chunk`."""
        self.text += text_of(message.fields.get("text_delta"))
        if message.samples is not None:
            self.sounds.append(message.samples)


class TurnWriter:
    """Writes finished turns into `built`."""

    def __init__(self, kind: str, media: MediaFiles, replay: ReplaySound):
        """kind: of the recording; it is the `mode` in `recording.json`."""
        self.built = BuiltRecording(kind, "turns")
        self._media, self._replay = media, replay

    def write(self, turn: OpenTurn, ended_at_ms: float, *, is_complete: bool, **timing: object) -> None:
        """Write a turn.

        Args:
            turn: with its whole answer.
            ended_at_ms: when the answer ended, since the start of the recording.
            is_complete: the worker ended the answer itself.
            timing: further numbers of the entry's `timing`; those that are no numbers are left out.
        Raises:
            OSError: a file cannot be written.
        """
        index, sound = len(self.built.entries), joined(turn.sounds)
        output: dict[str, Any] = {"text": turn.text}
        if turn.error:
            output["error"] = turn.error
        if sound is not None:
            output["audio"] = self._media.turn_audio(index, sound)
            output["audio_duration_ms"] = round(1000 * len(sound) / SOUND_RATE)
        replay_ms = round(1000 * self._replay.seconds)
        if turn.speech is not None:
            turn.given["audio"] = self._media.user_audio(index, turn.speech)
            self._replay.add(turn.speech, None)
        if sound is not None:
            self._replay.add(None, sound)
        numbers = {name: number for name, value in timing.items() if (number := number_of(value)) is not None}
        elapsed_ms = round(max(ended_at_ms - turn.asked_at_ms, 0.0), 1)
        entry: dict[str, Any] = {
            "turn_index": index,
            "request_ts_ms": round(turn.asked_at_ms, 1),
            "replay_ms": replay_ms,
            "input": turn.given,
            "output": output,
            "timing": {"elapsed_ms": elapsed_ms, **numbers},
        }
        if not is_complete:
            entry["incomplete"] = True
        self.built.entries.append(entry)
