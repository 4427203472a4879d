"""Exceptions for invalid input, invalid settings and invalid checkpoints.

Every message names the item, what was expected and what was found. Programming errors inside the project are `assert`s
instead.
"""


class ModelError(Exception):
    """Base class; the message is `WHAT: expected X, got Y`."""

    def __init__(self, what: str, *, expected: object, got: object):
        self.what, self.expected, self.got = what, expected, got
        super().__init__(f"{what}: expected {expected}, got {got}")


class ConfigError(ModelError, ValueError):
    """A key is missing or invalid in `config.json`, or in another settings file."""


class CheckpointError(ModelError, ValueError):
    """A checkpoint or its weights are missing or truncated, or do not match the module tree."""


class TokenError(ModelError, ValueError):
    """A tokenizer is unreadable or lacks a required special token, or a token id or text is invalid."""


class ImageError(ModelError, ValueError):
    """An image cannot be decoded or cut into patches."""


class AudioError(ModelError, ValueError):
    """A waveform is empty, not mono float, or not finite."""


class MessageError(ModelError, ValueError):
    """A list of chat messages is malformed."""


class ContextOverflowError(ModelError, ValueError):
    """A prompt and the tokens that may be generated do not fit the slot's cache."""


class SlotError(ModelError, RuntimeError):
    """No slot is free, or a slot is used outside its lease."""


class ShapeError(ModelError, ValueError):
    """A tensor fits no bucket of a region."""


class SettingsError(ModelError, ValueError):
    """A setting is outside its range."""


class NumericsError(ModelError, ArithmeticError):
    """The model's output contains NaN or infinity, or every token is excluded from sampling."""
