"""This program's version, as pyproject.toml says it."""

VERSION = "0.1.0"
