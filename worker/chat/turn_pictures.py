"""The pictures that come with a user's sound, and their places in a turn. Contains no decoding of pixels."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.inputs.audio_sizes import CLIP_SAMPLES, SAMPLE_RATE
from models.inputs.image import MAX_PIXELS, EncodedImage
from models.inputs.messages import Part

MAX_PICTURES, MAX_PICTURE_PIXELS = 32, MAX_PIXELS  # that are held, of one turn; the newest stay
MIN_SOUND = SAMPLE_RATE // 10  # samples after the last picture


@dataclass(frozen=True, eq=False)
class PlacedPicture:
    """A picture. at: sample with which it came."""

    at: int
    image: EncodedImage


@dataclass(frozen=True, eq=False)
class SpokenTurn:
    """What the user said, [n] float32 at 16 kHz, and its pictures by samples from the turn's first."""

    sound: np.ndarray
    pictures: tuple[PlacedPicture, ...] = ()

    def without_oldest(self) -> "SpokenTurn":
        """The turn with one picture less."""
        return SpokenTurn(self.sound, self.pictures[1:])

    def parts(self) -> tuple[Part, ...]:
        """Content of a message: each picture stands before the second of sound in which it came."""
        parts: list[Part] = []
        done = 0
        for picture in self.pictures:
            second = max(0, min(picture.at, len(self.sound) - MIN_SOUND)) // SAMPLE_RATE * SAMPLE_RATE
            if second > done:
                parts.append(self.sound[done:second])
                done = second
            parts.append(picture.image)
        return (*parts, self.sound[done:])


def joined(turns: Sequence[SpokenTurn]) -> SpokenTurn:
    """Turns as one, of which the last 30 s stay."""
    sound = np.concatenate([turn.sound for turn in turns])
    n_cut = max(0, len(sound) - CLIP_SAMPLES)
    pictures, start = list[PlacedPicture](), -n_cut
    for turn in turns:
        pictures += [PlacedPicture(start + one.at, one.image) for one in turn.pictures]
        start += len(turn.sound)
    return SpokenTurn(sound[n_cut:], tuple(from_newest_before(pictures, 0))[-MAX_PICTURES:])


def from_newest_before(pictures: Sequence[PlacedPicture], start: int) -> list[PlacedPicture]:
    """The pictures from the newest that came before the sample `start` on: what was seen when the turn began."""
    n_before = sum(picture.at <= start for picture in pictures)
    return list(pictures[max(0, n_before - 1) :])


class RecentPictures:
    """The pictures of the sound so far that a turn may still need. interval_s: between two that are kept."""

    def __init__(self, interval_s: float):
        self._interval = round(interval_s * SAMPLE_RATE)
        self._held: deque[PlacedPicture] = deque()
        self._n_samples = 0

    @property
    def n_pixels(self) -> int:
        """Pixels of all pictures that are held."""
        return sum(picture.image.n_pixels for picture in self._held)

    def push(self, images: Sequence[EncodedImage], n_samples: int, *, is_turn_open: bool) -> None:
        """Take the pictures of further sound.

        Args:
            images: they came at even intervals during the sound.
            n_samples: of the sound.
            is_turn_open: whether the user spoke before it; otherwise only the newest of the older pictures stays.
        """
        if not is_turn_open:
            while len(self._held) > 1:
                self._held.popleft()
        for i, image in enumerate(images):
            at = self._n_samples + i * n_samples // len(images)
            if not self._held or at - self._held[-1].at >= self._interval:
                self._held.append(PlacedPicture(at, image))
        while len(self._held) > MAX_PICTURES or self.n_pixels > MAX_PICTURE_PIXELS:
            self._held.popleft()
        self._n_samples += n_samples

    def turn(self, sound: np.ndarray, end: int) -> SpokenTurn:
        """A turn that is over, with its pictures. end: sample after its last one, of all sound since the reset."""
        start = end - len(sound)
        found = from_newest_before([one for one in self._held if one.at < end], start)
        return SpokenTurn(sound, tuple(PlacedPicture(one.at - start, one.image) for one in found))

    def reset(self) -> None:
        """Forget everything; samples count from 0 again."""
        self._held.clear()
        self._n_samples = 0
