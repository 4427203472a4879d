"""A half-duplex conversation: finds segments of speech in the user's sound and has each one answered.

Contains the conversation's states and the way from sound to content, both on the thread that pushes sound. Only
requests for answers go to the engine. Does not contain slots, batches or the wire format.

Sound that arrives while an answer is made is dropped, unless the settings allow barge-in: then speech of `barge_in_ms`
interrupts an answer that is made or played, and is the next turn. `interrupt` does the same without speech, and
`take_back` removes an answer together with the user's turn.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from models.inputs.audio_sizes import SAMPLE_RATE
from models.inputs.image import EncodedImage
from models.inputs.messages import ChatMessage
from models.inputs.prompts import Prompt, PromptOptions
from models.stages.message_reader import Content, MessageReader
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.chat.turn_pictures import RecentPictures, SpokenTurn, joined
from worker.chat.vad import SpeechEnded, SpeechStarted, VoiceDetector, VoiceEvent, VoiceSettings
from worker.loop.audio_buffer import checked
from worker.loop.results import (
    SOUND_RATE,
    Event,
    Failure,
    Generating,
    Interruption,
    PartialResult,
    ReplyResult,
    VoiceState,
)

SEGMENT = PromptOptions(stream_input=True, use_image_id=False)  # a pair of audio marks around every second


class SessionPort(Protocol):
    """Commands to the conversation's session on the engine's thread. Every call returns at once."""

    @property
    def name(self) -> str:
        """The session's name, as in its events."""

    @property
    def context_len(self) -> int:
        """Context rows held."""

    def answer(self, content: Content, config: ReplyConfig, arrived: float) -> Future[None]:
        """Answer `content`, which arrived at the time `arrived` of the monotonic clock."""

    def take_back(self) -> Future[bool]:
        """Remove the round in flight. Gives: whether there was one."""

    def break_speech(self) -> Future[None]:
        """End the answer in flight."""

    def close(self) -> Future[None]:
        """Close the session."""


@dataclass
class Answering:
    """The latest answer. Changed by the engine's thread and by the thread that pushes sound, under a lock.

    Attributes:
        is_made: it has no outcome yet.
        is_interrupted: it was interrupted.
        text, n_samples: what was emitted of it.
        plays_until: end of its playback, on the conversation's clock, if that started with its first sound.
    """

    is_made: bool = False
    is_interrupted: bool = False
    text: str = ""
    n_samples: int = 0
    plays_until: float = 0.0


class HalfDuplex:
    """One conversation. One thread at a time pushes sound; the engine's thread may emit events meanwhile.

    Args:
        reader: turns a segment into content for the engine.
        emit: receives every event; it must return at once.
        max_rows: length of the slot's context.
        clock: seconds, monotonic.
    Raises: SettingsError.
    """

    def __init__(
        self,
        reader: MessageReader,
        config: HalfDuplexConfig,
        emit: Callable[[Event], None],
        max_rows: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self._reader, self._emit, self._clock = reader, emit, clock
        settings = VoiceSettings(config.threshold, config.min_speech_ms, config.min_silence_ms, config.speech_pad_ms)
        self._detector = VoiceDetector(settings)
        self._pictures = RecentPictures(config.frame_interval_s)
        self._options = replace(SEGMENT, max_slice_nums=config.max_slice_nums)
        self._max_rows, self._max_turn_rows = max_rows, config.marks(max_rows)[0] // 2
        self._opened: SessionPort | None = None
        self._accepts_from = float("inf")
        self._is_speaking = False  # the user
        self._is_over = False
        self._n_turns = 0
        self._lock = threading.RLock()  # reentrant, since a port may run the engine at once
        self._answering = Answering()
        self._waiting: list[SpokenTurn] = []  # segments that ended while an interrupted answer was still made

    @property
    def _port(self) -> SessionPort:
        assert self._opened is not None, "`begin` comes before any other call"
        return self._opened

    @property
    def context_len(self) -> int:
        """Context rows of the conversation."""
        return self._port.context_len

    @property
    def n_pixels(self) -> int:
        """Pixels of the pictures that the next push or `answer_waiting` may decode, beside the push's own."""
        return self._pictures.n_pixels + sum(one.image.n_pixels for turn in self._waiting for one in turn.pictures)

    def begin(self, port: SessionPort) -> None:
        """Connect the open session; sound counts from `deaf_s` later on."""
        self._opened = port
        self._accepts_from = self._clock() + self.config.deaf_s

    def push(self, samples: np.ndarray, pictures: Sequence[EncodedImage] = ()) -> None:
        """Process more sound.

        Args:
            samples: [n] float in [-1, 1] at 16 kHz.
            pictures: what the user saw meanwhile.
        Both are dropped during the first `deaf_s` seconds, after `close`, and without barge-in while an answer is made.
        Raises: AudioError, and the samples have no effect; ImageError, and the turn has no answer.
        """
        samples, arrived = checked(samples), self._clock()
        drops = self._answering.is_made and not self.config.barge_in
        if self._is_over or drops or arrived < self._accepts_from:
            return
        onset_ms = self._onset_ms(arrived)
        self._pictures.push(pictures, len(samples), is_turn_open=self._detector.speech_ms is not None)
        segments = [
            self._pictures.turn(event.samples, event.end)
            for event in self._detector.push(samples)
            if self._on_voice(event, onset_ms) and isinstance(event, SpeechEnded)
        ]
        if self._detector.speech_ms is not None and self._detector.speech_ms >= onset_ms:
            self._on_speech()
        if segments:
            # The public implementation drops all but the newest segment of a push.
            reference = self.config.reply.compat == "reference"
            self._waiting += segments[-1:] if reference else segments
            self.answer_waiting(arrived)

    def answer_waiting(self, arrived: float | None = None) -> None:
        """Have a turn answered that ended before the interrupted answer did; without one, without effect.

        To be called after each outcome, by the thread that pushes sound. arrived: as in `SessionPort.answer`.
        """
        if self._waiting and not self._answering.is_made and not self._is_over:
            segments, self._waiting = self._waiting, []
            self._request_answer(joined(segments), self._clock() if arrived is None else arrived)

    def _onset_ms(self, now: float) -> float:
        """Speech after which the user counts as speaking."""
        answering = self._answering
        is_guarded = answering.is_made or now < answering.plays_until
        return self.config.barge_in_ms if self.config.barge_in and is_guarded and not self._is_speaking else 0.0

    def _on_voice(self, event: VoiceEvent, onset_ms: float) -> bool:
        """Report what the detector found. Returns: whether the user spoke a turn."""
        if isinstance(event, SpeechStarted):
            if not onset_ms:
                self._on_speech()
            return False
        is_turn = isinstance(event, SpeechEnded) and (self._is_speaking or event.speech_ms >= onset_ms)
        if is_turn:
            self._on_speech()
        self._report_speaking(False)
        return is_turn

    def _on_speech(self) -> None:
        if not self._is_speaking:
            if self.config.barge_in:
                self.interrupt()
            self._report_speaking(True)

    def _report_speaking(self, is_speaking: bool) -> None:
        if is_speaking != self._is_speaking:
            self._is_speaking = is_speaking
            self._emit(VoiceState(self._port.name, is_speaking))

    def _request_answer(self, turn: SpokenTurn, arrived: float) -> None:
        self._report_speaking(False)
        if not self.config.barge_in:  # the sound that follows is dropped
            self._detector.reset()
            self._pictures.reset()
        prompt, n_pictures = self._fitting(turn)
        content = self._reader.cut(prompt)
        with self._lock:  # so that the engine has the request before an interrupt of another thread
            self._answering = Answering(is_made=True)
            self._emit(Generating(self._port.name, 1000 * len(turn.sound) / SAMPLE_RATE, n_pictures))
            request = self._port.answer(content, self.config.reply, arrived)
        request.add_done_callback(self._on_answer_requested)

    def _fitting(self, turn: SpokenTurn) -> tuple[Prompt, int]:
        """The turn with as many of its newest pictures as the context takes, and their number."""
        free = self._max_rows - self.context_len - self.config.reply.max_rows
        while True:
            prompt = self._reader.read_segment(ChatMessage("user", turn.parts()), self._options)
            if not turn.pictures or len(prompt.ids) <= min(free, self._max_turn_rows):
                return prompt, len(turn.pictures)
            turn = turn.without_oldest()

    def _on_answer_requested(self, request: Future[None]) -> None:
        if not request.cancelled() and isinstance(error := request.exception(), Exception):
            self.forward(Failure(self._port.name, self._n_turns + 1, error))

    def forward(self, event: Event) -> None:
        """Emit an event of the engine. After the outcome of an answer, sound is processed again."""
        with self._lock:
            answering = self._answering
            match event:
                case PartialResult() if answering.is_interrupted:
                    if not event.text:
                        return
                    event = replace(event, pcm=None)
                case PartialResult():
                    answering.text += event.text
                    if event.pcm is not None:
                        starts = max(answering.plays_until, self._clock())
                        answering.n_samples += len(event.pcm)
                        answering.plays_until = starts + len(event.pcm) / SOUND_RATE
                case ReplyResult():
                    self._n_turns, answering.is_made = event.index, False
                case Failure():
                    answering.is_made = False
            self._emit(event)

    def interrupt(self) -> bool:
        """Stop the answer that is made or played: no sound of it follows, its text ends at the next token.

        What was said stays in the context. Returns: whether there was one.
        """
        with self._lock:
            answering, now = self._answering, self._clock()
            left_s = max(answering.plays_until - now, 0.0)
            if answering.is_interrupted or not (answering.is_made or left_s):
                return False
            answering.is_interrupted, answering.plays_until = True, 0.0
            index = self._n_turns + answering.is_made
            sound_s = answering.n_samples / SOUND_RATE
            heard_ms = 1000 * max(sound_s - left_s, 0.0)
            self._emit(Interruption(self._port.name, index, answering.text, 1000 * sound_s, heard_ms))
            if answering.is_made:
                self._port.break_speech()
            return True

    def take_back(self) -> Future[bool]:
        """Remove the answer in flight, which has no outcome then, and its user's turn. Gives: whether there was one."""
        request = self._port.take_back()
        request.add_done_callback(self._on_taken_back)
        return request

    def _on_taken_back(self, request: Future[bool]) -> None:
        if not request.cancelled() and request.exception() is None and request.result():
            with self._lock:
                self._answering = Answering()

    def close(self) -> Future[None]:
        """End the conversation and any answer in flight."""
        self._is_over = True
        return self._port.close()
