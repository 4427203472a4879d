"""Feeds the first rows of units whose images are there: what closes the last unit, `<unit>` and the images.

Images stand before the sound, in the order in which they arrive, so that nothing can come before the ones that are
known. If the unit turns out to begin otherwise, the rows are removed: they have sampled nothing.
"""

import logging
from collections.abc import Callable
from typing import Literal

from models.inputs.image import ImagePatches
from models.stages.runner import Rows
from models.stages.unit_steps import UnitSteps
from worker.loop.early.early_rows import EarlyRows
from worker.loop.language import Language
from worker.loop.replay.unfed_rows import UnfedRows
from worker.loop.session import Session, SessionPhase

LOG = logging.getLogger(__name__)
# The forward of a picture takes 6 ms on one NVIDIA H200: four sessions with a picture a second use 2.4 % of the time.
# It takes 40 ms on a CPU, which rarely serves more sessions than this.
FED_SESSIONS = 4


class EarlyPrefill:
    """Early rows of all sessions. n_fed: images fed before their unit."""

    def __init__(
        self,
        unit_steps: UnitSteps,
        language: Language,
        unfed: UnfedRows,
        mode: Literal[True, "auto"],
        n_open: Callable[[], int],
    ):
        """
        Args:
            unfed: rows of earlier units, which have to be in the context first.
            mode: True: always; auto: while at most FED_SESSIONS sessions are open.
            n_open: the number of open sessions.
        """
        self._unit_steps, self._language, self._unfed = unit_steps, language, unfed
        self._mode, self._n_open = mode, n_open
        self._sessions: list[Session] = []
        self.n_fed = 0

    def expect(self, session: Session) -> None:
        """Look at a session that has received an image."""
        if session not in self._sessions:
            self._sessions.append(session)

    def forget(self, session: Session) -> None:
        """The session is closed."""
        if session in self._sessions:
            self._sessions.remove(session)

    @property
    def has_work(self) -> bool:
        """Whether an image can be fed now."""
        return self._next() is not None

    def run(self) -> None:
        """Feed the next image of one session."""
        found = self._next()
        if found is None:
            return
        session, image = found
        before = session.early_rows or EarlyRows(self._unit_steps.context_len(session.slot), (), ())
        try:
            session.keep_early_rows(self._fed(session, image, before))
            self.n_fed += 1
        except Exception as error:
            LOG.warning("session %s: images are not fed before their unit: %s", session.id, error)
            self._give_up(session, before.n_before)

    def _next(self) -> tuple[Session, list[ImagePatches]] | None:
        """The first session with an image that can be fed, and the image."""
        if self._mode == "auto" and self._n_open() > FED_SESSIONS:
            return None
        for session in self._sessions:
            is_ready = session.phase is SessionPhase.READY and not session.waiting and not self._unfed.n_rows(session)
            if is_ready and (image := self._image(session)) is not None:
                return session, image
        return None

    def _image(self, session: Session) -> list[ImagePatches] | None:
        early, frames = session.early_rows, [*session.frames_waiting, *session.frames_ahead]
        n_fed = 0 if early is None else len(early.frames)
        slices = [part for frame in frames for part in frame]
        if len(frames) <= n_fed or (early is not None and not (early.ids and early.begins_images(slices))):
            return None
        image, steps = frames[n_fed], self._unit_steps
        n_rows = len(self._ids(session, image)[0])
        has_room = steps.context_len(session.slot) + n_rows + session.config.unit_rows <= steps.capacity(session.slot)
        if n_rows > steps.max_prefill_rows or not has_room:
            return None
        return image if all(steps.early_images.holds(session.slot, part) for part in image) else None

    def _ids(self, session: Session, image: list[ImagePatches]) -> tuple[list[int], list[int]]:
        """Ids to feed for a session's next image, and the first row of each slice."""
        ids = [*session.pending, self._language.special.unit_start] if session.early_rows is None else []
        starts: list[int] = []
        self._language.add_images(ids, starts, [image])
        return ids, starts

    def _fed(self, session: Session, image: list[ImagePatches], before: EarlyRows) -> EarlyRows:
        """Feed an image. Returns: the early rows with it."""
        steps, slot = self._unit_steps, session.slot
        ids, starts = self._ids(session, image)
        rows = steps.early_images.encode([(slot, part) for part in image])
        (fed,) = steps.feed([slot], [Rows.mixed(ids, list(zip(starts, rows, strict=True)))], [False])
        if fed.bad:
            raise ArithmeticError("expected finite numbers, got NaN or infinity")
        return EarlyRows(before.n_before, (*before.ids, *ids), (*before.frames, image))

    def _give_up(self, session: Session, n_before: int) -> None:
        """Remove what was fed, and feed no more before the next unit."""
        self._unit_steps.cut_context(session.slot, n_before)
        frames = (*session.frames_waiting, *session.frames_ahead)
        session.keep_early_rows(EarlyRows(n_before, (), frames))


def remove_early_rows(unit_steps: UnitSteps, session: Session) -> None:
    """Remove a session's early rows from its context, if it has any."""
    early = session.take_early_rows()
    if early is not None:
        unit_steps.cut_context(session.slot, early.n_before)
        early.mark_removed()
