"""The spoken questions: their phrases, and sound of a conversation made of them, with pauses and noise. Torch-free.

The files are made by `make_questions`. All positions are samples at 16 kHz.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import soundfile

RATE = 16_000
FOLDER = Path(__file__).parent / "questions"
SPEECH_LEVEL = 10 ** (-23 / 20)  # RMS of each phrase in the file
HESITATION_MS = (250, 700)  # pauses of a question that hesitates
MAX_HESITATIONS = 3  # in one question
# One phrase; several with short pauses; with long ones; with fillers such as "um" between long pauses.
Kind = Literal["plain", "phrases", "silent", "filled"]
KINDS: tuple[Kind, ...] = ("plain", "phrases", "silent", "filled")


class SpokenQuestion(NamedTuple):
    """One question. phrases: [n] float32 each, without silence at their ends. fillers: it may hesitate with them."""

    text: str
    voice: str
    phrases: tuple[np.ndarray, ...]
    fillers: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Conditions:
    """How questions are put together.

    Attributes:
        pauses_ms: shortest and longest pause between the phrases of a question.
        hesitations: share of the questions that hesitate one to three times: with pauses of 250 to 700 ms, before the
            first phrase behind a filler; half of them say a filler each time.
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
    kind: Kind


class UserSound(NamedTuple):
    """What one user says. samples: [n] float32."""

    samples: np.ndarray
    questions: tuple[PlacedQuestion, ...]


def load_questions(folder: Path = FOLDER) -> list[SpokenQuestion]:
    """The set. Raises: OSError; ValueError for a span outside the file."""
    sound, entries = _read(folder, "questions")
    fillers, spans_of = _read(folder, "fillers")
    return [
        SpokenQuestion(
            entry["text"],
            entry["voice"],
            _parts(sound, entry["phrases"], entry["text"]),
            _parts(fillers, spans_of[entry["voice"]], entry["voice"]),
        )
        for entry in entries
    ]


def _read(folder: Path, name: str) -> tuple[np.ndarray, Any]:
    sound, rate = soundfile.read(folder / f"{name}.ogg", dtype="float32")
    if rate != RATE:
        raise ValueError(f"{name}.ogg: expected {RATE} Hz, got {rate}")
    return sound, json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def _parts(sound: np.ndarray, spans: Sequence[Sequence[int]], what: str) -> tuple[np.ndarray, ...]:
    if any(not 0 <= begin < end <= len(sound) for begin, end in spans):
        raise ValueError(f"{what}: expected spans within {len(sound)} samples, got {spans}")
    return tuple(sound[begin:end] for begin, end in spans)


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
        spoken, kind = _spoken(questions[index], conditions, rng)
        begin = at
        for part in spoken:
            add(part)
        end = at
        add(_silence(conditions.answer_s + rng.random()))
        placed.append(PlacedQuestion(int(index), begin, end, at, kind))
    samples = np.concatenate(parts)
    noise = rng.standard_normal(len(samples), np.float32) * np.float32(SPEECH_LEVEL * 10 ** (-conditions.snr_db / 20))
    return UserSound((samples + noise).clip(-1, 1), tuple(placed))


def _spoken(
    question: SpokenQuestion, conditions: Conditions, rng: np.random.Generator
) -> tuple[list[np.ndarray], Kind]:
    """The sound of a question, in parts: its phrases and what is between them."""
    phrases, n = question.phrases, len(question.phrases)
    pauses = [rng.uniform(*conditions.pauses_ms) for _ in range(n - 1)]
    if rng.random() >= conditions.hesitations:
        parts = [phrases[0]]
        for pause, phrase in zip(pauses, phrases[1:], strict=True):
            parts += [_silence(pause / 1000), phrase]
        return parts, "plain" if n == 1 else "phrases"
    # A place is in front of a phrase; in front of the first one, only a filler can be heard.
    is_filled = n == 1 or rng.random() < 0.5
    places = rng.permutation(np.arange(0 if is_filled else 1, n))[: rng.integers(1, MAX_HESITATIONS + 1)]
    parts = []
    for number, phrase in enumerate(phrases):
        if number and number not in places:
            parts.append(_silence(pauses[number - 1] / 1000))
        elif number in places:
            parts += [_silence(rng.uniform(*HESITATION_MS) / 1000)] if number else []
            if is_filled:
                filler = question.fillers[rng.integers(len(question.fillers))]
                parts += [filler, _silence(rng.uniform(*HESITATION_MS) / 1000)]
        parts.append(phrase)
    return parts, "filled" if is_filled else "silent"


def _silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)
