"""Where the sound of a reply ends: its frames are bounded by its text, and silence after its text is left out."""

import numpy as np

from models.qwen3_tts.runaway import SILENT_PEAK, RunawayLimits
from worker.loop.results import SOUND_RATE

# Speech tokens, 25 a second: 3 s, and 0.6 s for each text token. Fluent speech takes a third of that.
LIMITS = RunawayLimits(base_frames=75, frames_per_token=15)
KEPT_S = 0.3  # of silence at the end
SILENT_SHARE = 0.01  # of the loudest sample, -40 dB: what is below it is silence after speech


class SoundEnd:
    """Holds back silence that may be the end of one reply.

    Attributes:
        is_over: nothing has been audible for so long after the text that the reply should end here.
    """

    def __init__(self) -> None:
        self._held = np.zeros(0, np.float32)
        self._n_silent = 0  # samples of silence that were passed on last
        self._peak = 0.0
        self.is_over = False

    def push(self, pcm: np.ndarray, *, text_is_read: bool) -> np.ndarray:
        """Take the next sound.

        Args:
            pcm: [n] float32 at 24 kHz.
            text_is_read: no further text will be spoken.
        Returns: [m] what to pass on: all that is audible with what lies before it.
        """
        sound = np.concatenate((self._held, pcm))
        levels = np.abs(sound)
        self._peak = max(self._peak, float(levels.max(initial=0.0)))
        audible = np.flatnonzero(levels >= max(SILENT_PEAK, SILENT_SHARE * self._peak))
        end = int(audible[-1]) + 1 if len(audible) else 0
        sent_before = 0 if len(audible) else self._n_silent
        room = max(round(KEPT_S * SOUND_RATE) - sent_before, 0) if text_is_read else len(sound)
        passed, self._held = sound[: end + room], sound[end + room :]
        self._n_silent = sent_before + len(passed) - end
        self.is_over = len(self._held) >= LIMITS.silent_seconds * SOUND_RATE
        return passed
