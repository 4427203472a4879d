"""Callbacks while units run, for tests and benchmarks; one of them may replace the sampled token.

Every method does nothing by default and costs a call. Tensors are views that the next call overwrites.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from models.stages.runner import Rows
from worker.loop.job import Job
from worker.loop.results import Event

FedRows = Rows | Sequence[int] | int  # a prefill's rows, a unit's last ids, or one token
FedKind = Literal["prompt", "prefill", "token", "finalize"]


class Observer:
    """Subclass and override the callbacks of interest. session: the session's id everywhere."""

    def rows_fed(self, session: str, kind: FedKind, past: int, rows: FedRows) -> None:
        """Rows were fed to the context, or are about to be. past: rows held before."""

    def audio_encoded(self, session: str, rows: Tensor) -> None:
        """One unit of sound was encoded. rows: [10, D]."""

    def images_encoded(self, session: str, rows: list[Tensor]) -> None:
        """A unit's image slices were encoded. rows: [query_num, D] each."""

    def prefilled(self, session: str, logits: Tensor) -> None:
        """A unit's prefill is complete. logits: [V] after its last row."""

    def token_sampled(self, session: str, job: Job, token: int) -> int:
        """A token was sampled. Returns: the token to use."""
        return token

    def speech_call_ended(
        self, session: str, start: int, rows: Tensor, min_tokens: int, speech_tokens: list[int]
    ) -> None:
        """A speech call has ended.

        Args:
            start: speech rows held before it.
            rows: [n, D] conditioning rows it fed.
            min_tokens: speech tokens it had to draw.
        """

    def window_voiced(self, session: str, speech_tokens: tuple[int, ...], last: bool) -> None:
        """One window of speech tokens became sound. last: the turn ends with it."""

    def result_sent(self, session: str, event: Event) -> None:
        """The result or failure of a job was emitted; its context is not closed yet."""

    def unit_taken_back(self, session: str) -> None:
        """A unit that ran early is undone: the callbacks of its prefill and first token do not count."""

    def closed(self, session: str) -> None:
        """A unit's context is closed and the window has applied its evictions."""
