"""Speech codes as they come, cut into the chunks the flow takes: each with a look at the codes behind it.

Knows counts only. A turn starts with a little silence, which is also what lets its first chunk go out early.
"""

from typing import Literal, NamedTuple

from models.errors import SettingsError
from models.token2wav.settings import SILENCE_TOKEN

CHUNK_TOKENS = 25  # voiced at once: one second


class Window(NamedTuple):
    """Codes for one chunk, the look-ahead included; none is left for later if `last`."""

    speech_tokens: tuple[int, ...]
    last: bool


class TokenWindows:
    """One turn's codes. `push` gives what can be voiced, and with `last` the rest."""

    def __init__(
        self,
        *,
        lookahead: int = 3,
        chunk: int = CHUNK_TOKENS,
        least: int = CHUNK_TOKENS,
        silence: bool = True,
        compat: Literal["reference"] | None = None,
    ):
        """
        Args:
            chunk: codes voiced at once. least: how many are enough to voice, 1 to `chunk`; fewer means earlier sound.
            silence: start the turn with as many silence codes as the look-ahead has.
            compat: "reference" marks whole windows of the turn's end as last ones too, so that their look-ahead is
                voiced twice, as the public turn-based helper does.
        Raises: SettingsError.
        """
        if compat not in (None, "reference"):
            raise SettingsError("compat", expected="None or 'reference'", got=compat)
        if not 1 <= least <= chunk:
            raise SettingsError("least", expected=f"1 to {chunk}", got=least)
        self.lookahead, self.chunk, self.least, self.compat = lookahead, chunk, least, compat
        self._speech_tokens: list[int] = [SILENCE_TOKEN] * lookahead if silence else []

    @property
    def waiting(self) -> tuple[int, ...]:
        """Codes that no window has consumed, those seen as look-ahead included."""
        return tuple(self._speech_tokens)

    @property
    def n_waiting(self) -> int:
        return len(self._speech_tokens)

    def push(self, speech_tokens: list[int], last: bool = False) -> list[Window]:
        """Windows that `speech_tokens` complete; with `last` also the rest of the turn, so that nothing waits any
        more.
        """
        self._speech_tokens.extend(speech_tokens)
        windows = []
        while len(self._speech_tokens) >= self.lookahead + self.least:
            n = min(self.lookahead + self.chunk, len(self._speech_tokens))
            windows.append(Window(tuple(self._speech_tokens[:n]), last and self.compat == "reference"))
            del self._speech_tokens[: n - self.lookahead]
        if last and self._speech_tokens:
            windows.append(Window(tuple(self._speech_tokens), True))
            self._speech_tokens.clear()
        return windows
