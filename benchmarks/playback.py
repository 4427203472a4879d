"""The delay of a player: how long it has to wait after a turn's first sound so that the rest of the turn has no gap."""

from collections.abc import Iterable


def needed_delay(pieces: Iterable[tuple[float, float]]) -> float:
    """The smallest delay in s with which a player of a turn's sound never runs dry.

    Args:
        pieces: arrival and length of each piece of the sound, in s, in order.
    """
    first, played, needed = None, 0.0, 0.0
    for arrived, seconds in pieces:
        first = arrived if first is None else first
        needed = max(needed, arrived - first - played)
        played += seconds
    return needed
