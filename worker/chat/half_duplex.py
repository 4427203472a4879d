"""A half-duplex conversation: finds segments of speech in the user's sound and has each one answered.

Contains the conversation's states and the way from sound to content, both on the thread that pushes sound. Only
requests for answers go to the engine. Does not contain slots, batches or the wire format.

Sound that arrives while an answer is made is dropped: the user cannot interrupt by speaking. `break_speech` ends the
answer early, and `take_back` removes it together with the user's turn.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from models.inputs.audio_sizes import CLIP_SAMPLES, SAMPLE_RATE
from models.inputs.messages import ChatMessage
from models.inputs.prompts import PromptOptions
from models.stages.message_reader import Content, MessageReader
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.chat.vad import SpeechEnded, SpeechStarted, VoiceDetector, VoiceSettings
from worker.loop.audio_buffer import checked
from worker.loop.results import Event, Failure, Generating, ReplyResult, VoiceState

SEGMENT = PromptOptions(stream_input=True)  # a pair of audio marks around every second


class SessionPort(Protocol):
    """Commands to the conversation's session on the engine's thread. Every call returns at once."""

    @property
    def name(self) -> str:
        """The session's name, as in its events."""

    def answer(self, content: Content, config: ReplyConfig, arrived: float) -> Future[None]:
        """Answer `content`, which arrived at the time `arrived` of the monotonic clock."""

    def take_back(self) -> Future[bool]:
        """Remove the round in flight. Gives: whether there was one."""

    def break_speech(self) -> Future[None]:
        """End the answer in flight."""

    def close(self) -> Future[None]:
        """Close the session."""


class HalfDuplex:
    """One conversation. One thread at a time pushes sound; the engine's thread may emit events meanwhile.

    Args:
        reader: turns a segment into content for the engine.
        emit: receives every event; it must return at once.
        clock: seconds, monotonic.
    Raises: SettingsError.
    """

    def __init__(
        self,
        reader: MessageReader,
        config: HalfDuplexConfig,
        emit: Callable[[Event], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self._reader, self._emit, self._clock = reader, emit, clock
        settings = VoiceSettings(config.threshold, config.min_speech_ms, config.min_silence_ms, config.speech_pad_ms)
        self._detector = VoiceDetector(settings)
        self._opened: SessionPort | None = None
        self._accepts_from = float("inf")
        self._is_speaking = False  # the user
        self._is_answering = False
        self._is_over = False
        self._n_turns = 0

    @property
    def _port(self) -> SessionPort:
        assert self._opened is not None, "`begin` comes before any other call"
        return self._opened

    def begin(self, port: SessionPort) -> None:
        """Connect the open session; sound counts from `deaf_s` later on."""
        self._opened = port
        self._accepts_from = self._clock() + self.config.deaf_s

    def push(self, samples: np.ndarray) -> None:
        """Process more sound: [n] float in [-1, 1] at 16 kHz.

        Sound is dropped while an answer is made, during the first `deaf_s` seconds and after `close`.
        Raises: AudioError; the samples have no effect then.
        """
        samples = checked(samples)
        if self._is_over or self._is_answering or self._clock() < self._accepts_from:
            return
        arrived = self._clock()
        segments: list[np.ndarray] = []
        for event in self._detector.push(samples):
            self._report_speaking(isinstance(event, SpeechStarted))
            if isinstance(event, SpeechEnded):
                segments.append(event.samples)
        if segments:
            # The public implementation drops all but the newest segment of a push.
            reference = self.config.reply.compat == "reference"
            self._request_answer(np.concatenate(segments[-1:] if reference else segments), arrived)

    def _report_speaking(self, is_speaking: bool) -> None:
        if is_speaking != self._is_speaking:
            self._is_speaking = is_speaking
            self._emit(VoiceState(self._port.name, is_speaking))

    def _request_answer(self, sound: np.ndarray, arrived: float) -> None:
        self._report_speaking(False)
        self._detector.reset()
        sound = sound[-CLIP_SAMPLES:]
        content = self._reader.cut(self._reader.read_segment(ChatMessage("user", (sound,)), SEGMENT))
        self._is_answering = True
        self._emit(Generating(self._port.name, 1000 * len(sound) / SAMPLE_RATE))
        self._port.answer(content, self.config.reply, arrived).add_done_callback(self._on_answer_requested)

    def _on_answer_requested(self, request: Future[None]) -> None:
        if not request.cancelled() and isinstance(error := request.exception(), Exception):
            self.forward(Failure(self._port.name, self._n_turns + 1, error))

    def forward(self, event: Event) -> None:
        """Emit an event of the engine. After the outcome of an answer, sound is processed again."""
        if isinstance(event, ReplyResult):
            self._n_turns = event.index
        if isinstance(event, ReplyResult | Failure):
            self._is_answering = False
        self._emit(event)

    def break_speech(self) -> Future[None]:
        """End the answer in flight: its sound stops at once, its text at the next token. What was said stays."""
        return self._port.break_speech()

    def take_back(self) -> Future[bool]:
        """Remove the answer in flight, which has no outcome then, and its user's turn. Gives: whether there was one."""
        request = self._port.take_back()
        request.add_done_callback(self._on_taken_back)
        return request

    def _on_taken_back(self, request: Future[bool]) -> None:
        if not request.cancelled() and request.exception() is None and request.result():
            self._is_answering = False

    def close(self) -> Future[None]:
        """End the conversation and any answer in flight."""
        self._is_over = True
        return self._port.close()
