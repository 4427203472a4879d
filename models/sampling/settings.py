"""How to choose text tokens and speech codes: ranges and the released presets. Torch-free.

A field at its default is neutral: the step it belongs to changes nothing.
"""

import math
from dataclasses import dataclass

from models.errors import SettingsError

MIN_TEMPERATURE = 1e-6  # colder, and logits divided by it leave float32
MAX_TEMPERATURE = 1e6
MIN_FACTOR, MAX_FACTOR = 1e-4, 1e4  # penalties and scales; their powers and logs stay in float32
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class TextSampling:
    """Settings of one slot's text sampler.

    greedy: take the best id; temperature, top-k and top-p are then unused.
    temperature: MIN_TEMPERATURE to MAX_TEMPERATURE.
    top_k: ids kept, 0 keeps all. top_p: probability kept, 0 or 1 keeps all.
    repetition_penalty: a factor, MIN_FACTOR to MAX_FACTOR as all of them, on each distinct id of the last
        `repetition_window` ids; with `chunked_window` the window reaches back from the start of the current
        chunk and takes the whole chunk too; with `sign_blind` negative logits are divided as well, which
        raises them.
    length_penalty: above 1 makes the ids that end a turn less likely.
    listen_scale: factor on the listen logit, or on its odds if `listen_scale_on_probability`.
    listen_top_k: listen as soon as listen ranks among this many best; 0 is off.
    stop_probe: ask the unprocessed logits first whether to stop.
    set_index: which row of the shared token sets applies.
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
    """Settings of one slot's speech-code sampler.

    repetition_penalty: MIN_FACTOR to MAX_FACTOR, raised to the number of times a code occurs in the recent codes.
    top_p: probability kept, 1 keeps all; applied before top_k (codes kept, 0 keeps all). Both keep at
        least `min_keep` codes and leave the first code since the history was emptied alone.
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
    kind = int if whole else (int, float)
    bounds = [f"above {above}"] * (above is not None) + [f"at least {at_least}"] * (at_least is not None)
    bounds += [f"at most {at_most}"] * (at_most is not None)
    ok = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (above is None or value > above) and (at_least is None or value >= at_least)
    if not (ok and (at_most is None or value <= at_most)):
        expected = f"{'a whole' if whole else 'a finite'} number {' and '.join(bounds)}"
        raise SettingsError(f"setting {name}", expected=expected, got=repr(value))


def check_flag(name: str, value: object) -> None:
    """Raises: SettingsError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise SettingsError(f"setting {name}", expected="true or false", got=repr(value))


def signed_seed(seed: int) -> int:
    """A 64-bit seed as the signed integer a tensor can hold. Raises: SettingsError outside 0..2**64-1."""
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
