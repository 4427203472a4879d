"""Trains the speech model on the replies of conversations: `python -m training.mind.speak --help`.

The other parts are trained before and do not change. What is learned are the speech tokens of the target voice, as the
vocoder folder's speech tokenizer hears it. Runs continue as those of `training.mind.train`.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from models.token2wav.load.parts import load_voice_parts
from models.token2wav.prompt.features import log_mel_128
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from training.grammar.phrases import Split
from training.mind.examples import DrawnPart, Examples, Task
from training.mind.forward import run_context
from training.mind.inputs import Example
from training.mind.speech import SPEECH_TOKENS_PER_UNIT, SpeechRows, predict_speech, speech_rows, spoken_places
from training.mind.train import MindPlan, MindTrainer, add_arguments, plan_of
from training.mind.voices import EngineVoice
from training.speech.voices import TARGET, VOICES
from training.timelines.layout import ContextRows
from training.timelines.speech import RATE, Synthesizer
from training.timelines.timeline import Said, Timeline

TASKS: tuple[tuple[Task, float], ...] = (("talk", 0.6), ("echo", 0.4))
ReplySpeech = Callable[[Sequence[str]], list[int]]  # parts of a reply to its speech tokens


@dataclass
class TargetSpeech:
    """Speech tokens of replies in the target voice.

    Args:
        folder: the vocoder, for its speech tokenizer.
        voice: text to samples at 16 kHz.
    """

    folder: Path
    voice: Synthesizer

    @cached_property
    def _tokenizer(self) -> S3Tokenizer:
        return load_voice_parts(self.folder).speech_tokenizer

    @torch.no_grad()
    def __call__(self, parts: Sequence[str]) -> list[int]:
        """Tokens, 25 a second; each of several parts takes whole seconds."""
        waves = [self.voice(part) for part in parts]
        if len(parts) > 1:
            seconds = [max(1, round(len(wave) / RATE)) for wave in waves]
            waves = [np.pad(wave, (0, RATE * n))[: RATE * n] for wave, n in zip(waves, seconds, strict=True)]
        log_mel = log_mel_128(torch.from_numpy(np.concatenate(waves)))
        tokens, n_tokens = self._tokenizer(log_mel[None], torch.tensor([log_mel.shape[1]]))
        found: list[int] = tokens[0, : int(n_tokens[0])].tolist()
        return found


@dataclass
class SpokenExamples(Dataset[tuple[Example, list[SpeechRows]]]):
    """Sequences and the speech of their replies, by number."""

    examples: Examples
    speech: ReplySpeech
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.examples.config.tts_config.speech_eos_id

    def __getitem__(self, index: int) -> tuple[Example, list[SpeechRows]]:
        tasks = self.examples.tasks
        rng = random.Random(f"speech {self.examples.split} {index}")
        (task,) = rng.choices(list(tasks), list(tasks.values()))
        drawn = self.examples.scene(task, index, rng)
        example = drawn.example(self.examples.config)
        return example, replies(drawn, example.rows, self.speech, self.end)


def replies(drawn: DrawnPart, rows: ContextRows, speech: ReplySpeech, end: int) -> list[SpeechRows]:
    """The speech of all replies that lie in a part as a whole."""
    found = []
    for said in drawn.timeline.script:
        if said.by != "model":
            continue
        units = reply_units(drawn.timeline, said, drawn.layout.turn_eos)
        if units.start < drawn.part.first or units.stop > drawn.part.end:
            continue
        tokens = [drawn.timeline.units[unit].tokens for unit in units]
        text = [one[1:-1] for one in tokens]
        places = [spoken_places(rows, unit, drawn.timeline.units[unit]) for unit in units]
        speech_tokens = speech(said.parts)
        if said.is_cut:
            speech_tokens = speech_tokens[: SPEECH_TOKENS_PER_UNIT * (len(units) - 1)]
        found.append(speech_rows(text, places, speech_tokens, end))
    return found


def reply_units(timeline: Timeline, said: Said, turn_eos: int) -> range:
    """The units of a reply's text; for one that was interrupted the last is the one that noticed it."""
    first = last = int(said.start) - 1
    while turn_eos not in timeline.units[last].tokens:
        last += 1
    return range(first, last + 1)


class SpeechTrainer(MindTrainer):
    """Model, optimizer and step of a run that trains `tts`."""

    trains_speech: ClassVar[bool] = True
    name: ClassVar[str] = "speech"

    def __init__(self, plan: MindPlan, speech: ReplySpeech):
        self._speech = speech
        super().__init__(plan)

    def _examples(self, split: Split) -> SpokenExamples:
        plan = self.plan
        examples = Examples(plan.start, dict(plan.tasks), plan.length_s, plan.window, plan.voices, split)
        return SpokenExamples(examples, self._speech)

    def _measure(self, batch: list[Any]) -> tuple[Tensor, dict[str, float]]:
        """Loss, and the shares of speech tokens and of ends that are predicted."""
        with torch.no_grad():
            hidden, _, _ = run_context(self.model, [example for example, _ in batch])
        parts = [
            predict_speech(self.model, hidden[row], reply) for row, (_, spoken) in enumerate(batch) for reply in spoken
        ]
        if not parts:
            return torch.stack([weight.sum() for weight in self.weights.values()]).sum() * 0.0, {}
        logits, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        loss = F.cross_entropy(logits, targets)
        is_right, ends = logits.argmax(dim=-1) == targets, targets == self.examples.end
        shares = {"tokens": ~ends, "ends": ends}
        measured = {name: float(is_right[mask].float().mean()) for name, mask in shares.items() if mask.any()}
        return loss, {"loss": float(loss.detach()), **measured}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--vocoder", type=Path, required=True, help="folder with the speech tokenizer")
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("high")
    voice = EngineVoice(next(one for one in VOICES if one.name == TARGET), args.voice_cache)
    plan = replace(plan_of(args, TASKS), keeps_weights=True)
    trainer = SpeechTrainer(plan, TargetSpeech(args.vocoder, voice))
    trainer.run()
    print(json.dumps({"held_out": trainer.evaluate()}))


if __name__ == "__main__":
    main()
