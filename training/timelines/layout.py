"""The context rows of a conversation, exactly as serving feeds them, and the token that is learned after each row.

A unit is `<unit>`, for a picture `<image>`, its rows and `</image>`, ten rows of sound, the tokens that the model
decides, `</unit>`. The terminator and `</unit>` are rows too; nothing is learned after them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.inputs.tokens import Tokenizer
from training.timelines.timeline import TimelineUnit

TOKEN, SOUND, PICTURE = range(3)  # kinds of rows
NOTHING = -1  # target of a row after which nothing is learned
SOUND_ROWS = 10  # of a unit
PICTURE_ROWS = 64  # of a picture
SYSTEM = "Streaming Omni Conversation."  # default of the service
MARKER = "\n\nprevious: "

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ContextRows:
    """Rows of a context, [n] each.

    Args:
        ids: token ids; 0 at rows of sound and pictures.
        kinds: TOKEN, SOUND or PICTURE.
        targets: the token that follows, or NOTHING.
        units: number of the unit; NOTHING for the prompt.
    """

    ids: Ints
    kinds: Ints
    targets: Ints
    units: Ints

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class PromptRows:
    """The rows in front of all units: ids, the reference voice, kept text with its marker, ids."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    n_reference: int = 0
    previous: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.before) + self.n_reference + len(self.previous) + len(self.after)


class RowLayout:
    """Makes rows with one tokenizer's ids."""

    def __init__(self, tokenizer: Tokenizer, *, system: str = SYSTEM, picture_rows: int = PICTURE_ROWS):
        """system: text of the prompt."""
        self._tokenizer, self._special, self._picture_rows = tokenizer, tokenizer.special, picture_rows
        self._system, self.turn_eos = system, tokenizer.special.turn_eos
        self.marker = tokenizer.encode(MARKER)
        self.encode: Callable[[str], list[int]] = tokenizer.encode

    def prompt(self, n_reference: int = 0) -> PromptRows:
        """The start of a context. n_reference: rows of the reference voice, ten a second."""
        before = self._tokenizer.encode(f"<|im_start|>system\n{self._system}\n<|audio_start|>")
        return PromptRows(tuple(before), tuple(self._tokenizer.encode("<|audio_end|><|im_end|>")), n_reference)

    def unit_length(self, unit: TimelineUnit) -> int:
        """Rows of a unit."""
        n_picture = 0 if unit.picture is None else self._picture_rows + 2
        return 2 + n_picture + SOUND_ROWS + len(unit.tokens)

    def spoken(self, unit: TimelineUnit) -> list[int]:
        """The text tokens of a unit: no special ones, and not the first, which is never voiced."""
        special = self._tokenizer.special_ids
        return [token for token in unit.tokens[1:] if token not in special]

    def rows(
        self,
        units: Sequence[TimelineUnit],
        prompt: PromptRows,
        *,
        first: int = 0,
        learned_from: int = 0,
    ) -> ContextRows:
        """Rows of a prompt and of units after it.

        Args:
            units: a timeline's, or some that follow one another.
            first: number of the first of them.
            learned_from: number of the first unit that is learned; earlier ones are context.
        """
        special = self._special
        ids, kinds, targets, numbers = (list[int]() for _ in range(4))

        def add(token: int, kind: int, number: int, target: int = NOTHING) -> None:
            for values, value in ((ids, token), (kinds, kind), (targets, target), (numbers, number)):
                values.append(value)

        for token in prompt.before:
            add(token, TOKEN, NOTHING)
        for _ in range(prompt.n_reference):
            add(0, SOUND, NOTHING)
        for token in (*prompt.previous, *prompt.after):
            add(token, TOKEN, NOTHING)
        for number, unit in enumerate(units, first):
            add(special.unit_start, TOKEN, number)
            if unit.picture is not None:
                add(special.image_start, TOKEN, number)
                for _ in range(self._picture_rows):
                    add(0, PICTURE, number)
                add(special.image_end, TOKEN, number)
            for _ in range(SOUND_ROWS):
                add(0, SOUND, number)
            if number >= learned_from and not unit.is_forced:
                targets[-1] = unit.tokens[0]
            for token, following in zip(unit.tokens, [*unit.tokens[1:], NOTHING], strict=True):
                is_learned = number >= learned_from and not unit.is_forced
                add(token, TOKEN, number, following if is_learned else NOTHING)
            add(special.unit_end, TOKEN, number)
        return ContextRows(*(np.array(values, np.int64) for values in (ids, kinds, targets, numbers)))
