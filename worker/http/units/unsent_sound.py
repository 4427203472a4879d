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

    Between `take` and `sent` they belong to a unit that the engine has not accepted.
    """

    def __init__(self, context_len: int = 0):
        """context_len: context rows of the prompt."""
        self._pieces: list[np.ndarray] = []
        self._taken: list[np.ndarray] = []
        self._n_samples, self._context_len = 0, context_len  # of `_pieces`; of the last result

    def hold(self, handle: SessionHandle, samples: np.ndarray, frames: Sequence[CutImage]) -> UnitResult | None:
        """Keep a piece whose unit is not full with it. Expects that no unit of the session is in flight.

        Args:
            handle: the session.
            samples: the piece, checked.
            frames: its pictures, which the engine encodes before their unit: they are sent at once, with all sound.
        Returns: the result of the piece; None if it has to be sent.
        """
        n = self._n_samples + len(samples)
        if frames or n >= handle.n_to_unit:
            return None
        self._pieces.append(samples)
        self._n_samples, n_rows = n, self._context_len
        return UnitResult(handle.name, handle.n_units, True, "", False, context_len=n_rows, is_incomplete=True)

    def take(self) -> Sequence[np.ndarray]:
        """The pieces, which go to the engine with the next one."""
        self._taken, self._pieces, self._n_samples = self._pieces, [], 0
        return self._taken

    def sent(self) -> None:
        """The engine has the pieces that were taken."""
        self._taken = []

    def refused(self) -> None:
        """Keep the pieces that were taken: the engine does not have them."""
        self._pieces, self._taken = self._taken + self._pieces, []
        self._n_samples = sum(map(len, self._pieces))

    def answered(self, result: UnitResult) -> None:
        """Note the context of a result."""
        self._context_len = result.context_len
