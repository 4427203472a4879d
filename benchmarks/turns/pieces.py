"""Where a client cuts its sound into messages. Torch-free."""

import numpy as np

from benchmarks.turns.questions import RATE
from server.doors.live.sound.speech_level import FRAME, SpeechLevel


def piece_ends(samples: np.ndarray, piece_ms: int, spoken_piece_ms: int) -> list[int]:
    """The last sample of each message of [n] float32 at 16 kHz, as a client finds it while it records.

    spoken_piece_ms: length of the messages while the user speaks and right after that, as the gateway's doors find it.
    """
    level, ends, begin = SpeechLevel(), list[int](), 0
    lengths = {True: spoken_piece_ms * RATE // 1000, False: piece_ms * RATE // 1000}
    for at in range(FRAME, len(samples) + 1, FRAME):
        level.push(samples[at - FRAME : at])
        if at - begin >= lengths[level.is_near]:
            ends.append(at)
            begin = at
    return ends
