"""Typed errors for bad input, bad settings and bad checkpoints.

Every message says what was looked at, what was expected and what was found. Programming mistakes
inside the project are `assert`s instead; these classes are for what callers and files get wrong.
"""


class ModelError(Exception):
    """Base of everything `models/` raises on purpose; text reads `WHAT: expected X, got Y`."""

    def __init__(self, what: str, *, expected: object, got: object):
        self.what, self.expected, self.got = what, expected, got
        super().__init__(f"{what}: expected {expected}, got {got}")


class ConfigError(ModelError, ValueError):
    """`config.json` (or another settings file of the checkpoint) misses a key or holds an odd value."""


class CheckpointError(ModelError, ValueError):
    """Weights on disk do not fit the module tree, are missing or are truncated."""


class TokenError(ModelError, ValueError):
    """A special token the model needs is not in the tokenizer, or a token id is out of range."""


class ImageError(ModelError, ValueError):
    """An image cannot be decoded or cut into patches."""


class AudioError(ModelError, ValueError):
    """A waveform is empty, not mono float, or not finite."""


class MessageError(ModelError, ValueError):
    """A chat message list is malformed."""


class ContextOverflowError(ModelError, ValueError):
    """A prompt (plus what may be generated) does not fit the slot's cache."""


class SlotError(ModelError, RuntimeError):
    """No free slot, or a slot used outside its lease."""


class ShapeError(ModelError, ValueError):
    """A tensor fits no bucket of the region it was given to."""


class SettingsError(ModelError, ValueError):
    """A sampling or generation setting lies outside its range."""


class NumericsError(ModelError, ArithmeticError):
    """The model's output holds NaN or infinity, or nothing is left to choose from."""
