"""Markdown table of all keys of the settings file: `python -m worker.config.doc` prints it for docs/configuration.md.

Torch-free.
"""

import json
from pathlib import Path

from worker.config.layers import SettingField, setting_fields
from worker.config.service import Config
from worker.config.settings import Settings

HEAD = ("| key | default | allowed | what it does |", "|---|---|---|---|")


def table() -> list[str]:
    """The lines of the table: its head, and one per key. The settings of a session have a table of their own."""
    return [*HEAD, *(_row(setting) for setting in setting_fields(Config) if _has_row(setting))]


def _has_row(setting: SettingField) -> bool:
    is_section = setting.parent is Config
    return not is_section and not setting.key.startswith("duplex.session.")


def _row(setting: SettingField) -> str:
    cells = (f"`{setting.key}`", _default(setting), setting.allowed(), setting.info.description or "")
    return f"| {' | '.join(cells)} |"


def _default(setting: SettingField) -> str:
    value = setting.default
    if isinstance(value, Settings):
        value = value.model_dump().get("enabled", {})
    if isinstance(value, Path):
        value = value.as_posix()
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print("\n".join(table()))
