"""The fake vocoder of the recordings: each token becomes samples of one value, so that sound is compared by count."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from models.token2wav.settings import SAMPLES_PER_TOKEN
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk
from tests.traces.folder import FULL_SCALE


class FakeLaunch(NamedTuple):
    """Sounds of chunks, available at once."""

    sounds: list[np.ndarray]
    is_here: bool = True


class FakeVocoder:
    """Fake `models.token2wav.stream.vocoder.Vocoder`. The lookahead is held back unless the turn ends."""

    lookahead = 3
    shapes = VocoderShapes()

    def __init__(self) -> None:
        self._open: set[int] = set()

    def open(self, voice: object, steps: int | None) -> int:
        slot = next(number for number in range(len(self._open) + 1) if number not in self._open)
        self._open.add(slot)
        return slot

    def close(self, slot: int) -> None:
        self._open.remove(slot)

    def begin_turn(self, slot: int) -> None:
        assert slot in self._open, f"begin_turn: expected one of {self._open}, got {slot}"

    def start(self, chunks: Sequence[Chunk]) -> FakeLaunch:
        slots = [chunk.session for chunk in chunks]
        assert len(set(slots)) == len(slots) and set(slots) <= self._open, f"start: expected open slots, got {slots}"
        return FakeLaunch(
            [
                self._sound(chunk.speech_tokens if chunk.last else chunk.speech_tokens[: -self.lookahead])
                for chunk in chunks
            ]
        )

    def finish(self, launch: FakeLaunch) -> list[np.ndarray]:
        return launch.sounds

    def _sound(self, speech_tokens: Sequence[int]) -> np.ndarray:
        heights = np.array([token * 37 % 2000 - 1000 for token in speech_tokens], dtype=np.float32) / np.float32(
            FULL_SCALE
        )
        return heights.repeat(SAMPLES_PER_TOKEN)
