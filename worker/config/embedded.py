"""Which embedded checkpoint a path names."""

from pathlib import Path

from models.checkpoint.embedded import DEFAULT, TINY
from worker.config.service import ROOT


def has_random_weights(model_path: Path) -> bool:
    """Whether this is the embedded checkpoint for tests."""
    return model_path == ROOT / TINY


def is_talker(model_path: Path) -> bool:
    """Whether this is the embedded checkpoint that programs run without a model."""
    return model_path == ROOT / DEFAULT
