"""Buffer of a session's incoming sound, which is cut into the samples of each unit. Torch-free.

Contains samples and their counts. Does not contain images, the encoder or the rest of a unit.

The first unit takes 16 480 samples, every later one 16 000: 480 samples of lookahead stay buffered. To have them
after one second of sound, the first unit begins with silence:

    fixed       560 zeros always precede the session's sound: units depend on the samples alone, not on the time of
                the first `peek`
    reference   the first `peek` pads the waiting samples with leading zeros to 16 560; after a unit without sound
                the first unit with sound has no zeros, and its last 480 samples are part of the second unit too
"""

import copy
from collections.abc import Iterable
from typing import Self

import numpy as np

from models.errors import AudioError
from models.inputs.audio_sizes import FIRST_UNIT_PADDED, FIRST_UNIT_SAMPLES, SAMPLE_RATE, UNIT_SAMPLES

LEAD_SAMPLES = FIRST_UNIT_PADDED - UNIT_SAMPLES
LOOKAHEAD_SAMPLES = FIRST_UNIT_SAMPLES - UNIT_SAMPLES
MAX_LEVEL = 1e4  # full scale is 1; a larger level means that integers were sent as floats


def checked(samples: object) -> np.ndarray:
    """Mono float sound as [n] float32 in native byte order; copies only if the array has another layout.

    Raises: AudioError for another type or shape, no samples, NaN, infinity or a level above 10 000.
    """
    if not isinstance(samples, np.ndarray):
        raise AudioError("sound", expected="a NumPy array", got=type(samples).__name__)
    if not np.issubdtype(samples.dtype, np.floating):
        raise AudioError("sound", expected="float samples in [-1, 1]", got=samples.dtype)
    if samples.ndim != 1:
        raise AudioError("sound", expected="mono, one dimension", got=f"shape {samples.shape}")
    if samples.size == 0:
        raise AudioError("sound", expected="at least one sample", got="none")
    loudest = np.abs(samples).max()  # NaN if any sample is
    if not np.isfinite(loudest):
        n_bad = int((~np.isfinite(samples)).sum())
        raise AudioError("sound", expected="finite samples", got=f"{n_bad} of {samples.size} NaN or infinite")
    if loudest > MAX_LEVEL:
        raise AudioError("sound", expected=f"samples in [-1, 1], none beyond {MAX_LEVEL:g}", got=f"{loudest:g}")
    return np.ascontiguousarray(samples, dtype=np.float32)


class AudioBuffer:
    """Samples that a session has received and no unit has taken yet.

    `peek` returns a unit's samples and may be repeated; `commit` removes them.

    Attributes:
        n_units: units taken; in reference mode units without sound count too.
    """

    def __init__(self, *, reference: bool = False, max_waiting_s: float = 30.0):
        """Create an empty buffer.

        Args:
            reference: pad and count as the public implementation does.
            max_waiting_s: seconds of sound that may wait, lookahead excluded.
        """
        assert max_waiting_s >= 1, f"max_waiting_s: expected room for a unit, got {max_waiting_s}"
        self.reference = reference
        self.max_waiting_s = max_waiting_s
        self.reset()

    def reset(self) -> None:
        """Empty the buffer; the next unit is the first one."""
        self.n_units = 0
        self._has_taken_sound = False
        self._n_drop: int | None = None  # samples that `commit` removes after the last `peek`
        # [:_n] is in use; its first _n_lead samples are padding.
        self._buffer = np.zeros(2 * UNIT_SAMPLES, dtype=np.float32)
        self._n = self._n_lead = 0 if self.reference else LEAD_SAMPLES

    def copy(self) -> Self:
        """An independent copy, to restore from."""
        other = copy.copy(self)
        other._buffer = self._buffer[: self._n].copy()
        return other

    def push(self, samples: np.ndarray) -> None:
        """Append [n] samples. Raises: AudioError as `checked`, or if too much waits; nothing is appended then."""
        samples = checked(samples)
        n_waiting = self.n_waiting + samples.size
        if n_waiting - LOOKAHEAD_SAMPLES > self.max_waiting_s * SAMPLE_RATE:
            expected = f"at most {self.max_waiting_s:g} s waiting"
            raise AudioError("sound", expected=expected, got=f"{n_waiting / SAMPLE_RATE:.3f} s")
        total = self._n + samples.size
        if total > self._buffer.size:
            self._buffer = np.concatenate((self._buffer, np.empty(total, dtype=np.float32)))
        self._buffer[self._n : total] = samples
        self._n = total

    def extend(self, pieces: Iterable[np.ndarray]) -> None:
        """`push` pieces, one after the other."""
        for samples in pieces:
            self.push(samples)

    def complete(self) -> None:
        """Append the silence that is missing from a whole unit: as much as up to the end of the client's second.

        A buffer that has a whole unit stays as it is.
        """
        if n_missing := self.n_missing:
            self.push(np.zeros(n_missing, dtype=np.float32))

    def peek(self) -> np.ndarray | None:
        """A copy of the next unit's samples, 16 480 for the first unit and 16 000 later; None if too few wait.

        The samples stay in the buffer until `commit`.
        """
        if self._needs_padding and self._n < FIRST_UNIT_PADDED:
            self._n_lead = FIRST_UNIT_PADDED - self._n
            self._buffer = np.concatenate((np.zeros(self._n_lead, dtype=np.float32), self._buffer))
            self._n = FIRST_UNIT_PADDED
        if self._n < self._n_needed:
            return None
        self._n_drop = self._n_removed
        return self._buffer[: self._n_needed].copy()

    def commit(self) -> None:
        """Remove the samples of the last `peek`; samples pushed since stay."""
        assert self._n_drop is not None, "commit: expected a peek that gave a unit, got none"
        left = self._n - self._n_drop
        self._buffer[:left] = self._buffer[self._n_drop : self._n]
        self._n, self._n_lead, self._n_drop = left, 0, None
        self._has_taken_sound = True
        self.n_units += 1

    def skip_unit(self) -> None:
        """Register a unit of images alone. In reference mode it counts, and the next unit is not the first one."""
        self._n_drop = None
        if self.reference:
            self.n_units += 1

    @property
    def n_waiting(self) -> int:
        """Samples that were pushed and not taken."""
        return self._n - self._n_lead

    @property
    def n_whole(self) -> int:
        """Units that can be taken now."""
        n = max(self._n, FIRST_UNIT_PADDED) if self._needs_padding else self._n
        return 0 if n < self._n_needed else 1 + (n - self._n_removed) // UNIT_SAMPLES

    @property
    def n_to_unit(self) -> int:
        """Samples that are missing from a whole unit: fewer than `n_missing`, since a client's second is longer."""
        return max(self._n_needed - self._n, 0)

    @property
    def n_missing(self) -> int:
        """Samples from here to the end of the client's second; 0 if a whole unit waits."""
        return 0 if self.n_whole else self._n_needed + LEAD_SAMPLES - LOOKAHEAD_SAMPLES - self._n

    @property
    def lag_s(self) -> float:
        """Seconds of sound that wait, lookahead included."""
        return self.n_waiting / SAMPLE_RATE

    @property
    def _n_needed(self) -> int:
        return UNIT_SAMPLES if self._has_taken_sound else FIRST_UNIT_SAMPLES

    @property
    def _n_removed(self) -> int:
        # The public implementation takes by the state of its log-mel and removes by its count of units.
        return UNIT_SAMPLES if self.n_units else self._n_needed

    @property
    def _needs_padding(self) -> bool:
        return self.reference and self.n_units == 0 and self._n > 0
