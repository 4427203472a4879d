"""What can be watched while units run, and the one thing that can be overruled, for tests and benchmarks.

Every method does nothing by default and costs a call. Tensors are views that the next call overwrites.
"""

from typing import Any

from worker.loop.results import Event


class Observer:
    """Subclass and override what matters."""

    def fed(self, session: str, what: str, past: int, rows: Any) -> None:
        """Rows went into the context. what: `prompt`, `prefill`, `token`, `finalize`. past: rows held before."""

    def heard(self, session: str, rows: Any) -> None:
        """One unit of sound was encoded. rows: [10, D]."""

    def saw(self, session: str, rows: list[Any]) -> None:
        """A unit's image slices were encoded. rows: [query_num, D] each."""

    def prefilled(self, session: str, logits: Any) -> None:
        """A unit's known inputs are in. logits: [V] after the last of them."""

    def token(self, session: str, job: Any, token: int) -> int:
        """The sampler's answer. Returns: the token to go on with."""
        return token

    def spoke(self, session: str, start: int, rows: Any, least: int, speech_tokens: list[int]) -> None:
        """A speech call has ended. start: rows held before it. rows: [n, D] it fed. least: codes it had to draw."""

    def voiced(self, session: str, speech_tokens: tuple[int, ...], last: bool) -> None:
        """One window of codes goes to the vocoder."""

    def done(self, session: str, event: Event) -> None:
        """A unit or answer is over, its context not closed yet."""

    def closed(self, session: str) -> None:
        """A unit's context is closed and the window has moved if it had to."""
