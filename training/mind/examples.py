"""Training sequences by number: a part of a lesson or a conversation, or a chat, as records."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from models.checkpoint.config import OmniConfig, load_config, load_preprocessor_config
from models.inputs.tokens import Tokenizer
from training.grammar.phrases import Split
from training.mind.chats import ChatMaker, Medium
from training.mind.records import Record, SpeechRecord, make_record
from training.mind.voices import EngineVoice, Utterance, draw_voice
from training.mind.words.written import WRITTEN
from training.scenes.drawing import has_things
from training.timelines.conversations import draw_timeline
from training.timelines.layout import SYSTEM, ContextRows, RowLayout
from training.timelines.lessons import CAPTION_SYSTEM, ECHO_SYSTEM, draw_captions, draw_echo
from training.timelines.speech import RATE, Samples, Synthesizer, noise_bursts, quiet
from training.timelines.timeline import Timeline
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
QUIET_SPEEDS = (0.7, 1.3)
ReplySpeaker = Callable[["DrawnPart", ContextRows], tuple[SpeechRecord, ...]]


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
    """

    folder: Path
    seconds: float = 60.0
    lesson_s: float = 28.0
    voices: tuple[EngineVoice, ...] = ()
    split: Split = "train"
    window: TrainingWindow = WINDOW
    speaker: ReplySpeaker | None = None

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
        voice, utterance = (quiet(rng.uniform(*QUIET_SPEEDS)), None) if task == WRITTEN else self._voice(rng)
        if task in ("text", "chat"):
            media: tuple[Medium, ...] = ("text",) if task == "text" else ("sound", "picture")
            return self.chats.make(rng, voice, media=media, split=self.split, things=has_things())[0]
        drawn = self.scene(task, index, rng, voice)
        replies = () if self.speaker is None else self.speaker(drawn, drawn.rows)
        return make_record(
            task,
            drawn.timeline,
            drawn.part,
            drawn.layout,
            self.config,
            utterance=utterance,
            clip=drawn.clip,
            replies=replies,
        )

    def scene(self, task: Task, index: int, rng: random.Random, voice: Synthesizer) -> DrawnPart:
        """A part of a lesson or conversation."""
        timeline, system = self._draw(task, index, rng, voice)
        clip = None
        if rng.random() < 0.7:  # serving has a reference voice in the prompt unless the client leaves it out
            clip = self._voice(rng)[0](REFERENCE_TEXT)
            clip = clip[: min(len(clip) * 10 // RATE, 10 * MAX_REFERENCE_S) * RATE // 10]
        layout = RowLayout(self.tokenizer, system=system)
        n_clip = 0 if clip is None else 10 * len(clip) // RATE
        part = rng.choice(list(split_parts(timeline.units, layout, self.window, n_clip)))
        # The sound after the part's last unit is not heard.
        kept = replace(timeline, sound=timeline.sound[: RATE * part.end], units=timeline.units[: part.end])
        return DrawnPart(kept, part, layout, clip)

    def _voice(self, rng: random.Random) -> tuple[Synthesizer, Callable[[str], Utterance] | None]:
        """A voice, and the same with phonemes if it has them."""
        if not self.voices:
            return noise_bursts, None
        voice = draw_voice(rng, self.voices)
        return voice, voice.utterance

    def _draw(self, task: Task, index: int, rng: random.Random, voice: Synthesizer) -> tuple[Timeline, str]:
        """A timeline and the system text that it is learned with."""
        encode, special, things = self.tokenizer.encode, self.tokenizer.special, has_things()
        if task == "echo":
            return draw_echo(index, self.lesson_s, encode, special, voice, self.split), ECHO_SYSTEM
        if task == "captions":
            seed = index if self.split == "train" else HELD_OUT_SCENES + index
            return draw_captions(seed, self.lesson_s / 2, encode, special, things), CAPTION_SYSTEM
        (length,) = rng.choices((0.5, 1.0, 1.5), (4, 4, 1))
        timeline = draw_timeline(index, length * self.seconds, encode, special, voice, split=self.split, things=things)
        return timeline, rng.choice(SYSTEMS)
