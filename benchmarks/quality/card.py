"""The quality card: how far a precision's choices and distributions are from the reference's, in the same context."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.quality_run import QualityRun, VoicedTurn

Transcriber = Callable[[VoicedTurn], str]
MIN_DECISIONS, MIN_TEXT_TOKENS, MIN_SPEECH_TOKENS = 6, 20, 100  # a card of fewer says too little
MEL_NOTE = (
    "mel: the flow's alone, of the reference's speech tokens; model.part_weights.flow changes it, not model.weights"
)


@dataclass(frozen=True)
class Spread:
    """Mean, 95th percentile and maximum of n values; None without values."""

    mean: float | None
    p95: float | None
    max: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            return cls(None, None, None, 0)
        ordered = sorted(values)
        return cls(sum(ordered) / len(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1], ordered[-1], len(ordered))


@dataclass(frozen=True)
class Card:
    """A precision compared with the reference.

    Attributes:
        decisions: share of units in which the larger one of the logits of listen and speak is the same.
        n_units: units with these logits.
        text_ids: share of text tokens with the same largest logit.
        text_kl: divergence of the distribution of text tokens from the reference's, nats.
        speech_ids, speech_kl: the same for speech tokens after the reference's.
        mel: mean difference of a mel value that the flow makes of the reference's speech tokens; the mel is a natural
            logarithm. 0 if both have the same flow: `model.part_weights.flow` changes it, not `model.weights`.
        mel_relative: norm of the difference divided by that of the reference.
        wer: word errors of the sound against its text; None without a transcriber.
        wer_reference: the same for the reference's sound.
    """

    decisions: float | None
    n_units: int
    text_ids: float | None
    text_kl: Spread
    speech_ids: float | None
    speech_kl: Spread
    mel: float | None
    mel_relative: float | None
    wer: float | None = None
    wer_reference: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def too_few(self, *, has_speech: bool) -> list[str]:
        """What was compared too seldom, expected and got. has_speech: the runs had a voice."""
        counts = [
            ("decisions", MIN_DECISIONS, self.n_units),
            ("text tokens", MIN_TEXT_TOKENS, self.text_kl.n),
            ("speech tokens", MIN_SPEECH_TOKENS if has_speech else 0, self.speech_kl.n),
        ]
        return [f"{name}: expected at least {least}, got {got}" for name, least, got in counts if got < least]

    def lines(self) -> list[str]:
        """The card as text."""
        rows = [
            (f"decisions agree ({self.n_units} units)", _percent(self.decisions)),
            (f"greedy text ids agree ({self.text_kl.n})", _percent(self.text_ids)),
            ("KL of text, mean / p95 / max, nats", _spread(self.text_kl)),
            (f"greedy speech tokens agree ({self.speech_kl.n})", _percent(self.speech_ids)),
            ("KL of speech tokens, mean / p95 / max, nats", _spread(self.speech_kl)),
            ("mel distance, mean, natural log", _number(self.mel)),
            ("mel distance, relative", _number(self.mel_relative)),
            ("word errors (reference)", f"{_percent(self.wer)} ({_percent(self.wer_reference)})"),
        ]
        return [*(f"  {name:<46}{value}" for name, value in rows), f"  {MEL_NOTE}"]


def compare(reference: QualityRun, tested: QualityRun, transcriber: Transcriber | None = None) -> Card:
    """The card of a recording that was forced to the reference's tokens."""
    assert reference.tokens == tested.tokens, "expected a recording of the same tokens"
    texts = [step for step in reference.logits if step[1] > 0]
    pairs = [(reference.logits[step], tested.logits[step]) for step in texts]
    speech = list(zip(torch_rows(reference.speech_logits), torch_rows(tested.speech_logits), strict=True))
    mel, other = (torch.cat(one.mels) if one.mels else None for one in (reference, tested))
    return Card(
        decisions=share(
            (own[0] < own[1]) == (tested.decisions[unit][0] < tested.decisions[unit][1])
            for unit, own in reference.decisions.items()
        ),
        n_units=len(reference.decisions),
        text_ids=share(bool(one.argmax() == two.argmax()) for one, two in pairs),
        text_kl=Spread.of([divergence(one, two) for one, two in pairs]),
        speech_ids=share(bool(one.argmax() == two.argmax()) for one, two in speech),
        speech_kl=Spread.of([divergence(one, two) for one, two in speech]),
        mel=None if mel is None or other is None else float((mel - other).abs().mean()),
        mel_relative=None if mel is None or other is None else float((mel - other).norm() / mel.norm()),
        wer=None if transcriber is None else word_errors(tested.turns, transcriber),
        wer_reference=None if transcriber is None else word_errors(reference.turns, transcriber),
    )


def torch_rows(tables: Iterable[Tensor]) -> list[Tensor]:
    """Every row of tables [n, C]."""
    return [row for table in tables for row in table]


def share(equal: Iterable[bool]) -> float | None:
    """The share of true values; None without values."""
    values = list(equal)
    return sum(values) / len(values) if values else None


def divergence(reference: Tensor, tested: Tensor) -> float:
    """The Kullback-Leibler divergence of the distribution of logits [V] from that of the reference's, nats."""
    one, two = (logits.double().log_softmax(0) for logits in (reference, tested))
    return max(0.0, float((one.exp() * (one - two)).sum()))


def word_errors(turns: Sequence[VoicedTurn], transcriber: Transcriber) -> float | None:
    """Insertions, deletions and substitutions of all turns, divided by the number of words of their texts."""
    n_errors = n_words = 0
    for turn in turns:
        expected, got = words(turn.text), words(transcriber(turn))
        n_errors += edit_distance(expected, got)
        n_words += len(expected)
    return n_errors / n_words if n_words else None


def words(text: str) -> list[str]:
    """Words without case and punctuation; each character of a script without spaces is a word."""
    spaced = "".join(f" {one} " if one >= "\u2e80" else one if one.isalnum() else " " for one in text.casefold())
    return [word for word in spaced.split() if word.isalnum()]


def edit_distance(expected: Sequence[str], got: Sequence[str]) -> int:
    """The least number of words to insert, delete or substitute."""
    row = list(range(len(got) + 1))
    for n, one in enumerate(expected, 1):
        before, row[0] = row[0], n
        for m, two in enumerate(got, 1):
            before, row[m] = row[m], min(row[m] + 1, row[m - 1] + 1, before + (one != two))
    return row[-1]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _spread(spread: Spread) -> str:
    return " / ".join(_number(one) for one in (spread.mean, spread.p95, spread.max))
