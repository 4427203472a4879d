"""The position of the reply's sound on the conversation's time line. Torch-free.

Unit k is complete at second k + 1, so its sound cannot start earlier.
"""

# A turn's first sound is shorter than a second. A player that waits this long bridges the gap to the next sound.
PLAYER_DELAY_MS = 200
MAX_DELAY_MS = 10_000
MAX_TAIL = 600  # silent units after a file


def sound_start(ready: int, previous_end: int, delay: int) -> int:
    """The first sample of a unit's sound, in samples of the time line.

    Args:
        ready: the time the sound is available.
        previous_end: the end of the previous sound.
        delay: the player's delay before sound that follows silence.
    Returns:
        `previous_end` if the previous sound still plays, otherwise `ready + delay`.
    """
    return previous_end if previous_end >= ready else ready + delay
