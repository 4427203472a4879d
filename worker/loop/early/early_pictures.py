"""Encodes pictures of later units while no unit is in flight, so that their units only gather rows.

A unit that arrives meanwhile waits for two image slices at most. What is not encoded in time, or fails, is encoded with
its unit, as without this module.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from models.inputs.image import ImagePatches
from models.stages.early_images import EarlyImages
from worker.loop.job import Job

LOG = logging.getLogger(__name__)


class EarlyPictureCounts(NamedTuple):
    """Image slices encoded before their unit, those of them whose rows a unit has taken, and the time for all of them.

    spent_ms: of the engine thread; on a GPU, to launch them.
    """

    encoded: int
    used: int
    spent_ms: float


class EarlyPictures:
    """The pictures of one loop."""

    def __init__(self, images: EarlyImages, clock: Callable[[], float]):
        self._images, self._clock = images, clock
        self._spent_ms = 0.0

    @property
    def counts(self) -> EarlyPictureCounts:
        """Totals since the start. Any thread may read them."""
        return EarlyPictureCounts(self._images.n_encoded, self._images.n_used, self._spent_ms)

    @property
    def capacity(self) -> int:
        """Slices of a session that may be encoded before their unit."""
        return self._images.capacity

    @property
    def has_work(self) -> bool:
        """Whether pictures are left to encode."""
        return self._images.has_expected

    @property
    def is_waiting(self) -> bool:
        """Whether pictures are left, and the device still encodes others."""
        return self.has_work and self._images.is_busy

    def expect(self, slot: int, slices: Sequence[ImagePatches]) -> None:
        """Encode slices of a later unit when there is time."""
        self._images.expect(slot, slices)

    def run(self, jobs: Sequence[Job]) -> None:
        """Encode up to two slices if no unit is in flight. jobs: the loop's jobs."""
        if not self.has_work or any(not job.is_background for job in jobs) or self._images.is_busy:
            return
        start = self._clock()
        try:
            self._images.encode_next()
        except Exception as error:
            LOG.warning("pictures are not encoded before their unit: %s", error)
        self._spent_ms += 1000 * (self._clock() - start)
