"""Encodes pictures of later units while no unit is in flight, so that their units only gather rows.

Work begins only if it should be done before the next expected unit. A unit that arrives unexpectedly waits for one
call: two image slices, or the forward of one picture. What is not encoded in time, or fails, is encoded with its unit,
as without this module.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from models.inputs.image import ImagePatches
from models.stages.early_images import EarlyImages
from worker.loop.early.early_prefill import EarlyPrefill
from worker.loop.early.edge_forecast import EdgeForecast
from worker.loop.job import Job
from worker.loop.session import Session

LOG = logging.getLogger(__name__)
N_TIMED = 8  # latest calls whose median time says how long the next one takes


class EarlyPictureCounts(NamedTuple):
    """Work for pictures before their unit.

    Args:
        encoded: image slices.
        used: those of them whose rows a unit has taken.
        fed: pictures whose rows were fed.
        spent_ms: time of the engine thread; on a GPU, slices are only launched in it.
    """

    encoded: int
    used: int
    fed: int
    spent_ms: float


class EarlyPictures:
    """The pictures of one loop."""

    def __init__(self, images: EarlyImages, clock: Callable[[], float]):
        self._images, self._clock = images, clock
        self._spent_ms = 0.0
        self._timed: deque[float] = deque(maxlen=N_TIMED)  # s
        self._prefill: EarlyPrefill | None = None
        self._forecast = EdgeForecast()

    def count_units(self, jobs: Sequence[Job]) -> None:
        """Count units that end, to expect those of the next second. Pieces that complete no unit do not count."""
        for job in jobs:
            if not job.is_background and job.layout.ids:
                self._forecast.count(job.session.id, job.arrived)

    def forget(self, session: Session) -> None:
        """The session is closed."""
        self._forecast.forget(session.id)
        if self._prefill is not None:
            self._prefill.forget(session)

    def feed_with(self, prefill: EarlyPrefill) -> None:
        """Feed pictures that are encoded before their unit, too."""
        self._prefill = prefill

    @property
    def counts(self) -> EarlyPictureCounts:
        """Totals since the start. Any thread may read them."""
        n_fed = 0 if self._prefill is None else self._prefill.n_fed
        return EarlyPictureCounts(self._images.n_encoded, self._images.n_used, n_fed, self._spent_ms)

    @property
    def capacity(self) -> int:
        """Slices of a session that may be encoded before their unit."""
        return self._images.capacity

    @property
    def has_work(self) -> bool:
        """Whether pictures are left to encode or to feed."""
        return self._images.has_expected or (self._prefill is not None and self._prefill.has_work)

    @property
    def is_waiting(self) -> bool:
        """Whether pictures are left, but not to be worked on now."""
        return self.has_work and self._has_to_wait

    @property
    def _has_to_wait(self) -> bool:
        """Whether the device still encodes other pictures, or a unit is expected."""
        return self._images.is_busy or self._forecast.is_near(self._clock(), self._usual_s)

    @property
    def _usual_s(self) -> float:
        return sorted(self._timed)[len(self._timed) // 2] if self._timed else 0.0

    def expect(self, session: Session, slices: Sequence[ImagePatches]) -> None:
        """Encode slices of a session's later unit when there is time, and feed them."""
        self._images.expect(session.slot, slices)
        if self._prefill is not None and slices:
            self._prefill.expect(session)

    def run(self, jobs: Sequence[Job]) -> None:
        """Encode up to two slices, or feed a picture, if no unit is in flight. jobs: the loop's jobs."""
        if any(not job.is_background for job in jobs) or not self.has_work or self._has_to_wait:
            return
        start = self._clock()
        if not self._images.has_expected and self._prefill is not None:
            self._prefill.run()
        else:
            self._encode()
        spent_s = self._clock() - start
        self._spent_ms += 1000 * spent_s
        self._timed.append(spent_s)

    def _encode(self) -> None:
        try:
            self._images.encode_next()
        except Exception as error:
            LOG.warning("pictures are not encoded before their unit: %s", error)
