"""When a unit runs whose sound comes in pieces: after its second, or early at a pause after speech."""

import numpy as np

UNIT_SAMPLES, PAUSE_SAMPLES, MIN_SHIFT_SAMPLES = 16_000, 3_200, 1_600
LOUD = 0.05  # level of speech in pieces


class OpenSecond:
    """The sound of a unit so far, in a session whose units may run early."""

    def __init__(self) -> None:
        self._n = self._n_silent = 0
        self._has_speech = False

    def missing(self, samples: np.ndarray, *, speaks: bool) -> int | None:
        """Add a piece. speaks: the unit will.

        Returns: samples that the unit lacks when it runs, more than 0 at a pause after speech; None: it waits.
        """
        self._n += len(samples)
        is_loud = bool(np.abs(samples).max(initial=0.0) > LOUD)
        self._n_silent = 0 if is_loud else self._n_silent + len(samples)
        self._has_speech = self._has_speech or is_loud
        n_missing = max(UNIT_SAMPLES - self._n, 0)
        is_pause = speaks and self._has_speech and self._n_silent >= PAUSE_SAMPLES
        if n_missing and not (is_pause and n_missing >= MIN_SHIFT_SAMPLES):
            return None
        self._n = max(self._n - UNIT_SAMPLES, 0)
        self._has_speech = self._has_speech and not is_pause
        return n_missing
