"""Sound of one session that does not fill a unit yet. It waits here, so that the engine gets one unit, not many pieces.

A piece that neither fills the unit nor may run it early changes nothing in the engine, which need not be asked for its
answer. With many sessions the engine takes an iteration of its loop for an answer, and pieces are answered one by one.
Contains no clock and no messages.
"""

from collections.abc import Sequence

import numpy as np

from worker.loop.results import UnitResult
from worker.loop.session_handle import CutImage, SessionHandle


class UnsentSound:
    """The pieces, each [n] float32 at 16 kHz, that are answered and not sent.

    Between `joined` and `answered` the sound belongs to a unit in flight, which gives it back if it fails.
    """

    def __init__(self, context_len: int = 0):
        """context_len: context rows of the prompt."""
        self._pieces: list[np.ndarray] = []
        self._in_flight: list[np.ndarray] = []
        self._n_units, self._context_len = 0, context_len

    def hold(self, handle: SessionHandle, samples: np.ndarray, frames: Sequence[CutImage]) -> UnitResult | None:
        """Keep a piece whose unit is not full with it. Expects that no unit of the session is in flight.

        Args:
            handle: the session.
            samples: the piece, checked.
            frames: its pictures, which the engine encodes before their unit: they are sent at once, with all sound.
        Returns: the result of the piece; None if it has to be sent.
        """
        n = sum(map(len, self._pieces)) + len(samples)
        if frames or n >= handle.n_missing:
            return None
        self._pieces.append(samples)
        n_units, n_rows = self._n_units, self._context_len
        return UnitResult(handle.name, n_units, True, "", False, context_len=n_rows, is_incomplete=True)

    def joined(self, samples: np.ndarray) -> np.ndarray:
        """The sound that waits and a piece after it, which are sent together."""
        self._in_flight, self._pieces = self._pieces, []
        return np.concatenate((*self._in_flight, samples)) if self._in_flight else samples

    def answered(self, result: UnitResult) -> None:
        """Take the result of a unit that was sent: its sound is the engine's."""
        self._in_flight = []
        self._n_units, self._context_len = result.index, result.context_len

    def failed(self) -> None:
        """Take back the sound of a unit that was refused or has failed, except that of its last piece."""
        self._pieces, self._in_flight = self._in_flight + self._pieces, []
