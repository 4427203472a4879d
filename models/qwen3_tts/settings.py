"""Settings of one request's sampling: ranges, released values, and `generation_config.json`. Torch-free."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.checkpoint.config import read_json
from models.errors import ConfigError, SettingsError
from models.sampling.settings import (
    MAX_COUNT,
    MAX_FACTOR,
    MAX_TEMPERATURE,
    MIN_FACTOR,
    MIN_TEMPERATURE,
    check_flag,
    check_number,
)

MIN_FRAMES = 2  # the end of speech is not drawn before


@dataclass(frozen=True)
class CodeSampling:
    """How one code is chosen.

    Attributes:
        greedy: take the code with the best score; the others have no effect.
        temperature: MIN_TEMPERATURE to MAX_TEMPERATURE.
        top_k: number of codes kept, ties at the last included; 0 keeps all.
        top_p: probability kept, above 0; 1 keeps all. Applied after top-k.
    Raises: SettingsError for a value outside its range.
    """

    greedy: bool = False
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_flag("greedy", self.greedy)
        check_number("temperature", self.temperature, at_least=MIN_TEMPERATURE, at_most=MAX_TEMPERATURE)
        check_number("top_k", self.top_k, at_least=0, at_most=MAX_COUNT, whole=True)
        check_number("top_p", self.top_p, above=0, at_most=1)


@dataclass(frozen=True)
class FrameSampling:
    """How the codes of a frame are chosen.

    Attributes:
        first: the code that the talker draws.
        rest: the fifteen codes of the code predictor.
        repetition_penalty: on every first code that the answer already has, however often; MIN_FACTOR to MAX_FACTOR.
    Raises: SettingsError for a value outside its range.
    """

    first: CodeSampling = field(default_factory=CodeSampling)
    rest: CodeSampling = field(default_factory=CodeSampling)
    repetition_penalty: float = 1.05

    def __post_init__(self) -> None:
        check_number("repetition_penalty", self.repetition_penalty, at_least=MIN_FACTOR, at_most=MAX_FACTOR)


def load_sampling(folder: str | Path) -> FrameSampling:
    """The sampling that a checkpoint's `generation_config.json` states; released values for what it does not state.

    Raises: ConfigError if the file is unreadable or a value is out of range.
    """
    file = Path(folder) / "generation_config.json"
    raw = read_json(file) if file.exists() else {}
    try:
        released = FrameSampling()
        penalty = raw.get("repetition_penalty", released.repetition_penalty)
        return FrameSampling(_codes(raw, "", "do_sample"), _codes(raw, "subtalker_", "subtalker_dosample"), penalty)
    except SettingsError as error:
        raise ConfigError(f"{file}: {error.what}", expected=error.expected, got=error.got) from None


def _codes(raw: dict[str, Any], prefix: str, sampled: str) -> CodeSampling:
    released = CodeSampling()
    return CodeSampling(
        greedy=not raw.get(sampled, True),
        **{name: raw.get(prefix + name, getattr(released, name)) for name in ("temperature", "top_k", "top_p")},
    )
