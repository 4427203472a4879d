"""The events of one response of a vLLM-Omni session, from its begin to its end."""

import secrets

from server.doors.core.event_writer import Base64Text
from server.doors.dialects.vllm_omni.events import OmniEvents
from server.doors.dialects.vllm_omni.items import OmniItem, OmniItems
from server.doors.dialects.vllm_omni.settings import OmniOutput

SPEECH_BYTES_MS = 48  # of PCM16 at 24 kHz


class OmniResponse:
    """One response, from its first speech to its end.

    Args:
        send: sends events.
        items: of the conversation; the response's item is added.
        output: encodes its sound.
        epoch: number of interruptions before it.
        turn_id: number of the user's turns before it.
    """

    def __init__(self, send: OmniEvents, items: OmniItems, output: OmniOutput, epoch: int, turn_id: int):
        self._send, self._output, self._epoch, self._turn_id = send, output, epoch, turn_id
        self.id = f"resp_{secrets.token_hex(10)}"
        part = {"type": "output_audio", "transcript": ""}
        self.item = OmniItem(f"item_{self.id}", "assistant", [part], "in_progress")
        self._part = part
        self._before = items.add(self.item)
        self._unsent_text = ""
        self._place = {"response_id": self.id, "item_id": self.item.id, "output_index": 0, "content_index": 0}

    def begin(self) -> None:
        """Send the events before the first delta."""
        place, part = self._place, {"type": "audio", "transcript": ""}
        self._send("response.created", response_id=self.id, response=self._resource("in_progress"))
        head = {name: place[name] for name in ("response_id", "output_index")}
        self._send("response.output_item.added", **head, item=self.item.shown())
        self._send("conversation.item.added", previous_item_id=self._before, item=self.item.shown())
        self._send("response.content_part.added", **place, part=part)
        self._send("response.speak", **place, metadata={"epoch": self._epoch, "model_speak": True})

    def add(self, text: str, pcm16: bytes, *, is_last: bool = False) -> None:
        """Send speech: one delta of the transcript for each one of the sound. is_last: of the model's turn."""
        self._unsent_text += text
        if not pcm16:
            return
        self._send_text()
        playback = self.item.playback
        playback.sent_ms += len(pcm16) / SPEECH_BYTES_MS
        self.item.marks.append((len(self.item.transcript), playback.sent_ms))
        data = self._output.encode(pcm16)
        sent_ms = round(playback.sent_ms)
        metadata = {
            "epoch": self._epoch,
            "model_speak": True,
            "end_of_turn": is_last,
            "audio_duration_ms": sent_ms,
            "audio_text_marks": [{"text_chars": len(self.item.transcript), "audio_end_ms": sent_ms}],
            "playback": playback.shown(),
        }
        delta = Base64Text.of(data)
        form = {"format": self._output.form, "sample_rate_hz": self._output.rate}
        self._send("response.output_audio.delta", **self._place, delta=delta, **form, metadata=metadata)

    def end(self, status: str, reason: str | None = None) -> None:
        """Send the events after the last delta. reason: of a response that is not completed."""
        if self._unsent_text and status == "completed":
            self._send_text()
        place, item = self._place, self.item
        item.status = "completed" if status == "completed" else "incomplete"
        transcript = item.transcript
        self._send("response.output_audio.done", **place)
        self._send("response.output_audio_transcript.done", **place, transcript=transcript)
        self._send("response.content_part.done", **place, part={"type": "audio", "transcript": transcript})
        head = {name: place[name] for name in ("response_id", "output_index")}
        self._send("conversation.item.done", previous_item_id=self._before, item=item.shown())
        self._send("response.output_item.done", **head, item=item.shown())
        details = None if reason is None else {"type": status, "reason": reason}
        done = {**self._resource(status), "status_details": details, "output": [item.shown()]}
        self._send("response.done", response_id=self.id, response=done)
        self._send("rate_limits.updated", rate_limits=[])

    def _send_text(self) -> None:
        text, self._unsent_text = self._unsent_text, ""
        self._part["transcript"] += text
        self._send("response.output_audio_transcript.delta", **self._place, delta=text)

    def _resource(self, status: str) -> dict[str, object]:
        base = {"id": self.id, "object": "realtime.response", "status": status, "modalities": ["audio", "text"]}
        metadata = {"epoch": self._epoch, "turn_id": self._turn_id, "playback": self.item.playback.shown()}
        return {**base, "status_details": None, "output": [], "metadata": metadata}
