"""When units are expected, so that work which can wait does not delay them. Torch-free."""

UNIT_S = 1.0
MARGIN_S = 0.01  # before an expected unit, at least; longer than the work takes on a GPU


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
        """Whether a unit is expected within MARGIN_S, or before work of `work_s` is done.

        One that is late is not waited for.
        """
        margin_s = max(MARGIN_S, work_s)
        return any(0 <= due - now < margin_s for due in self._due.values())
