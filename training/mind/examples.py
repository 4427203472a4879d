"""Training sequences by number: a part of a lesson or a conversation with its sound made worse, or a chat."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from models.checkpoint.config import OmniConfig, load_config, load_preprocessor_config
from models.inputs.tokens import Tokenizer
from training.grammar.phrases import Split
from training.mind.chats import ChatMaker
from training.mind.inputs import Example, make_example
from training.scenes.drawing import things_font
from training.timelines.conversations import draw_timeline
from training.timelines.layout import SYSTEM, RowLayout
from training.timelines.lessons import CAPTION_SYSTEM, ECHO_SYSTEM, draw_captions, draw_echo
from training.timelines.speech import RATE, Synthesizer, degrade, noise_bursts
from training.timelines.timeline import Timeline
from training.timelines.windows import TimelinePart, TrainingWindow, split_parts

Task = Literal["echo", "captions", "talk", "chat"]
MAX_REFERENCE_S = 5
# Texts of the prompt that conversations are learned with: the service's, and others that clients send.
SYSTEMS = (
    SYSTEM,
    "You are a helpful assistant.",
    "You are a friendly companion. Answer briefly.",
    "Listen, look and talk with the user.",
)


@dataclass(frozen=True)
class DrawnPart:
    """A part of a timeline, with the layout of its rows and the reference voice of its prompt."""

    timeline: Timeline
    part: TimelinePart
    layout: RowLayout
    reference: Tensor | None

    def example(self, config: OmniConfig) -> Example:
        """The training sequence."""
        return make_example(self.timeline, self.part, self.layout, config, reference=self.reference)


@dataclass
class Examples(Dataset[Example]):
    """Sequence `i` is the same in every run.

    Args:
        folder: a checkpoint, for its tokenizer and configuration.
        tasks: share of each task.
        seconds: length of lessons, and usual length of conversations; some are half as long, some three times.
        window: of the session that will serve the model.
        voices: synthesizers of the person; one is drawn for each conversation.
    """

    folder: Path
    tasks: dict[Task, float]
    seconds: float
    window: TrainingWindow
    voices: tuple[Synthesizer, ...] = (noise_bursts,)
    split: Split = "train"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @cached_property
    def config(self) -> OmniConfig:
        return load_config(self.folder)

    @cached_property
    def chats(self) -> ChatMaker:
        return ChatMaker(self.tokenizer, self.config, load_preprocessor_config(self.folder))

    def __getitem__(self, index: int) -> Example:
        rng = random.Random(f"example {self.split} {index}")
        (task,) = rng.choices(list(self.tasks), list(self.tasks.values()))
        if task == "chat":
            things = things_font() is not None
            return self.chats.make(rng, rng.choice(self.voices), split=self.split, things=things)[0]
        return self.scene(task, index, rng).example(self.config)

    def scene(self, task: Task, index: int, rng: random.Random) -> DrawnPart:
        """A part of a lesson or conversation, before its sound and pictures are computed."""
        timeline, system = self._draw(task, index, rng)
        timeline = replace(timeline, sound=degrade(timeline.sound, rng))
        reference = None
        if rng.random() < 0.7:  # serving has a reference voice in the prompt unless the client leaves it out
            voice = rng.choice(self.voices)("This is how I sound when I talk to you. It is nice to meet you.")
            n = min(len(voice) * 10 // RATE, 10 * MAX_REFERENCE_S)
            reference = torch.from_numpy(voice[: n * RATE // 10])
        layout = RowLayout(self.tokenizer, system=system)
        n_reference = 0 if reference is None else 10 * len(reference) // RATE
        part = rng.choice(list(split_parts(timeline.units, layout, self.window, n_reference)))
        return DrawnPart(timeline, part, layout, reference)

    def _draw(self, task: Task, index: int, rng: random.Random) -> tuple[Timeline, str]:
        """A timeline and the system text that it is learned with."""
        encode, special = self.tokenizer.encode, self.tokenizer.special
        voice, things = rng.choice(self.voices), things_font() is not None
        (length,) = rng.choices((0.5, 1.0, 3.0), (4, 4, 1))
        draws: dict[Task, Callable[[], tuple[Timeline, str]]] = {
            "echo": lambda: (draw_echo(index, self.seconds, encode, special, voice, self.split), ECHO_SYSTEM),
            "captions": lambda: (draw_captions(index, self.seconds, encode, special, things), CAPTION_SYSTEM),
            "talk": lambda: (
                draw_timeline(index, length * self.seconds, encode, special, voice, split=self.split, things=things),
                rng.choice(SYSTEMS),
            ),
        }
        return draws[task]()
