"""Turn-based chats as training sequences: the served chat template; a written, spoken or shown last question."""

import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from models.checkpoint.config import OmniConfig, PreprocessorConfig
from models.inputs.audio import N_MELS, UNIT_COLUMNS, placeholder_groups
from models.inputs.image import image_patches
from models.inputs.prompts import Bound, PromptOptions, build_prompt
from models.inputs.tokens import Tokenizer
from training.grammar import camera, turns
from training.grammar.phrases import Split
from training.grammar.turns import Exchange, ToldFacts
from training.mind.inputs import Example, stack_pictures
from training.scenes.random_scenes import draw_shown
from training.scenes.render import draw_look, render
from training.timelines.layout import NOTHING, PICTURE, SOUND, TOKEN, ContextRows
from training.timelines.speech import Synthesizer, degrade

MAX_TURNS = 5
SILENCE_S = (0.1, 0.5)  # before and after a spoken question
MessagePart = str | Image.Image | np.ndarray


@dataclass(frozen=True)
class ChatMaker:
    """Makes chats with one checkpoint's tokenizer and settings."""

    tokenizer: Tokenizer
    config: OmniConfig
    settings: PreprocessorConfig

    def make(
        self, rng: random.Random, voice: Synthesizer, *, split: Split = "train", things: bool = True
    ) -> tuple[Example, Exchange]:
        """A chat whose last answer is learned. Returns: the sequence and the last turn."""
        memory = ToldFacts()
        chat = [draw_turn(rng, split, memory) for _ in range(rng.randint(1, MAX_TURNS))]
        medium = rng.choice(("text", "text", "sound", "picture"))
        question: list[MessagePart] = [written(chat[-1].said, rng)]
        if medium == "picture":
            shown = draw_shown(rng, things)
            chat[-1] = camera.draw_question(rng, split, shown)
            question = [render(shown, draw_look(shown, rng)), written(chat[-1].said, rng)]
        if medium == "sound":
            question = [self._spoken(chat[-1].said, rng, voice)]
        messages: list[dict[str, object]] = []
        if rng.random() < 0.5:
            messages.append({"role": "system", "content": "You are a helpful assistant."})
        for turn in chat[:-1]:
            messages.append({"role": "user", "content": written(turn.said, rng)})
            messages.append({"role": "assistant", "content": turn.text})
        messages.append({"role": "user", "content": question})
        is_voiced = medium == "sound" or rng.random() < 0.4
        return self.example(messages, chat[-1].text, is_voiced), chat[-1]

    def example(self, messages: list[dict[str, object]], answer: str, is_voiced: bool) -> Example:
        """The sequence of messages and an answer to them. is_voiced: the answer is for the speech model too."""
        options = PromptOptions(use_tts_template=is_voiced)
        prompt = build_prompt(messages, self.tokenizer, self.settings, placeholder_groups, options)
        special = self.tokenizer.special
        reply = [*self.tokenizer.encode(answer), special.tts_eos if is_voiced else special.im_end]
        ids = np.array([*prompt.ids, *reply], np.int64)
        kinds, targets = np.full_like(ids, TOKEN), np.full_like(ids, NOTHING)
        for kind, bounds in ((SOUND, prompt.audio_bounds), (PICTURE, prompt.image_bounds)):
            _mark(kinds, kind, bounds)
        ids[kinds != TOKEN] = 0
        targets[len(prompt.ids) - 1 : -1] = reply
        rows = ContextRows(ids, kinds, targets, np.full_like(ids, NOTHING))
        side = self.config.vision_config.table_side
        patches = [part for one in prompt.images for part in image_patches(one.image, one.plan, table_side=side)]
        waves = [torch.from_numpy(wave) for one in prompt.audios for wave in one.waves]
        return Example(
            rows=rows,
            mel=torch.zeros(0, 0, N_MELS, UNIT_COLUMNS),
            mel_first=_none(),
            mel_end=_none(),
            taken=[],
            pictures=stack_pictures(patches),
            reference=torch.cat(waves) if waves else None,
        )

    def _spoken(self, text: str, rng: random.Random, voice: Synthesizer) -> np.ndarray:
        """A question as a recording: speech between short silences."""
        before, after = (np.zeros(round(16_000 * rng.uniform(*SILENCE_S)), np.float32) for _ in range(2))
        return degrade(np.concatenate((before, voice(text), after)), rng)


def draw_turn(rng: random.Random, split: Split, memory: ToldFacts) -> Exchange:
    """A turn that makes sense without a camera and without time."""
    kind = rng.choices(("talk", "sum", "repeat", "unknown", "told", "recall", "count"), (5, 2, 1, 2, 2, 2, 1))[0]
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


def _mark(kinds: np.ndarray, kind: int, bounds: tuple[Bound, ...]) -> None:
    for start, end in bounds:
        kinds[start:end] = kind


def _none() -> Tensor:
    return torch.zeros(0, 0, dtype=torch.int64)
