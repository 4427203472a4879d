"""Transcripts of spoken answers by id, for conversations that refer to an earlier answer by it."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

LIFETIME_S = 3600
MAX_ANSWERS = 10_000  # the oldest ones go first


@dataclass(frozen=True)
class _Kept:
    """A transcript. until: Unix s."""

    transcript: str
    owner: str
    until: float


class AudioAnswers:
    """The spoken answers of the last hour. clock: Unix s."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def new_id(self) -> str:
        """An id for an answer."""
        return f"audio_{secrets.token_hex(16)}"

    def expires_at(self) -> int:
        """Unix s until which an answer that ends now is kept."""
        return int(self._clock()) + LIFETIME_S

    def keep(self, audio_id: str, transcript: str, owner: str) -> None:
        """Keep a transcript. owner: who may refer to it."""
        self._drop_old()
        self._kept[audio_id] = _Kept(transcript, owner, self._clock() + LIFETIME_S)
        while len(self._kept) > MAX_ANSWERS:
            self._kept.popitem(last=False)

    def transcript(self, audio_id: str, owner: str) -> str | None:
        """The transcript of an answer; None for one that is unknown, expired or another client's."""
        self._drop_old()
        kept = self._kept.get(audio_id)
        return None if kept is None or kept.owner != owner else kept.transcript

    def _drop_old(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._kept.popitem(last=False)
