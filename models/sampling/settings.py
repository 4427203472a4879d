"""Settings of the text sampler and the speech sampler: ranges and the released presets. Torch-free.

A text field at its default is neutral: its step changes nothing.
"""

import math
from dataclasses import dataclass
from typing import cast

from models.errors import SettingsError

MIN_TEMPERATURE = 1e-6  # logits divided by a smaller number overflow float32
MAX_TEMPERATURE = 1e6
MIN_FACTOR, MAX_FACTOR = 1e-4, 1e4  # penalties and scales; their powers and logarithms fit float32
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class TextSampling:
    """Settings of one slot's text sampler.

    Attributes:
        greedy: take the id with the best score; temperature, top-k and top-p are unused.
        temperature: MIN_TEMPERATURE to MAX_TEMPERATURE.
        top_k: number of ids kept; 0 keeps all.
        top_p: probability kept; 0 and 1 keep all.
        repetition_penalty: factor, MIN_FACTOR to MAX_FACTOR, on each distinct id of the repetition window.
        repetition_window: number of last ids in the window.
        chunked_window: the window is `repetition_window` ids before the current chunk, and the whole chunk.
        sign_blind: divide negative logits by the repetition penalty too, which raises them.
        length_penalty: factor, MIN_FACTOR to MAX_FACTOR; above 1 makes the ids that end a turn less likely.
        listen_scale: factor, MIN_FACTOR to MAX_FACTOR, on the listen logit.
        listen_scale_on_probability: apply the factor to the odds of listen instead of its logit.
        listen_top_k: choose listen if it ranks among this many best ids; 0 turns the rule off.
        stop_probe: before sampling, draw from the unprocessed logits whether to stop.
        set_index: row of the shared token sets.
    Raises: SettingsError for a value outside its range.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    repetition_window: int = 512
    chunked_window: bool = False
    sign_blind: bool = False
    length_penalty: float = 1.0
    listen_scale: float = 1.0
    listen_scale_on_probability: bool = False
    listen_top_k: int = 0
    stop_probe: bool = False
    set_index: int = 0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, at_least=MIN_TEMPERATURE, at_most=MAX_TEMPERATURE)
        for name in ("repetition_penalty", "length_penalty", "listen_scale"):
            check_number(name, getattr(self, name), at_least=MIN_FACTOR, at_most=MAX_FACTOR)
        for name in ("top_k", "repetition_window", "listen_top_k", "set_index"):
            check_number(name, getattr(self, name), at_least=0, at_most=MAX_COUNT, whole=True)
        check_number("top_p", self.top_p, at_least=0, at_most=1)
        for name in ("greedy", "chunked_window", "sign_blind", "listen_scale_on_probability", "stop_probe"):
            check_flag(name, getattr(self, name))


@dataclass(frozen=True)
class SpeechSampling:
    """Settings of one slot's sampler of speech tokens.

    Attributes:
        greedy: take the token with the best score; temperature, top-p and top-k have no effect.
        temperature: MIN_TEMPERATURE to MAX_TEMPERATURE.
        repetition_penalty: MIN_FACTOR to MAX_FACTOR, to the power of a token's number of occurrences in the history.
        top_p: probability kept; 1 keeps all. Applied before top-k.
        top_k: number of speech tokens kept; 0 keeps all.
        min_keep: top-p and top-k keep at least this many. The first token after an emptied history is exempt from both.
        history_per_call: each call starts with an empty history (duplex units).
    Raises: SettingsError for a value outside its range.
    """

    greedy: bool = False
    temperature: float = 0.8
    repetition_penalty: float = 1.05
    top_p: float = 0.85
    top_k: int = 25
    min_keep: int = 3
    history_per_call: bool = False

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, at_least=MIN_TEMPERATURE, at_most=MAX_TEMPERATURE)
        check_number("repetition_penalty", self.repetition_penalty, at_least=MIN_FACTOR, at_most=MAX_FACTOR)
        check_number("top_p", self.top_p, above=0, at_most=1)
        check_number("top_k", self.top_k, at_least=0, at_most=MAX_COUNT, whole=True)
        check_number("min_keep", self.min_keep, at_least=1, at_most=MAX_COUNT, whole=True)
        for name in ("greedy", "history_per_call"):
            check_flag(name, getattr(self, name))


def check_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    whole: bool = False,
) -> None:
    """Raises: SettingsError unless `value` is a finite number (whole: an int) inside the bounds."""
    bounds = [f"above {above}"] * (above is not None) + [f"at least {at_least}"] * (at_least is not None)
    bounds += [f"at most {at_most}"] * (at_most is not None)
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not (is_number and _is_within(cast("float", value), above, at_least, at_most)):
        expected = f"{'a whole' if whole else 'a finite'} number {' and '.join(bounds)}"
        raise SettingsError(f"setting {name}", expected=expected, got=repr(value))


def _is_within(value: float, above: float | None, at_least: float | None, at_most: float | None) -> bool:
    is_enough = math.isfinite(value) and (above is None or value > above) and (at_least is None or value >= at_least)
    return is_enough and (at_most is None or value <= at_most)


def check_flag(name: str, value: object) -> None:
    """Raises: SettingsError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise SettingsError(f"setting {name}", expected="true or false", got=repr(value))


def signed_seed(seed: int) -> int:
    """The int64 with the bits of a 64-bit seed. Raises: SettingsError outside 0..2**64-1."""
    check_number("seed", seed, at_least=0, at_most=2**64 - 1, whole=True)
    return seed - 2**64 if seed >= 2**63 else seed


CHAT_TEXT = TextSampling(temperature=0.7, top_k=100, top_p=0.8, repetition_penalty=1.02, repetition_window=4096)
HALF_DUPLEX_TEXT = TextSampling(
    temperature=0.7, top_k=100, top_p=0.8, repetition_penalty=1.02, repetition_window=128, chunked_window=True
)
DUPLEX_TEXT = TextSampling(
    temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, length_penalty=1.1, stop_probe=True
)
TURN_SPEECH = SpeechSampling()
DUPLEX_SPEECH = SpeechSampling(top_p=1.0, top_k=0, history_per_call=True)
