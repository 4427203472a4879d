"""Transcripts of users' speech, made by the model in slots that no session needs.

Contains which transcriptions wait and what the model is asked. Contains no events of a session.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from server.access.identity import Identity
from server.doors.core.chat_turn import TurnFinished, TurnText
from server.doors.core.spare_turn import SpareTurn, spare_turn
from server.doors.errors import ApiError
from server.live.slot_wait import SlotWait
from worker.protocol.wire import Sound

LOG = logging.getLogger(__name__)
RATE = 16_000
MIN_S = 0.1  # shorter sound is not sent to the model
MAX_S = 120.0  # of sound in one transcription
MAX_TIME_S = 120.0  # until a transcription is given up
MAX_WAITING, MAX_WAITING_OF_SESSION = 32, 4  # transcriptions without a slot; the oldest beyond are given up
FEWEST_TOKENS, TOKENS_PER_S = 32, 12  # bounds of a transcript, so that a model that repeats itself ends
INSTRUCTION = "Write down what is said in this recording, word for word. Answer with these words only."


@dataclass(frozen=True, eq=False)
class SpokenInput:
    """What is to be transcribed.

    Attributes:
        sound: [n] float32 at 16 kHz.
        language: code of its language; None: unknown.
        hint: text that the transcript may need, such as names; None: none.
    """

    sound: np.ndarray
    language: str | None = None
    hint: str | None = None

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return len(self.sound) / RATE

    def chat(self) -> dict[str, object]:
        """The fields of `ChatRequest`. Slow for long sound: call on a thread."""
        asked = [INSTRUCTION]
        if self.language is not None:
            asked.append(f"The language of the recording is {self.language}.")
        if self.hint:
            asked.append(f"What may help to understand it: {self.hint}")
        sound = {"type": "audio", "data": Sound(self.sound).base64()}
        content = [{"type": "text", "text": " ".join(asked)}, sound]
        return {
            "messages": [{"role": "user", "content": content}],
            "streaming": True,
            "priority": "low",
            "report_usage": True,
            "generation": {
                "do_sample": False,
                "num_beams": 1,
                "length_penalty": 1.0,
                "max_new_tokens": FEWEST_TOKENS + round(TOKENS_PER_S * self.seconds),
            },
        }


@dataclass(frozen=True)
class WholeTranscript:
    """A complete transcript. seconds: length of its sound."""

    text: str
    seconds: float


TranscriptEnd = WholeTranscript | ApiError


class Transcription:
    """One transcription. Made by `Transcriber.start`."""

    def __init__(
        self,
        slots: SlotWait,
        recording: SpokenInput,
        identity: Identity,
        on_text: Callable[[str], None],
        on_end: Callable[[TranscriptEnd], None],
    ):
        self._slots, self._recording, self._identity = slots, recording, identity
        self._on_text, self._on_end = on_text, on_end
        self._turn: SpareTurn | None = None
        self._sent = ""
        self._is_over = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it has no slot yet."""
        return not self._is_over and (self._turn is None or not self._turn.has_slot)

    def start(self, on_done: Callable[["Transcription"], None]) -> None:
        """Begin. on_done: called when its slot is free again, however it has ended."""
        self._task = asyncio.create_task(self._run(), name="transcription")
        self._task.add_done_callback(lambda _: on_done(self))

    def cancel(self) -> None:
        """End it without a call of `on_end`. A later call has no effect."""
        if not self._is_over:
            self._is_over = True
            self._slots.metrics.record_transcription("cancelled")
        if self._task is not None:
            self._task.cancel()

    def drop(self) -> None:
        """End it, since too many others wait."""
        expected = f"at most {MAX_WAITING_OF_SESSION} of a session and {MAX_WAITING} in all without a slot"
        self._end(ApiError(503, f"transcription: expected {expected}, got more", code="too_many_transcriptions"))
        self.cancel()

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(MAX_TIME_S):
                end = await self._transcribe()
        except ApiError as error:
            self._end(error)
        except TimeoutError:
            message = f"transcription: expected its end within {MAX_TIME_S:.0f} s, got none"
            self._end(ApiError(503, message, code="transcription_timeout"))
        except Exception:
            LOG.exception("transcription")
            self._end(ApiError(500, "Internal server error"))
        else:
            self._end(end)

    def _end(self, end: TranscriptEnd) -> None:
        if not self._is_over:
            self._is_over = True
            self._slots.metrics.record_transcription("completed" if isinstance(end, WholeTranscript) else "failed")
            self._on_end(end)

    async def _transcribe(self) -> WholeTranscript:
        """The transcript. Raises: ApiError."""
        recording = self._recording
        if recording.seconds > MAX_S:
            message = f"sound: expected at most {MAX_S:.0f} s, got {recording.seconds:.1f} s"
            raise ApiError(400, message, code="audio_too_long")
        if recording.seconds < MIN_S:
            return WholeTranscript("", recording.seconds)
        while True:
            try:
                return WholeTranscript(await self._text(recording), recording.seconds)
            except ApiError:
                if self._turn is None or not self._turn.is_reclaimed:
                    raise

    async def _text(self, recording: SpokenInput) -> str:
        """The whole text, from one turn. Raises: ApiError."""
        self._turn, text = None, ""
        async with spare_turn(self._slots, self._identity, recording.chat) as turn:
            self._turn = turn
            async for event in turn.events():
                if isinstance(event, TurnText):
                    text += event.text
                    self._send(text.strip())
                elif isinstance(event, TurnFinished):
                    text = event.text
        self._send(text.strip())
        return text.strip()

    def _send(self, text: str) -> None:
        """Send what is new of the text so far. A turn in place of another one first repeats what was sent."""
        if len(text) > len(self._sent) and text.startswith(self._sent) and not self._is_over:
            new, self._sent = text[len(self._sent) :], text
            self._on_text(new)


class Transcriber:
    """All transcriptions of the gateway.

    Args:
        slots: lend slots.
        is_enabled: whether sessions may ask for transcripts.
    """

    def __init__(self, slots: SlotWait, *, is_enabled: bool):
        self._slots, self.is_enabled = slots, is_enabled
        self._running: dict[Transcription, str] = {}  # in the order of their begin, with the session

    def start(
        self,
        session_id: str,
        identity: Identity,
        recording: SpokenInput,
        on_text: Callable[[str], None],
        on_end: Callable[[TranscriptEnd], None],
    ) -> Transcription:
        """Begin a transcription.

        Args:
            session_id: whose speech it is; transcriptions that wait are bounded for each session and in all.
            identity: whose session it is.
            recording: the speech.
            on_text: called with each further text.
            on_end: called once, with the whole text or an error.
        """
        waiting = [one for one in self._running if one.is_waiting]
        own = [one for one in waiting if self._running[one] == session_id]
        if len(own) >= MAX_WAITING_OF_SESSION:
            own[0].drop()
        elif len(waiting) >= MAX_WAITING:
            waiting[0].drop()
        one = Transcription(self._slots, recording, identity, on_text, on_end)
        self._running[one] = session_id
        one.start(self._forget)
        return one

    def _forget(self, one: Transcription) -> None:
        del self._running[one]
