"""Where the vocoder's sessions stand, and chunks of theirs on their way.

Knows counts and when sounds have arrived. Does not know what computes them, nor who leases which slot.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from models.graphs.streams import AsyncHostCopy
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.settings import SAMPLES_PER_FRAME
from models.token2wav.stream.vocode import TAIL_FRAMES, VocodeRules


@dataclass(frozen=True)
class VocoderSession:
    """Where a session stands, and what the host remembers so that choosing a bucket needs no look at the device."""

    slot: int
    spare: int  # the slot that the next call writes
    voice: int  # voice slot
    n_prompt: int  # mel frames
    n_steps: int
    n_seen: int = 0  # mel frames that the next chunk sees
    n_held: int = 0  # mel frames whose sound waits for the next chunk

    def begun(self) -> "VocoderSession":
        """At the start of a turn."""
        return replace(self, slot=self.spare, spare=self.slot, n_seen=self.n_prompt, n_held=0)

    def spoken(self, n_frames: int, last: bool, rules: VocodeRules) -> tuple["VocoderSession", int]:
        """One chunk further, and the samples that leave with it."""
        n_seen = min(self.n_seen + n_frames, self.n_prompt + HISTORY_FRAMES)
        n_frames += self.n_held
        kept = min(n_frames, TAIL_FRAMES)
        n_held = 0 if last and rules.end == "forget" else kept
        session = replace(self, slot=self.spare, spare=self.slot, n_seen=n_seen, n_held=n_held)
        return session, SAMPLES_PER_FRAME * (n_frames if last else n_frames - kept)


class VocoderFuture:
    """Chunks on their way through the vocoder, see `Vocoder.start`.

    moves: for each session where it stood, and where it goes. sounds: one each, on the vocoder's device.
    """

    def __init__(self, moves: dict[int, tuple[VocoderSession, VocoderSession]], sounds: list[Tensor]):
        self.moves, self._lengths = moves, [len(sound) for sound in sounds]
        self._arrival = AsyncHostCopy(torch.cat(sounds))

    @property
    def is_here(self) -> bool:
        """Whether `Vocoder.finish` would not wait."""
        return self._arrival.is_ready

    def take(self) -> list[np.ndarray]:
        """The sounds, waited for."""
        together = self._arrival.result().numpy().copy()  # not the pinned memory, which the next launch could use
        return np.split(together, np.cumsum(self._lengths)[:-1])
