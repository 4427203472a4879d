"""The position of a session in its turn, and the pending result of a call of the vocoder.

Contains counts and asynchronous copies. Does not contain the computation or the leasing of slots.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.graphs.streams import AsyncHostCopy
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.settings import SAMPLES_PER_FRAME
from models.token2wav.stream.vocode import TAIL_FRAMES, VocodeRules


@dataclass(frozen=True)
class VocoderSession:
    """The slots and counts of one session. The host keeps the counts, so choosing a bucket needs no device read."""

    slot: int  # the slot that the next call reads
    next_slot: int  # the slot that the next call writes
    voice: int  # voice slot
    n_prompt: int  # mel frames of the voice's prompt
    n_steps: int  # Euler steps
    n_seen: int = 0  # cached mel frames that the next chunk attends to
    n_held_back: int = 0  # mel frames whose sound is sent with the next chunk

    def with_voice(self, voice: int, n_prompt: int) -> "VocoderSession":
        """The session with another voice, for `at_turn_start`."""
        return replace(self, voice=voice, n_prompt=n_prompt)

    def at_turn_start(self) -> "VocoderSession":
        """The session at the start of a turn, in its other slot."""
        return replace(self, slot=self.next_slot, next_slot=self.slot, n_seen=self.n_prompt, n_held_back=0)

    def after_chunk(self, n_frames: int, last: bool, rules: VocodeRules) -> tuple["VocoderSession", int]:
        """The session after a chunk of `n_frames` mel frames, in its other slot, and the samples to send."""
        n_seen = min(self.n_seen + n_frames, self.n_prompt + HISTORY_FRAMES)
        n_frames += self.n_held_back
        kept = min(n_frames, TAIL_FRAMES)
        n_held_back = 0 if last and rules.end == "clear" else kept
        session = replace(self, slot=self.next_slot, next_slot=self.slot, n_seen=n_seen, n_held_back=n_held_back)
        return session, SAMPLES_PER_FRAME * (n_frames if last else n_frames - kept)


class SessionMove(NamedTuple):
    """One session before and after a call."""

    before: VocoderSession
    after: VocoderSession


class VocoderFuture:
    """The pending result of `Vocoder.start`: sounds that are computed and copied to the host asynchronously."""

    def __init__(self, moves: dict[int, SessionMove], sounds: list[Tensor]):
        """
        Args:
            moves: by session.
            sounds: one [n] per chunk, on the vocoder's device.
        """
        self.moves, self._lengths = moves, [len(sound) for sound in sounds]
        self._copy = AsyncHostCopy(torch.cat(sounds))

    @property
    def is_here(self) -> bool:
        """Whether `Vocoder.finish` returns without waiting."""
        return self._copy.is_ready

    def take(self) -> list[np.ndarray]:
        """The sounds, one array per chunk; waits until they are on the host. Raises: any error of the device."""
        together = self._copy.result().numpy().copy()  # a copy, because the next call may reuse the pinned memory
        return np.split(together, np.cumsum(self._lengths)[:-1])
