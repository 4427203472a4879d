"""Division of a stream of speech tokens into windows: the tokens of one chunk and the lookahead that follows them.

Contains counts only. A turn starts with silence tokens, which fill the lookahead, so the first chunk is ready earlier.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from models.errors import SettingsError
from models.token2wav.settings import SILENCE_TOKEN

CHUNK_TOKENS = 25  # tokens synthesized at once: one second


class Window(NamedTuple):
    """The tokens of one chunk, the lookahead included unless `last`."""

    speech_tokens: tuple[int, ...]
    last: bool


class TokenWindows:
    """The speech tokens of one turn. `push` returns complete windows, and with `last` the rest."""

    def __init__(
        self,
        *,
        lookahead: int = 3,
        max_chunk: int = CHUNK_TOKENS,
        min_chunk: int = CHUNK_TOKENS,
        silence: bool = True,
        joins_end: bool = False,
        compat: Literal["reference"] | None = None,
    ):
        """
        Args:
            lookahead: tokens after a chunk that the encoder reads.
            max_chunk: most tokens synthesized at once.
            min_chunk: fewest tokens synthesized at once, 1 to `max_chunk`; fewer tokens mean earlier sound.
            silence: start the turn with `lookahead` silence tokens.
            joins_end: at the end of a turn, what is left is one window if it has at most `lookahead + max_chunk`
                tokens; false: complete windows are cut first.
            compat: "reference" marks the full windows at the end of a turn as last windows too, so their lookahead is
                synthesized twice, as in the public turn-based helper.
        Raises: SettingsError for `compat` or `min_chunk`.
        """
        if compat not in (None, "reference"):
            raise SettingsError("compat", expected="None or 'reference'", got=compat)
        if not 1 <= min_chunk <= max_chunk:
            raise SettingsError("min_chunk", expected=f"1 to {max_chunk}", got=min_chunk)
        self.lookahead, self.max_chunk, self.min_chunk, self.compat = lookahead, max_chunk, min_chunk, compat
        self.joins_end = joins_end
        self._speech_tokens: list[int] = [SILENCE_TOKEN] * lookahead if silence else []

    @property
    def waiting(self) -> tuple[int, ...]:
        """Tokens not synthesized by any window yet, including those that were a lookahead."""
        return tuple(self._speech_tokens)

    @property
    def n_waiting(self) -> int:
        return len(self._speech_tokens)

    def resume(self, waiting: Sequence[int]) -> None:
        """Continue a turn whose tokens are synthesized, except for `waiting`."""
        self._speech_tokens = list(waiting)

    def grow(self) -> None:
        """Double the number of new tokens that a window needs at least, up to a whole chunk."""
        self.min_chunk = min(2 * self.min_chunk, self.max_chunk)

    def push(self, speech_tokens: list[int], last: bool = False) -> list[Window]:
        """The windows that `speech_tokens` complete; with `last` also the rest of the turn."""
        self._speech_tokens.extend(speech_tokens)
        windows = []
        while len(self._speech_tokens) >= self.lookahead + self.min_chunk:
            if last and self.joins_end and len(self._speech_tokens) <= self.lookahead + self.max_chunk:
                break
            n = min(self.lookahead + self.max_chunk, len(self._speech_tokens))
            windows.append(Window(tuple(self._speech_tokens[:n]), last and self.compat == "reference"))
            del self._speech_tokens[: n - self.lookahead]
        if last and self._speech_tokens:
            windows.append(Window(tuple(self._speech_tokens), True))
            self._speech_tokens.clear()
        return windows
