"""Training sequences by number: a part of a lesson or a conversation, or a chat, as records."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from models.checkpoint.config import OmniConfig, load_config, load_preprocessor_config
from models.inputs.tokens import Tokenizer
from training.grammar.phrases import Split
from training.mind.chats import ChatMaker, Medium
from training.mind.records import Record, SpeechRecord, make_record, rendered
from training.mind.stock.utterances import Stock
from training.mind.voices import EngineVoice, Utterance, draw_voice
from training.mind.words.written import WRITTEN
from training.scenes.drawing import has_things
from training.timelines.conversations import GLANCING, WATCHFUL, Habits, draw_timeline
from training.timelines.layout import SYSTEM, ContextRows, RowLayout
from training.timelines.lessons import (
    CAPTION_SYSTEM,
    ECHO_SYSTEM,
    draw_captions,
    draw_echo,
    draw_read,
    draw_sentence,
)
from training.timelines.recurring import Recurring
from training.timelines.speech import RATE, Samples, Synthesizer, noise_bursts, quiet
from training.timelines.timeline import Picture, Timeline
from training.timelines.windows import TimelinePart, TrainingWindow, part_rows, split_parts

Task = Literal["text", "echo", "captions", "talk", "written", "chat"]
MAX_REFERENCE_S = 5
HELD_OUT_SCENES = 1_000_000_000  # first seed of lessons of pictures that training never sees
REFERENCE_TEXT = "This is how I sound when I talk to you. It is nice to meet you."
WINDOW = TrainingWindow(mode="context")
# Texts of the prompt that conversations are learned with: the service's, and others that clients send.
SYSTEMS = (
    SYSTEM,
    "You are a helpful assistant.",
    "You are a friendly companion. Answer briefly.",
    "Listen, look and talk with the user.",
)
WATCHFUL_OF_TEN = 3  # spoken conversations of training
GLANCING_OF_TEN = 7  # conversations of training whose words are given as text
QUIET_SPEEDS = (0.7, 1.3)
SILENT: tuple[Task, ...] = ("text", "captions")  # tasks in which no one speaks
ReplySpeaker = Callable[["DrawnPart", ContextRows], tuple[SpeechRecord, ...]]


@dataclass(frozen=True)
class Source:
    """What a record is made with: a voice, the same with phonemes if it has them, and what is said and shown again.

    is_silent: the voice stands for words that are given as text.
    """

    voice: Synthesizer
    utterance: Callable[[str], Utterance] | None = None
    phrases: Recurring | None = None
    views: Recurring | None = None
    is_silent: bool = False


@dataclass(frozen=True)
class DrawnPart:
    """A part of a timeline, with the layout of its rows and the reference voice of its prompt."""

    timeline: Timeline
    part: TimelinePart
    layout: RowLayout
    clip: Samples | None

    @property
    def rows(self) -> ContextRows:
        """The rows of the part."""
        n_clip = 0 if self.clip is None else len(self.clip) * 10 // RATE
        return part_rows(self.timeline.units, self.part, self.layout, n_clip)


@dataclass(frozen=True)
class Examples:
    """Draws records; record `i` of a task is the same in every run.

    Args:
        folder: a checkpoint, for its tokenizer and configuration.
        seconds: usual length of conversations; others are half as long or half as long again.
        lesson_s: length of lessons.
        voices: of the person; without any, noise stands in for speech.
        window: of the session that will serve the model.
        speaker: makes the speech of replies, for the speech model.
        stock: voices and pictures that are used again, in place of `voices`; records then depend on earlier ones.
        sentences: of lessons for the speech model, in place of drawn ones.
    """

    folder: Path
    seconds: float = 60.0
    lesson_s: float = 28.0
    voices: tuple[EngineVoice, ...] = ()
    split: Split = "train"
    window: TrainingWindow = WINDOW
    speaker: ReplySpeaker | None = None
    stock: Stock | None = None
    sentences: tuple[str, ...] = ()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @cached_property
    def config(self) -> OmniConfig:
        return load_config(self.folder)

    @cached_property
    def chats(self) -> ChatMaker:
        return ChatMaker(self.tokenizer, load_preprocessor_config(self.folder))

    def record(self, task: Task, index: int) -> Record:
        """One sequence."""
        rng = random.Random(f"{task} {self.split} {index}")
        source = self._source(task, rng)
        if task in ("text", "chat"):
            media: tuple[Medium, ...] = ("text",) if task == "text" else ("sound", "picture")
            return self.chats.make(
                rng,
                source.voice,
                media=media,
                split=self.split,
                things=has_things(),
                phrases=source.phrases,
                views=source.views,
                render=self._render,
            )[0]
        drawn = self.scene(task, index, rng, source)
        replies = () if self.speaker is None else self.speaker(drawn, drawn.rows)
        return make_record(
            task,
            drawn.timeline,
            drawn.part,
            drawn.layout,
            self.config,
            utterance=source.utterance,
            clip=drawn.clip,
            render=self._render,
            is_silent=source.is_silent,
            replies=replies,
        )

    def scene(self, task: Task, index: int, rng: random.Random, source: Source) -> DrawnPart:
        """A part of a lesson or conversation."""
        timeline, system = self._draw(task, index, rng, source)
        clip = None
        if rng.random() < 0.7:  # serving has a reference voice in the prompt unless the client leaves it out
            clip = self._source("talk", rng).voice(REFERENCE_TEXT)
            clip = clip[: min(len(clip) * 10 // RATE, 10 * MAX_REFERENCE_S) * RATE // 10]
        layout = RowLayout(self.tokenizer, system=system)
        n_clip = 0 if clip is None else 10 * len(clip) // RATE
        part = rng.choice(list(split_parts(timeline.units, layout, self.window, n_clip)))
        # The sound after the part's last unit is not heard.
        kept = replace(timeline, sound=timeline.sound[: RATE * part.end], units=timeline.units[: part.end])
        return DrawnPart(kept, part, layout, clip)

    @property
    def _render(self) -> Callable[[Picture], npt.NDArray[np.uint8]]:
        return rendered if self.stock is None else self.stock.render

    def _source(self, task: Task, rng: random.Random) -> Source:
        """The voice of a record, and what recurs in it."""
        views = None if self.stock is None else self.stock.views
        # The speech model needs no recordings of the person: they would take the time of the talker's sentences.
        if task == WRITTEN or (task == "echo" and self.speaker is not None):
            return Source(quiet(rng.uniform(*QUIET_SPEEDS)), views=views, is_silent=True)
        if self.stock is not None and task in SILENT:
            return Source(noise_bursts, views=views)
        if self.stock is not None:
            spoken = self.stock.draw(rng)
            return Source(spoken.voice, spoken.voice.utterance, spoken.phrases.get(task), views)
        if not self.voices:
            return Source(noise_bursts)
        voice = draw_voice(rng, self.voices)
        return Source(voice, voice.utterance)

    def _sentence(self, rng: random.Random) -> str:
        """What is said in a lesson."""
        if self.sentences:
            return rng.choice(self.sentences)
        return draw_sentence(rng, self.split) if self.speaker is None else draw_read(rng, self.split)

    def _draw(self, task: Task, index: int, rng: random.Random, source: Source) -> tuple[Timeline, str]:
        """A timeline and the system text that it is learned with."""
        encode, special, things = self.tokenizer.encode, self.tokenizer.special, has_things()
        if task == "echo":
            return draw_echo(
                index,
                self.lesson_s,
                encode,
                special,
                source.voice,
                self._sentence,
                split=self.split,
                phrases=source.phrases,
            ), ECHO_SYSTEM
        if task == "captions":
            seed = index if self.split == "train" else HELD_OUT_SCENES + index
            return draw_captions(seed, self.lesson_s / 2, encode, special, things, source.views), CAPTION_SYSTEM
        (length,) = rng.choices((0.5, 1.0, 1.5), (4, 4, 1))
        habits = self._habits(task, index)
        timeline = draw_timeline(
            index,
            length * self.seconds,
            encode,
            special,
            source.voice,
            split=self.split,
            things=things,
            habits=habits,
            phrases=source.phrases,
            views=source.views,
        )
        return timeline, rng.choice(SYSTEMS)

    def _habits(self, task: Task, index: int) -> Habits | None:
        """Habits of a conversation; None: the usual ones."""
        if self.split != "train":
            return None
        if task == WRITTEN and index % 10 < GLANCING_OF_TEN:
            return GLANCING
        return WATCHFUL if index % 10 < WATCHFUL_OF_TEN else None
