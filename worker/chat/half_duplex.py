"""A half-duplex conversation: sound in, segments of speech found in it, each answered before anybody listens again.

Runs where sound arrives: finding speech and cutting it into content is done on the caller's thread, and only what has
to be answered goes to the engine. Knows when it listens. Does not know slots, batches nor the wire.

What the user says while an answer is made is not heard: there is no barge-in, but `break_speech` ends the answer, and
`take_back` forgets it together with what it answers.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from models.inputs.audio_sizes import CLIP_SAMPLES, SAMPLE_RATE
from models.inputs.messages import ChatMessage
from models.inputs.prompts import PromptOptions
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.chat.vad import SpeechEnded, SpeechStarted, VoiceDetector, VoiceSettings
from worker.loop.audio_buffer import checked
from worker.loop.results import Event, Failure, Generating, ReplyResult, VoiceState

SEGMENT = PromptOptions(stream_input=True)  # a pair of marks around every second


class SessionPort(Protocol):
    """The way to the conversation's session; every call returns at once."""

    name: str

    def answer(self, content: Any, config: ReplyConfig, arrived: float) -> Future[None]: ...

    def take_back(self) -> Future[bool]: ...

    def break_speech(self) -> Future[None]: ...

    def close(self) -> Future[None]: ...


class HalfDuplex:
    """One conversation. Sound is pushed by one thread at a time; events may come on the engine's thread too."""

    def __init__(
        self,
        reader: Any,
        config: HalfDuplexConfig,
        emit: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """reader: `models.stages.message_reader.MessageReader`. emit: must return at once. Raises: SettingsError."""
        self.config = config
        self._reader, self._emit, self._clock = reader, emit, clock
        settings = VoiceSettings(config.threshold, config.min_speech_ms, config.min_silence_ms, config.speech_pad_ms)
        self._detector = VoiceDetector(settings)
        self._line: SessionPort | None = None
        self._hears_from = float("inf")
        self._is_speaking = False  # the user
        self._is_answering = False
        self._is_over = False
        self._n_turns = 0

    def begin(self, line: SessionPort) -> None:
        """The session is there; soon somebody listens."""
        self._line = line
        self._hears_from = self._clock() + self.config.deaf_s

    def push(self, samples: np.ndarray) -> None:
        """Hear more sound: [n] float in [-1, 1] at 16 kHz. Nothing is heard while an answer is made, right after the
        start and after the end.

        Raises: AudioError; nothing of it is heard then.
        """
        samples = checked(samples)
        if self._is_over or self._is_answering or self._clock() < self._hears_from:
            return
        arrived, segments = self._clock(), []
        for event in self._detector.push(samples):
            self._tell_speaking(isinstance(event, SpeechStarted))
            if isinstance(event, SpeechEnded):
                segments.append(event.samples)
        if segments:
            # The public implementation forgets all but the newest.
            reference = self.config.reply.compat == "reference"
            self._ask(np.concatenate(segments[-1:] if reference else segments), arrived)

    def _tell_speaking(self, is_speaking: bool) -> None:
        if is_speaking != self._is_speaking:
            self._is_speaking = is_speaking
            self._emit(VoiceState(self._line.name, is_speaking))

    def _ask(self, sound: np.ndarray, arrived: float) -> None:
        self._tell_speaking(False)
        self._detector.reset()
        sound = sound[-CLIP_SAMPLES:]
        content = self._reader.cut(self._reader.read_segment(ChatMessage("user", (sound,)), SEGMENT))
        self._is_answering = True
        self._emit(Generating(self._line.name, 1000 * len(sound) / SAMPLE_RATE))
        asked = self._line.answer(content, self.config.reply, arrived)
        asked.add_done_callback(self._asked)

    def _asked(self, asked: Future[None]) -> None:
        if not asked.cancelled() and (error := asked.exception()) is not None:
            self.hand_on(Failure(self._line.name, self._n_turns + 1, error))

    def hand_on(self, event: Event) -> None:
        """What the engine has to tell; with an outcome somebody listens again."""
        if isinstance(event, ReplyResult):
            self._n_turns = event.index
        if isinstance(event, ReplyResult | Failure):
            self._is_answering = False
        self._emit(event)

    def break_speech(self) -> Future[None]:
        """End the answer that is made: it is silent at once, its text ends at the next token and stays as it is."""
        return self._line.break_speech()

    def take_back(self) -> Future[bool]:
        """Forget the answer that is made, and what it answers. Gives: whether there was one; it has no outcome then."""
        taken = self._line.take_back()
        taken.add_done_callback(self._taken_back)
        return taken

    def _taken_back(self, taken: Future[bool]) -> None:
        if not taken.cancelled() and taken.exception() is None and taken.result():
            self._is_answering = False

    def stop(self) -> Future[None]:
        """End the conversation, an answer that is made included."""
        self._is_over = True
        return self._line.close()
