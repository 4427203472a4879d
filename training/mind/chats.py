"""Turn-based chats as training sequences: the served chat template; a written, spoken or shown last question."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from models.checkpoint.config import PreprocessorConfig
from models.inputs.audio import placeholder_groups
from models.inputs.prompts import PromptOptions, build_prompt
from models.inputs.tokens import Tokenizer
from training.grammar import camera, turns
from training.grammar.phrases import Split
from training.grammar.turns import Exchange, ToldFacts
from training.mind.records import REFERENCE, Record, as_classes, as_levels, rendered
from training.mind.words.heard import ROW_S, heard_words
from training.scenes.labels import CLASSES, UNKNOWN, picture_classes
from training.scenes.random_scenes import draw_shown
from training.scenes.render import draw_look
from training.timelines.layout import NOTHING, PICTURE, TOKEN
from training.timelines.recurring import Recurring
from training.timelines.speech import RATE, Synthesizer
from training.timelines.timeline import Picture

MAX_TURNS = 5
SILENCE_S = (0.1, 0.5)  # before and after a spoken question
Medium = Literal["text", "sound", "picture"]
MessagePart = str | Image.Image | np.ndarray


@dataclass(frozen=True)
class ChatMaker:
    """Makes chats with one checkpoint's tokenizer and settings."""

    tokenizer: Tokenizer
    settings: PreprocessorConfig

    def make(
        self,
        rng: random.Random,
        voice: Synthesizer,
        *,
        media: Sequence[Medium] = ("text", "sound", "picture"),
        split: Split = "train",
        things: bool = True,
        phrases: Recurring | None = None,
        views: Recurring | None = None,
        render: Callable[[Picture], npt.NDArray[np.uint8]] = rendered,
    ) -> tuple[Record, Exchange]:
        """A chat whose last answer is learned.

        Args:
            media: of its question.
            phrases, views: where what is said and shown recurs.
            render: makes pictures.
        Returns: the record and the last turn.
        """
        memory = ToldFacts()
        chat = [draw_turn(rng, split, memory) for _ in range(rng.randint(0, MAX_TURNS - 1))]
        told = dict(memory.facts)
        chat.append(draw_turn(rng, split, memory))
        medium = rng.choice(media)
        classes: list[tuple[int, ...]] = []
        question: list[MessagePart] = [written(chat[-1].said, rng)]
        if medium == "picture":
            source = (views or Recurring()).source("chat", rng)
            shown = draw_shown(source, things)
            chat[-1] = camera.draw_question(rng, split, shown)
            classes = [picture_classes(shown, is_still=True)]
            picture = Image.fromarray(render(Picture(shown, draw_look(shown, source), 0)))
            question = [picture, written(chat[-1].said, rng)]
        if medium == "sound":
            if phrases is not None:
                memory.facts = told
                chat[-1] = draw_turn(rng, split, memory, phrases)
            before, after = (np.zeros(round(RATE * rng.uniform(*SILENCE_S)), np.float32) for _ in range(2))
            spoken = voice(chat[-1].said)
            question = [np.concatenate((before, spoken, after))]
        messages: list[dict[str, object]] = []
        if rng.random() < 0.5:
            messages.append({"role": "system", "content": "You are a helpful assistant."})
        for turn in chat[:-1]:
            messages.append({"role": "user", "content": written(turn.said, rng)})
            messages.append({"role": "assistant", "content": turn.text})
        messages.append({"role": "user", "content": question})
        is_voiced = medium == "sound" or rng.random() < 0.4
        record = self.record(messages, chat[-1].text, is_voiced, "text" if medium == "text" else "chat")
        skill = chat[-1].skill if medium == "text" else f"{chat[-1].skill} ({medium})"
        accepted = chat[-1].accepted or (chat[-1].text,)
        record = replace(record, skill=skill, accepted=accepted, picture_classes=as_classes(classes))
        if medium == "sound":
            rows, step = np.flatnonzero(record.kinds == REFERENCE), RATE * ROW_S
            first, last = int(len(before) / step), min(len(rows), math.ceil((len(before) + len(spoken)) / step))
            record = replace(record, words=(heard_words(self.tokenizer.encode, chat[-1].said, rows, first, last),))
        return record, chat[-1]

    def record(self, messages: list[dict[str, object]], answer: str, is_voiced: bool, task: str = "chat") -> Record:
        """The sequence of messages and an answer to them.

        Args:
            messages: pictures of 448 x 448 only.
            is_voiced: the answer is for the speech model too.
        """
        options = PromptOptions(use_tts_template=is_voiced)
        prompt = build_prompt(messages, self.tokenizer, self.settings, placeholder_groups, options)
        special = self.tokenizer.special
        reply = [*self.tokenizer.encode(answer), special.tts_eos if is_voiced else special.im_end]
        ids = np.array([*prompt.ids, *reply], np.int16)
        kinds, targets = np.full_like(ids, TOKEN, np.int8), np.full_like(ids, NOTHING)
        sources = np.zeros(len(ids), np.int32)
        for kind, bounds in ((REFERENCE, prompt.audio_bounds), (PICTURE, prompt.image_bounds)):
            rows = [row for start, end in bounds for row in range(start, end)]
            kinds[rows], sources[rows] = kind, np.arange(len(rows))
        ids[kinds != TOKEN] = 0
        targets[len(prompt.ids) - 1 : -1] = reply
        waves = [wave for one in prompt.audios for wave in one.waves]
        pictures = [np.asarray(one.image) for one in prompt.images if isinstance(one.image, Image.Image)]
        return Record(
            task=task,
            ids=ids,
            targets=targets,
            kinds=kinds,
            sources=sources,
            wave=np.zeros(0, np.int16),
            phones=np.zeros(0, np.int8),
            segments=np.zeros((0, 3), np.int16),
            pictures=np.stack(pictures) if pictures else np.zeros((0, 448, 448, 3), np.uint8),
            picture_classes=as_classes([(UNKNOWN,) * len(CLASSES)] * len(pictures)),
            clip=as_levels(np.concatenate(waves)) if waves else np.zeros(0, np.int16),
        )


def draw_turn(rng: random.Random, split: Split, memory: ToldFacts, phrases: Recurring | None = None) -> Exchange:
    """A turn that makes sense without a camera and without time. phrases: where what is said recurs."""
    kind = rng.choices(("talk", "sum", "repeat", "unknown", "told", "recall", "count"), (5, 2, 1, 2, 2, 2, 1))[0]
    if phrases is None:
        return _turn_of(kind, rng, split, memory)
    return turns.answered_anew(_turn_of(kind, phrases.source(kind, rng), split, memory), rng)


def _turn_of(kind: str, rng: random.Random, split: Split, memory: ToldFacts) -> Exchange:
    match kind:
        case "talk":
            return turns.draw_small_talk(rng, split)
        case "sum":
            return turns.draw_arithmetic(rng, split)
        case "repeat":
            return turns.draw_repetition(rng, split)
        case "unknown":
            return turns.draw_unknown(rng, split)
        case "told":
            return turns.draw_told(rng, split, memory)
        case "recall":
            return turns.draw_recall(rng, split, memory)
        case _:
            return turns.draw_counting(rng, split)


def written(said: str, rng: random.Random) -> str:
    """A sentence as people type it: with or without a capital letter and a sign at its end."""
    text = said[:1].upper() + said[1:] if rng.random() < 0.7 else said
    is_question = said.split()[0] in ("what", "how", "who", "where", "which", "do", "can", "are", "is", "will", "why")
    return text + rng.choice(("", "?" if is_question else ".", "?" if is_question else "!"))
