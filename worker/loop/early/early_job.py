"""A unit that runs before its second is full, completed with silence, while it may still be taken back."""

from dataclasses import dataclass, field, replace

from worker.early.trial import EarlyTrial
from worker.loop.duplex_job import MAX_WAITING_FRAMES, DuplexJob
from worker.loop.job import Layout
from worker.loop.session import Session

MIN_SHIFT_SAMPLES = 1600  # a unit that ends sooner by itself is not run early


class TakenBackError(RuntimeError):
    """The unit does not speak, so it is not run early."""


@dataclass(eq=False)
class EarlyJob(DuplexJob):
    """A unit of sound so far and silence. It is only kept if its first token opens a turn.

    Until `commit` nothing is sent, and the session has only lost the sound, images and text stream that
    `SessionInputs` keeps.
    """

    _is_kept: bool = field(default=False, init=False)

    @property
    def trial(self) -> EarlyTrial:
        """The permission that the unit came with."""
        assert self.unit.early is not None, "expected a unit that may run early"
        return self.unit.early

    @property
    def n_missing(self) -> int:
        """Samples of silence that complete the unit; 0 for a unit that is complete by itself."""
        assert self.unit.sound is not None, "expected a unit with sound"
        n_given = sum(map(len, self.unit.earlier)) + len(self.unit.sound)
        return max(self.session.audio_buffer.n_missing - n_given, 0)

    @property
    def may_run(self) -> bool:
        """Whether the session listens, may speak in this unit, and has sound for a part of it only."""
        session, unit = self.session, self.unit
        if session.reference or session.is_speaking or session.waiting or session.interrupt_requested:
            return False
        if session.n_decided < session.config.force_listen_count or session.side_ids is not None:
            return False
        if unit.sound is None or unit.force_listen or unit.force_speak or unit.close_early:
            return False
        n_frames = len(session.frames_waiting) + len(unit.frames)
        return n_frames <= MAX_WAITING_FRAMES and self.n_missing >= MIN_SHIFT_SAMPLES

    def begin(self) -> Layout | None:
        """Lay out the unit with silence in the place of the sound that is missing. Raises: TakenBackError."""
        self.unit = replace(self.unit, close_early=True)
        layout = super().begin()
        if layout is None or not self.step.sample:
            raise TakenBackError("the unit cannot speak")
        return layout

    def on_token(self, token: int) -> None:
        """Take a sampled token. Raises: TakenBackError if the first one does not open a turn."""
        super().on_token(token)
        if self._is_kept:
            return
        decoder = self._decided
        if self.step.feed is None or decoder.is_beside or not decoder.turn_open:
            raise TakenBackError("the unit listens")

    def commit(self) -> None:
        """Make the unit the session's own."""
        self._is_kept = True


class SessionInputs:
    """What a session has received and an early unit takes: restored if the unit is taken back.

    early_rows: of the session.
    """

    def __init__(self, session: Session):
        self._session = session
        self._kept = session.audio_buffer.copy(), session.text_stream and session.text_stream.copy()
        self._frames = session.frames_waiting
        self.early_rows = session.early_rows

    def put_back(self) -> None:
        """Restore the session, whose unit is no longer in flight."""
        self._session.restore(*self._kept)
        self._session.hold_frames(self._frames)
        self._session.keep_early_rows(self.early_rows)
