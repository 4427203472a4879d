"""What is known of a checkpoint before it is loaded."""

from pathlib import Path

from models.checkpoint.config import load_config
from models.checkpoint.embedded import TINY
from models.errors import ConfigError
from worker.config.service import ROOT


def has_random_weights(model_path: Path) -> bool:
    """Whether this is the embedded checkpoint for tests."""
    return model_path == ROOT / TINY


def is_talker(model_path: Path) -> bool:
    """Whether this is a checkpoint of the talker, in whichever folder; False for one that cannot be read."""
    try:
        return load_config(model_path).talker
    except ConfigError:
        return False
