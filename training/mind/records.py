"""Training sequences as arrays, before degradation and features: what producers write and what batches are made of.

A record has rows, the whole sound up to its last unit, and each distinct picture once. Noise, rooms, light and the
log-mel are made anew for every use, on the training device.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.checkpoint.config import OmniConfig
from models.inputs.audio_sizes import FIRST_UNIT_PADDED, UNIT_SAMPLES
from models.layers.apm import UNIT_ROWS
from models.layers.audio_overlap import OVERLAP_UNITS, max_overlap_units, needs_overlap
from training.mind.voices import Utterance
from training.mind.words.heard import ROW_S, HeardWords, heard_rows, heard_words
from training.scenes.labels import CLASSES, picture_classes
from training.speech.corpus import NO_PHONE
from training.timelines.layout import NOTHING, PICTURE, PICTURE_ROWS, SOUND, SOUND_ROWS, RowLayout
from training.timelines.speech import RATE, Samples
from training.timelines.timeline import Picture, Timeline, TimelineUnit
from training.timelines.windows import TimelinePart, part_rows

REFERENCE = 3  # kind of rows of a whole clip: the reference voice, or a chat's spoken question
PLACES = 64  # numbers of units in an encoder segment; a segment has fewer
LEAD = FIRST_UNIT_PADDED - UNIT_SAMPLES  # zeros in front of a session's sound
UNIT_END = 104  # valid columns of a unit's log-mel: [2, 104) in the first one, [0, 104) later
FRAMES_OF_A_VIEW = 16  # units that share one rendered picture of a view
ENCODER_ROW_S = 0.02
SILENCE = 0  # of PHONES

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncoderSegment:
    """Units that the audio encoder sees at once: [context, end), of which those from `first` on get their rows here."""

    context: int
    first: int
    end: int


@dataclass(frozen=True)
class SpeechRecord:
    """The speech of one reply; fields as in `SpeechRows`, [n] each."""

    kinds: npt.NDArray[np.int8]
    values: npt.NDArray[np.int16]
    places: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int16]


@dataclass(frozen=True)
class Record:
    """One sequence.

    Args:
        ids, targets: [T] as in `ContextRows`.
        kinds: [T] TOKEN, SOUND, PICTURE or REFERENCE.
        sources: [T] where a row that is no token comes from: the row of the clip; (segment * PLACES + unit in it) * 10
            + row; or picture * 64 + row.
        wave: [16 000 U] samples; U units, fewer than a conversation has if the part ends earlier.
        phones: [50 U] phonemes at the encoder's rows, NO_PHONE where they are not known.
        segments: [S, 3] of the encoder, that the part needs.
        pictures: [P, 448, 448, 3].
        picture_classes: [P, 4] what they show, as `training.scenes.labels.picture_classes`.
        clip: [n] samples of the reference; empty without one.
        replies: speech of whole replies, for the speech model.
        words: what the person says.
        watched: [T] what the model watches for, at rows whose target is a decision, as in `TimelineUnit`; NOTHING
            elsewhere. Empty without units.
        is_silent: the words are not in the sound; they are always given as text, see `words.written`.
        skill, accepted: of a chat: what was asked for, and all right answers.
    """

    task: str
    ids: npt.NDArray[np.int16]
    targets: npt.NDArray[np.int16]
    kinds: npt.NDArray[np.int8]
    sources: npt.NDArray[np.int32]
    wave: npt.NDArray[np.int16]
    phones: npt.NDArray[np.int8]
    segments: npt.NDArray[np.int16]
    pictures: npt.NDArray[np.uint8]
    picture_classes: npt.NDArray[np.int8]
    clip: npt.NDArray[np.int16]
    replies: tuple[SpeechRecord, ...] = ()
    words: tuple[HeardWords, ...] = ()
    watched: npt.NDArray[np.int16] = field(default_factory=lambda: np.zeros(0, np.int16))
    is_silent: bool = False
    skill: str = ""
    accepted: tuple[str, ...] = ()

    @property
    def n_units(self) -> int:
        return len(self.wave) // RATE


def sound_segments(n_units: int, max_positions: int) -> list[EncoderSegment]:
    """How the encoder's history grows and restarts from its last units, as in serving.

    Args:
        max_positions: of the encoder's table.
    """
    n_kept = min(OVERLAP_UNITS, max_overlap_units(max_positions))
    segments, context, begin, held = list[EncoderSegment](), 0, 0, 0
    for unit in range(n_units):
        if needs_overlap(held, 0 if unit else 2, UNIT_END, max_positions):
            segments.append(EncoderSegment(context, begin, unit))
            context, begin = max(0, unit - n_kept), unit
            held = UNIT_ROWS * (unit - context)
        held += UNIT_ROWS
    return [*segments, EncoderSegment(context, begin, n_units)]


def make_record(
    task: str,
    timeline: Timeline,
    part: TimelinePart,
    layout: RowLayout,
    config: OmniConfig,
    *,
    utterance: Callable[[str], Utterance] | None = None,
    clip: Samples | None = None,
    render: Callable[[Picture], npt.NDArray[np.uint8]] | None = None,
    is_silent: bool = False,
    replies: tuple[SpeechRecord, ...] = (),
) -> Record:
    """The record of one part of a conversation.

    Args:
        utterance: the person's voice, for phonemes; None: they are not known.
        clip: [n] samples at 16 kHz of the reference voice, whole tenths of a second.
        render: makes pictures; None: `rendered`.
        is_silent: see `Record`.
    """
    n_clip = 0 if clip is None else len(clip) * 10 // RATE
    rows = part_rows(timeline.units, part, layout, n_clip)
    segments = [
        one
        for one in sound_segments(part.end, config.audio_config.max_source_positions)
        if one.first < part.end and one.end > part.first
    ]
    places = {
        unit: number * PLACES + unit - one.context
        for number, one in enumerate(segments)
        for unit in range(one.first, one.end)
    }
    pictures, classes, shown = _pictures(timeline.units[part.first : part.end], render or rendered)
    kinds, sources = rows.kinds.copy(), np.zeros(len(rows), np.int64)
    kinds[(kinds == SOUND) & (rows.units == NOTHING)] = REFERENCE
    sources[kinds == REFERENCE] = np.arange(n_clip)
    watched = np.full(len(rows), NOTHING)
    decides = (kinds == SOUND) & (rows.targets != NOTHING)
    watched[decides] = [timeline.units[unit].watched for unit in rows.units[decides]]
    sound = np.array([places[unit] for unit in range(part.first, part.end)], np.int64)
    sources[kinds == SOUND] = (sound[:, None] * SOUND_ROWS + np.arange(SOUND_ROWS)).ravel()
    sources[kinds == PICTURE] = (np.array(shown, np.int64)[:, None] * PICTURE_ROWS + np.arange(PICTURE_ROWS)).ravel()
    return Record(
        task=task,
        ids=rows.ids.astype(np.int16),
        targets=rows.targets.astype(np.int16),
        kinds=kinds.astype(np.int8),
        sources=sources.astype(np.int32),
        wave=as_levels(timeline.sound[: RATE * part.end]),
        phones=encoder_phones(timeline, part.end, utterance).astype(np.int8),
        segments=np.array([(one.context, one.first, one.end) for one in segments], np.int16),
        pictures=pictures,
        picture_classes=as_classes(classes),
        clip=as_levels(np.zeros(0, np.float32) if clip is None else clip),
        replies=replies,
        watched=watched.astype(np.int16),
        is_silent=is_silent,
        words=words_of_part(timeline, part, layout, kinds, rows.units),
    )


def words_of_part(
    timeline: Timeline, part: TimelinePart, layout: RowLayout, kinds: Ints, units: Ints
) -> tuple[HeardWords, ...]:
    """What the person says in a part, with the rows that hear it. kinds, units: [T] of the part's rows."""
    rows = np.flatnonzero((kinds == SOUND) & (units != NOTHING))
    starts = part.first + ROW_S * np.arange(len(rows))
    found = []
    for placed in timeline.placed:
        if len(heard := heard_rows(starts, placed.start, placed.n_samples)):
            last = int((starts[heard] < placed.start + placed.n_samples / RATE).sum())
            found.append(heard_words(layout.encode, placed.text, rows[heard], 0, last))
    return tuple(found)


def encoder_phones(timeline: Timeline, n_units: int, utterance: Callable[[str], Utterance] | None) -> Ints:
    """[50 n_units] phonemes at the encoder's rows; arguments as for `make_record`."""
    if utterance is None:
        return np.full(UNIT_ROWS * n_units, NO_PHONE)
    # Row r is convolved around mel frame 2 r, which is centred LEAD samples earlier in the person's sound.
    times = np.arange(UNIT_ROWS * n_units, dtype=np.float64) * ENCODER_ROW_S - LEAD / RATE
    phones = np.full(len(times), SILENCE)
    for placed in timeline.placed:
        spoken = utterance(placed.text)
        inside = (times >= placed.start) & (times < placed.start + len(spoken.wave) / RATE)
        phones[inside] = spoken.phones_at(times[inside] - placed.start)
    return phones


def as_levels(samples: Samples) -> npt.NDArray[np.int16]:
    """Samples as 16-bit levels."""
    return (samples * 32_768).round().clip(-32_768, 32_767).astype(np.int16)


def write_records(file: Path, records: Sequence[Record]) -> None:
    """Write a shard, which appears at once."""
    partial = file.with_suffix(".part")
    with partial.open("wb") as out:
        pickle.dump(list(records), out, protocol=5)
    partial.replace(file)


def read_records(file: Path) -> list[Record]:
    """The records of a shard, which must be a file of `write_records`: a pickle of others could run code."""
    with file.open("rb") as stored:
        records: list[Record] = pickle.load(stored)
    return records


def as_classes(classes: Sequence[tuple[int, ...]]) -> npt.NDArray[np.int8]:
    """[P, 4] classes of pictures."""
    return np.array(classes, np.int8).reshape(-1, len(CLASSES))


def rendered(picture: Picture) -> npt.NDArray[np.uint8]:
    """[448, 448, 3] levels of a picture."""
    return np.asarray(picture.render())


def _pictures(
    units: Sequence[TimelineUnit], render: Callable[[Picture], npt.NDArray[np.uint8]]
) -> tuple[npt.NDArray[np.uint8], list[tuple[int, ...]], list[int]]:
    """The distinct pictures of units, their classes, and the number of the picture of each unit that has one."""
    numbers: dict[object, int] = {}
    drawn: list[npt.NDArray[np.uint8]] = []
    classes: list[tuple[int, ...]] = []
    shown: list[int] = []
    for unit in units:
        if (one := unit.picture) is None:
            continue
        key = (one.shown, one.look, one.at, one.frame // FRAMES_OF_A_VIEW)
        if key not in numbers:
            numbers[key] = len(drawn)
            drawn.append(render(one))
            classes.append(picture_classes(one.shown, is_still=one.at is None))
        shown.append(numbers[key])
    return np.stack(drawn) if drawn else np.zeros((0, 448, 448, 3), np.uint8), classes, shown
