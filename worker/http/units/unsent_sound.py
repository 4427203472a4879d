"""Pieces of sound of one session that the worker has answered and not sent to the engine yet.

A piece is held if it does not fill a unit, has no pictures, may not run the unit early, and no unit of the session is
in flight. It changes nothing in the engine, whose answer would take an iteration of its loop. The next piece that is
sent takes the held ones with it. Contains no clock and no messages.
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
        """The result of a piece that is held; None, and nothing is held, if it has to be sent.

        Args:
            handle: the session, of which no unit is in flight.
            samples: the piece, checked.
            frames: its pictures. A piece with pictures is sent, since the engine encodes them before their unit.
        """
        n = self._n_samples + len(samples)
        if frames or n >= handle.n_to_unit:
            return None
        self._pieces.append(samples)
        self._n_samples, n_rows = n, self._context_len
        return UnitResult(handle.name, handle.n_units, True, "", False, context_len=n_rows, is_incomplete=True)

    def take(self) -> Sequence[np.ndarray]:
        """Remove the pieces. Returns: them as one, or none. `sent` or `refused` follows."""
        # Joined here, since a client may send thousands of pieces, which the engine's thread would append one by one.
        self._taken = [np.concatenate(self._pieces)] if self._pieces else []
        self._pieces, self._n_samples = [], 0
        return self._taken

    def sent(self) -> None:
        """The engine has the pieces that were taken."""
        self._taken = []

    def refused(self) -> None:
        """Put back the pieces that were taken, before newer ones: the engine does not have them."""
        self._pieces, self._taken = self._taken + self._pieces, []
        self._n_samples = sum(map(len, self._pieces))

    def answered(self, result: UnitResult) -> None:
        """Remember a result's `context_len`, for the results of pieces that are held."""
        self._context_len = result.context_len
