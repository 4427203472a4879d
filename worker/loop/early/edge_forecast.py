"""When units are expected, so that work which can wait does not delay them. Torch-free."""

UNIT_S = 1.0
MARGIN_S = 0.01  # before an expected unit, at least; longer than the work takes on a GPU
MAX_MARGIN_S = 0.1  # whatever the work takes: a second has to have time for it
GRACE_S = 0.02  # for which a unit that is late is still waited for


class EdgeForecast:
    """The next unit of each session: a second after its last one. All times in s on one clock."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def count(self, session: str, arrived: float) -> None:
        """Count a unit that arrived with a whole second of sound."""
        self._due[session] = arrived + UNIT_S

    def forget(self, session: str) -> None:
        """The session sends no more units."""
        self._due.pop(session, None)

    def is_near(self, now: float, work_s: float = 0.0) -> bool:
        """Whether a unit is expected before work of `work_s` is done, in the next MARGIN_S, or since GRACE_S."""
        margin_s = min(max(MARGIN_S, work_s), MAX_MARGIN_S)
        return any(-GRACE_S <= due - now < margin_s for due in self._due.values())
