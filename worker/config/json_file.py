"""Reading a JSON settings file, with the file, line and column in every error. Torch-free."""

import json
from pathlib import Path
from typing import Any

from models.errors import ConfigError
from worker.describe import shown

MAX_FILE_BYTES = 1 << 20
_EXCERPT = 24  # characters of the file in an error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a settings file. Raises: ConfigError for anything but one JSON object."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), expected="a settings file", got=error.strerror or str(error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(str(path), expected=f"at most {MAX_FILE_BYTES} bytes", got="more")
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), expected="UTF-8 text", got=f"an invalid byte at {error.start}") from None
    except json.JSONDecodeError as error:
        raise _syntax_error(path, text, error) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), expected="JSON", got=str(error)) from None
    if not isinstance(value, dict):
        raise ConfigError(str(path), expected="an object of sections", got=shown(value))
    return value


def _syntax_error(path: Path, text: str, error: json.JSONDecodeError) -> ConfigError:
    rest = text[error.pos :].splitlines()
    got = shown(rest[0][:_EXCERPT]) if rest and rest[0] else "the end of the line" if rest else "the end of the file"
    start, _, expected = error.msg.partition("Expecting ")
    if start:  # the message describes what was found, not what was expected
        expected, got = "valid JSON", f"{error.msg[:1].lower()}{error.msg[1:]}: {got}"
    return ConfigError(f"{path} line {error.lineno} column {error.colno}", expected=expected, got=got)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"duplicate keys: {', '.join(map(shown, duplicates))}")
    return found
