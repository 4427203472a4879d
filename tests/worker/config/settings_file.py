"""Loads settings files with given contents, and reads settings by their full names."""

import json
from pathlib import Path
from typing import Any

import pytest

from worker.config.service import Config, load_config
from worker.config.settings import SettingError


def load(
    file: Path, content: object, *, flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None
) -> tuple[Config, list[str]]:
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return load_config(file, flags=flags or {}, environ=environ or {})


def refused(file: Path, content: object, **given: Any) -> SettingError:
    with pytest.raises(SettingError) as caught:
        load(file, content, **given)
    return caught.value


def value_of(config: Config, key: str) -> object:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
