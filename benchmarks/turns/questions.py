"""The spoken questions: their phrases, and sound of a conversation made of them, with pauses and noise. Torch-free.

The files are made by `make_questions`. All positions are samples at 16 kHz.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile

RATE = 16_000
FOLDER = Path(__file__).parent / "questions"
SPEECH_LEVEL = 10 ** (-23 / 20)  # RMS of each phrase in the file


class SpokenQuestion(NamedTuple):
    """One question. phrases: [n] float32 each, without silence at their ends."""

    text: str
    voice: str
    phrases: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Conditions:
    """How questions are put together.

    Attributes:
        pauses_ms: shortest and longest pause between the phrases of a question.
        hesitations: share of the questions with several phrases of which one pause lasts 400 to 900 ms instead.
        snr_db: level of the speech above white noise, which goes on all the time.
        answer_s: silence after a question, in which the answer is awaited; up to a second more is drawn for each.
        lead_s: silence before the first question, in which the engine measures its first units.
    """

    pauses_ms: tuple[int, int] = (80, 160)
    hesitations: float = 0.0
    snr_db: float = 25.0
    answer_s: float = 3.0
    lead_s: float = 4.0


class PlacedQuestion(NamedTuple):
    """A question on the time line: where its speech begins and ends, and where its answer is no longer awaited."""

    index: int
    begin: int
    end: int
    until: int
    hesitates: bool


class UserSound(NamedTuple):
    """What one user says. samples: [n] float32."""

    samples: np.ndarray
    questions: tuple[PlacedQuestion, ...]


def load_questions(folder: Path = FOLDER) -> list[SpokenQuestion]:
    """The set. Raises: OSError; ValueError for a span outside the file."""
    sound, rate = soundfile.read(folder / "questions.ogg", dtype="float32")
    if rate != RATE:
        raise ValueError(f"questions.ogg: expected {RATE} Hz, got {rate}")
    questions = []
    for entry in json.loads((folder / "questions.json").read_text(encoding="utf-8")):
        if any(not 0 <= begin < end <= len(sound) for begin, end in entry["phrases"]):
            raise ValueError(f"{entry['text']}: expected phrases within {len(sound)} samples, got {entry['phrases']}")
        phrases = tuple(sound[begin:end] for begin, end in entry["phrases"])
        questions.append(SpokenQuestion(entry["text"], entry["voice"], phrases))
    return questions


def user_sound(
    questions: Sequence[SpokenQuestion], n: int, conditions: Conditions, rng: np.random.Generator
) -> UserSound:
    """`n` questions in random order, each followed by silence, at random offsets within a second."""
    parts: list[np.ndarray] = []
    placed: list[PlacedQuestion] = []
    at = 0

    def add(samples: np.ndarray) -> None:
        nonlocal at
        parts.append(samples)
        at += len(samples)

    add(_silence(conditions.lead_s + rng.random()))
    order = np.concatenate([rng.permutation(len(questions)) for _ in range(-(-n // len(questions)))])[:n]
    for index in order:
        phrases = questions[index].phrases
        pauses = _pauses_s(len(phrases) - 1, conditions, rng)
        begin = at
        for pause_s, phrase in zip((0.0, *pauses), phrases, strict=True):
            add(_silence(pause_s))
            add(phrase)
        end = at
        add(_silence(conditions.answer_s + rng.random()))
        hesitates = max(pauses, default=0.0) > conditions.pauses_ms[1] / 1000
        placed.append(PlacedQuestion(int(index), begin, end, at, hesitates))
    samples = np.concatenate(parts)
    noise = rng.standard_normal(len(samples), np.float32) * np.float32(SPEECH_LEVEL * 10 ** (-conditions.snr_db / 20))
    return UserSound((samples + noise).clip(-1, 1), tuple(placed))


def _pauses_s(n: int, conditions: Conditions, rng: np.random.Generator) -> list[float]:
    low, high = conditions.pauses_ms
    pauses = [rng.uniform(low, high) / 1000 for _ in range(n)]
    if n and rng.random() < conditions.hesitations:
        pauses[rng.integers(n)] = rng.uniform(0.4, 0.9)
    return pauses


def _silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)
