"""The events of one vLLM-Omni session: their sequence numbers, and those of a response from its begin to its end."""

import base64
import secrets
from collections.abc import Callable
from itertools import count
from typing import Any

from server.doors.dialects.vllm_omni.settings import OmniOutput
from server.doors.errors import ApiError

SPEECH_BYTES_MS = 48  # of PCM16 at 24 kHz


class OmniEvents:
    """Sends events with an id and a rising number. put: takes an event and returns at once."""

    def __init__(self, put: Callable[[dict[str, Any]], None], session_id: str):
        self._put, self._session_id = put, session_id
        self._numbers = count(1)

    def __call__(self, kind: str, **fields: object) -> None:
        """Send an event. kind: its type."""
        head = {"type": kind, "event_id": f"event_{secrets.token_hex(10)}", "server_event_seq": next(self._numbers)}
        self._put({**head, "session_id": self._session_id, **fields})

    def error(self, error: ApiError, event_id: str | None) -> None:
        """Send an `error` event. event_id: of the client's event that caused it."""
        self("error", error={**error.fields(), "event_id": event_id})


class Playback:
    """How much of the speech was made, sent, played and kept, in ms, of the current response."""

    def __init__(self) -> None:
        self.sent_ms = self.played_ms = self.committed_ms = 0.0

    def acknowledge(self, played_ms: float, committed_ms: float | None) -> None:
        """Record what the client has played."""
        self.played_ms = min(max(self.played_ms, played_ms), self.sent_ms)
        self.committed_ms = min(self.played_ms if committed_ms is None else committed_ms, self.sent_ms)

    def shown(self) -> dict[str, int]:
        sent, played, committed = int(self.sent_ms), int(self.played_ms), int(self.committed_ms)
        return {"generated_ms": sent, "sent_ms": sent, "played_ms": played, "committed_ms": committed}


class OmniResponse:
    """One response, from its first speech to its end.

    Args:
        send: sends events.
        output: encodes its sound.
        playback: counts its sound.
        epoch: number of interruptions before it.
    """

    def __init__(self, send: OmniEvents, output: OmniOutput, playback: Playback, epoch: int):
        self._send, self._output, self._playback, self._epoch = send, output, playback, epoch
        self.id = f"resp_{secrets.token_hex(10)}"
        self._transcript, self._unsent_text = "", ""
        self._place = {"response_id": self.id, "item_id": f"item_{self.id}", "output_index": 0, "content_index": 0}

    def begin(self) -> None:
        """Send the events before the first delta."""
        place, part = self._place, {"type": "audio", "transcript": ""}
        self._send("response.created", response_id=self.id, response=self._resource("in_progress"))
        head = {name: place[name] for name in ("response_id", "output_index")}
        self._send("response.output_item.added", **head, item=self._item("in_progress"))
        self._send("response.content_part.added", **place, part=part)
        self._send("response.speak", **place)

    def add(self, text: str, pcm16: bytes, *, is_last: bool = False) -> None:
        """Send speech: one delta of the transcript for each one of the sound. is_last: of the model's turn."""
        self._unsent_text += text
        if not pcm16:
            return
        self._send_text()
        self._playback.sent_ms += len(pcm16) / SPEECH_BYTES_MS
        data = self._output.encode(pcm16)
        metadata = {
            "epoch": self._epoch,
            "model_speak": True,
            "end_of_turn": is_last,
            "audio_duration_ms": round(self._playback.sent_ms),
            "audio_text_marks": [{"text_chars": len(self._transcript), "audio_end_ms": round(self._playback.sent_ms)}],
            "playback": self._playback.shown(),
        }
        delta = base64.b64encode(data).decode()
        form = {"format": self._output.form, "sample_rate_hz": self._output.rate}
        self._send("response.output_audio.delta", **self._place, delta=delta, **form, metadata=metadata)

    def end(self, status: str, reason: str | None = None) -> None:
        """Send the events after the last delta. reason: of a response that was cancelled."""
        if self._unsent_text and status == "completed":
            self._send_text()
        place, transcript = self._place, self._transcript
        self._send("response.output_audio.done", **place)
        self._send("response.output_audio_transcript.done", **place, transcript=transcript)
        self._send("response.content_part.done", **place, part={"type": "audio", "transcript": transcript})
        head = {name: place[name] for name in ("response_id", "output_index")}
        item_status = "completed" if status == "completed" else "incomplete"
        self._send("response.output_item.done", **head, item=self._item(item_status))
        details = None if reason is None else {"type": status, "reason": reason}
        done = {**self._resource(status), "status_details": details, "output": [self._item(item_status)]}
        self._send("response.done", response_id=self.id, response=done)

    def _send_text(self) -> None:
        text, self._unsent_text = self._unsent_text, ""
        self._transcript += text
        self._send("response.output_audio_transcript.delta", **self._place, delta=text)

    def _resource(self, status: str) -> dict[str, object]:
        base = {"id": self.id, "object": "realtime.response", "status": status}
        return {**base, "status_details": None, "output": [], "metadata": {"epoch": self._epoch}}

    def _item(self, status: str) -> dict[str, object]:
        content = [{"type": "output_audio", "transcript": self._transcript}] if status != "in_progress" else []
        base = {"id": self._place["item_id"], "object": "realtime.item", "type": "message"}
        return {**base, "status": status, "role": "assistant", "content": content}
