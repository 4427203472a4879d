"""The checkpoints that the repository contains, as paths below its root."""

from pathlib import Path

TINY = Path("assets/tiny")  # random weights: tests and benchmarks name it
DEFAULT = Path("assets/talker")  # what programs run without a model
