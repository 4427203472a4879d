"""Sound of one session that waits to be heard, and which samples the next unit takes. Torch-free.

Knows samples and their counts. Does not know frames, the encoder or what else a unit holds.

The first unit takes 16 480 samples, every later one 16 000: 480 stay ahead of the last whole second. To have them
after one second of sound, the first unit begins with silence:

    fixed       560 zeros in front of the session's sound, always: units depend on the samples alone, not on when
                anybody asks for them
    reference   zeros in front of whatever waits when the first unit is asked for, up to 16 560 samples; a unit
                without sound that came before leaves the first one without zeros, and with 480 samples that the
                second one hears again
"""

import copy
from typing import Self

import numpy as np

from models.errors import AudioError
from models.inputs.audio_sizes import FIRST_UNIT_PADDED, FIRST_UNIT_SAMPLES, SAMPLE_RATE, UNIT_SAMPLES

LEAD_SAMPLES = FIRST_UNIT_PADDED - UNIT_SAMPLES
LOOKAHEAD_SAMPLES = FIRST_UNIT_SAMPLES - UNIT_SAMPLES
MAX_LEVEL = 1e4  # full scale is 1; beyond this, integers were sent as floats


def checked(samples: object) -> np.ndarray:
    """`samples` as [n] float32 in native byte order, if they are mono float sound.

    A copy is made only where the array is not like that already.
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
    """What one session has sent and no unit has heard yet.

    A unit's samples are looked at with `peek`, as often as it takes, and leave with `commit` once the unit is heard.
    n_units: units heard; in reference those without sound count too.
    """

    def __init__(self, *, reference: bool = False, max_waiting_s: float = 30.0):
        """reference: pad and count as the public implementation does. max_waiting_s: longest sound that may wait,
        beside the look-ahead.
        """
        assert max_waiting_s >= 1, f"max_waiting_s: expected room for a unit, got {max_waiting_s}"
        self.reference = reference
        self.max_waiting_s = max_waiting_s
        self.reset()

    def reset(self) -> None:
        """As new: nothing waits, the next unit is the first."""
        self.n_units = 0
        self._heard_sound = False
        self._n_drop: int | None = None  # what leaves with the unit that `peek` gave last
        # [:_n] is in use, and begins with _n_lead zeros that nobody sent.
        self._buffer = np.zeros(2 * UNIT_SAMPLES, dtype=np.float32)
        self._n = self._n_lead = 0 if self.reference else LEAD_SAMPLES

    def copy(self) -> Self:
        """The same, independent of this one: to go back to."""
        other = copy.copy(self)
        other._buffer = self._buffer[: self._n].copy()
        return other

    def push(self, samples: np.ndarray) -> None:
        """Append [n] samples. Raises: AudioError as `checked`, or if too much waits; then nothing is appended."""
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

    def peek(self) -> np.ndarray | None:
        """The next unit's samples, 16 480 if it is the first and else 16 000; None while there are too few.

        They go on waiting until `commit`. The array is the caller's.
        """
        if self._asks_for_zeros and self._n < FIRST_UNIT_PADDED:
            self._n_lead = FIRST_UNIT_PADDED - self._n
            self._buffer = np.concatenate((np.zeros(self._n_lead, dtype=np.float32), self._buffer))
            self._n = FIRST_UNIT_PADDED
        if self._n < self._n_needed:
            return None
        self._n_drop = self._n_leaving
        return self._buffer[: self._n_needed].copy()

    def commit(self) -> None:
        """The samples that `peek` gave last are heard, whatever was pushed since."""
        assert self._n_drop is not None, "commit: expected a peek that gave a unit, got none"
        left = self._n - self._n_drop
        self._buffer[:left] = self._buffer[self._n_drop : self._n]
        self._n, self._n_lead, self._n_drop = left, 0, None
        self._heard_sound = True
        self.n_units += 1

    def mark_heard_without_sound(self) -> None:
        """A unit of pictures alone went by. In reference it counts, and the next one with sound is not the first."""
        self._n_drop = None
        if self.reference:
            self.n_units += 1

    @property
    def n_waiting(self) -> int:
        """Samples that were sent and are not heard."""
        return self._n - self._n_lead

    @property
    def n_whole(self) -> int:
        """Units that could be taken now, one after the other."""
        n = max(self._n, FIRST_UNIT_PADDED) if self._asks_for_zeros else self._n
        return 0 if n < self._n_needed else 1 + (n - self._n_leaving) // UNIT_SAMPLES

    @property
    def lag_s(self) -> float:
        """Seconds of sound that wait, the look-ahead included."""
        return self.n_waiting / SAMPLE_RATE

    @property
    def _n_needed(self) -> int:
        return UNIT_SAMPLES if self._heard_sound else FIRST_UNIT_SAMPLES

    @property
    def _n_leaving(self) -> int:
        # The public implementation takes by what its log-mel has seen and drops by its count of units.
        return UNIT_SAMPLES if self.n_units else self._n_needed

    @property
    def _asks_for_zeros(self) -> bool:
        return self.reference and self.n_units == 0 and self._n > 0
