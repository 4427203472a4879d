"""The table of every key of the settings file: `python -m worker.config.doc` prints it for `docs/configuration.md`.

Knows the typed settings and Markdown. Torch-free.
"""

import json
from pathlib import Path

from worker.config.layers import SettingField, setting_fields
from worker.config.service import Config
from worker.config.settings import Settings, allowed

HEAD = ("| key | default | allowed | what it does |", "|---|---|---|---|")


def table() -> list[str]:
    """One line of Markdown for each key, with a head; a session's knobs have a table elsewhere."""
    return [*HEAD, *(_row(knob) for knob in setting_fields(Config) if _is_told(knob))]


def _is_told(knob: SettingField) -> bool:
    is_section = knob.parent is Config
    return not is_section and not knob.key.startswith("duplex.session.")


def _row(knob: SettingField) -> str:
    cells = (f"`{knob.key}`", _default(knob), _allowed(knob), knob.parent.model_fields[knob.name].description or "")
    return f"| {' | '.join(cells)} |"


def _allowed(knob: SettingField) -> str:
    if knob.group is None:
        return allowed(knob.parent, knob.name)
    return "true or false or 'auto' or an object" if "enabled" in knob.group.model_fields else "an object"


def _default(knob: SettingField) -> str:
    value = knob.default
    if isinstance(value, Settings):
        value = value.model_dump().get("enabled", {})
    if isinstance(value, Path):
        value = value.as_posix()
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print("\n".join(table()))
