"""When units are expected, so that work which can wait does not delay them. Torch-free."""

UNIT_S = 1.0
MARGIN_S = 0.01  # before an expected unit; longer than the work takes on a GPU


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

    def is_near(self, now: float) -> bool:
        """Whether a unit is expected within MARGIN_S. One that is late is not waited for."""
        return any(0 <= due - now < MARGIN_S for due in self._due.values())
