"""Training of the speech model on the replies of conversations, while everything else stays as it is.

What is learned are the speech tokens of the target voice, as the vocoder's speech tokenizer hears it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.token2wav.load.parts import load_voice_parts
from models.token2wav.prompt.features import log_mel_128
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from training.mind.examples import DrawnPart, Task
from training.mind.forward import run_rows
from training.mind.learner import Learner, fresh_shares
from training.mind.moments import load_weights
from training.mind.pool import Pool, Stored
from training.mind.records import SpeechRecord
from training.mind.speech import (
    SPEECH_TOKENS_PER_UNIT,
    collate_replies,
    predict_speech,
    speech_rows,
    spoken_places,
    with_noise,
)
from training.mind.voices import utterances
from training.speech.voices import TARGET, VOICES
from training.timelines.layout import ContextRows
from training.timelines.speech import RATE, Samples
from training.timelines.timeline import Said, Timeline

SHARES: dict[Task, float] = {"talk": 0.4, "echo": 0.6}
VOCODER = Path(__file__).parents[2] / "assets/talker/assets/token2wav"
SpeakAll = Callable[[list[str]], list[Samples]]  # texts to samples at 16 kHz


def speak_target(texts: list[str]) -> list[Samples]:
    """Texts in the talker's own voice."""
    return [one.wave for one in utterances(next(one for one in VOICES if one.name == TARGET), texts)]


@dataclass
class TargetSpeech:
    """Speech tokens of replies in the target voice.

    Args:
        folder: of a vocoder, for its speech tokenizer.
        speak: the voice.
        end: the token that ends speech.
        kept: tokens of the replies that were asked for, by their parts.
    """

    folder: Path
    end: int
    speak: SpeakAll = speak_target
    kept: dict[tuple[str, ...], list[int]] = field(default_factory=dict)

    @cached_property
    def _tokenizer(self) -> S3Tokenizer:
        return load_voice_parts(self.folder).speech_tokenizer

    def tokens(self, replies: Sequence[tuple[str, ...]]) -> list[list[int]]:
        """Tokens of replies, 25 a second; each of several parts of a reply takes whole seconds."""
        missing = [one for one in dict.fromkeys(replies) if one not in self.kept]
        if missing:
            waves = iter(self.speak([part for parts in missing for part in parts]))
            for parts in missing:
                self.kept[parts] = self._heard([next(waves) for _ in parts])
        return [self.kept[one] for one in replies]

    def __call__(self, drawn: DrawnPart, rows: ContextRows) -> tuple[SpeechRecord, ...]:
        """The speech of all replies that lie in a part as a whole."""
        timeline, part = drawn.timeline, drawn.part
        whole: list[tuple[Said, range]] = []
        for said in timeline.script:
            if said.by == "model" and int(said.start) - 1 < part.end:
                units = reply_units(timeline, said, drawn.layout.turn_eos)
                if units.start >= part.first and units.stop <= part.end:
                    whole.append((said, units))
        found = []
        for (said, units), tokens in zip(whole, self.tokens([said.parts for said, _ in whole]), strict=True):
            spoken = [timeline.units[unit].tokens for unit in units]
            places = [spoken_places(rows, unit, timeline.units[unit]) for unit in units]
            heard = tokens[: SPEECH_TOKENS_PER_UNIT * (len(units) - 1)] if said.is_cut else tokens
            found.append(speech_rows([one[1:-1] for one in spoken], places, heard, self.end))
        return tuple(found)

    @torch.no_grad()
    def _heard(self, waves: list[Samples]) -> list[int]:
        """Speech tokens of the parts of one reply."""
        if len(waves) > 1:
            seconds = [max(1, round(len(wave) / RATE)) for wave in waves]
            waves = [np.pad(wave, (0, RATE * n))[: RATE * n] for wave, n in zip(waves, seconds, strict=True)]
        log_mel = log_mel_128(torch.from_numpy(np.concatenate(waves)))
        tokens, n_tokens = self._tokenizer(log_mel[None], torch.tensor([log_mel.shape[1]]))
        found: list[int] = tokens[0, : int(n_tokens[0])].tolist()
        return found


def reply_units(timeline: Timeline, said: Said, turn_eos: int) -> range:
    """The units of a reply's text; for one that was interrupted the last is the one that noticed it.

    A reply that goes on after the timeline's end has the units up to one after it.
    """
    first = last = int(said.start) - 1
    while last < len(timeline.units) and turn_eos not in timeline.units[last].tokens:
        last += 1
    return range(first, last + 1)


class SpeechLearner(Learner):
    """Trains `tts` on records with replies."""

    name: ClassVar[str] = "speech"

    def loss(self, pool: Pool, drawn: Sequence[Stored]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and the shares of speech tokens and of ends that are predicted."""
        batch, inputs = self.inputs(pool, drawn, degrades=self.plan.degrades)
        with torch.no_grad():
            hidden = run_rows(self.model, batch, inputs, self.passes).hidden
        replies = collate_replies([one.record for one in drawn], batch.ids.shape[1])
        if replies is None:
            return torch.zeros((), device=self.plan.device, requires_grad=True), {}
        replies = replies.to(self.plan.device)
        has_states, end = None, self.model.config.tts_config.speech_eos_id
        if torch.is_grad_enabled():
            replies, has_states = with_noise(replies, self.generator, end)
        logits = predict_speech(self.model, hidden, replies, self.passes, has_states)
        loss = F.cross_entropy(logits, replies.targets)
        is_right = logits.argmax(-1) == replies.targets
        ends = replies.targets == end
        measured = {"loss": loss, "tokens": (is_right & ~ends).sum() / (~ends).sum()}
        return loss, measured | {"ends": (is_right & ends).sum() / ends.sum()}

    def follow(self, mind: Path) -> float:
        """Take the mind that another training saved last. Returns: its step."""
        weights = {name: one for name, one in self.model.named_parameters() if not name.startswith("tts.")}
        return float(load_weights(mind, "mind", weights)["counters"]["step"])

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(SHARES)

    def _weights(self) -> dict[str, Tensor]:
        return {name: one for name, one in self.model.named_parameters() if name.startswith("tts.")}

    def _shares(self, pool: Pool) -> dict[Task, float]:
        return fresh_shares(SHARES, pool)
