"""Messages that were found, reduced, in one JSON file that the tests read."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fuzz.readers import Data, FoundError, FuzzTarget

CORPUS = Path(__file__).with_name("corpus.json")


def read_corpus(file: Path = CORPUS) -> list[tuple[str, Data, str]]:
    """Target, message and what was found, of each case."""
    if not file.exists():
        return []
    return [
        (one["target"], base64.b64decode(one["base64"]) if "base64" in one else one["text"], one["found"])
        for one in json.loads(file.read_text(encoding="utf-8"))
    ]


def add_case(file: Path, target: str, data: Data, found: str) -> None:
    """Add a case, unless it is there."""
    cases = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    content = {"base64": base64.b64encode(data).decode()} if isinstance(data, bytes) else {"text": data}
    case = {"target": target, "found": found, **content}
    if case not in cases:
        file.write_text(json.dumps([*cases, case], indent=1) + "\n", encoding="utf-8")


def found_by(target: FuzzTarget, data: Data) -> str | None:
    """The kind of what a message finds; None if it finds nothing."""
    try:
        target.check(data)
    except FoundError as error:
        return error.kind
    return None


def shrunk(data: Data, keeps: Callable[[Data], bool], n_tries: int = 500) -> Data:
    """A smaller message that `keeps` accepts: without fields, list items, characters or bytes that do not matter."""
    tries = iter(range(n_tries))
    if isinstance(data, str):
        try:
            given = json.loads(data)
        except (ValueError, RecursionError):
            pass
        else:
            data = json.dumps(_without_parts(given, lambda one: keeps(json.dumps(one)), tries))
    size = max(1, len(data) // 2)
    while size:
        start = 0
        while start < len(data):
            if next(tries, None) is None:
                return data
            shorter = data[:start] + data[start + size :]
            if keeps(shorter):
                data = shorter
            else:
                start += size
        size //= 2
    return data


def _without_parts(given: Any, keeps: Callable[[Any], bool], tries: Any) -> Any:
    """The object without the parts that do not matter."""
    for key in (
        list(given) if isinstance(given, dict) else range(len(given) - 1, -1, -1) if isinstance(given, list) else ()
    ):
        if next(tries, None) is None:
            break
        without = (
            {k: v for k, v in given.items() if k != key} if isinstance(given, dict) else given[:key] + given[key + 1 :]
        )
        if keeps(without):
            given = without
            continue

        def within(part: Any, holder: Any = given, key: Any = key) -> bool:
            return keeps(
                {**holder, key: part} if isinstance(holder, dict) else [*holder[:key], part, *holder[key + 1 :]]
            )

        part = _without_parts(given[key], within, tries)
        given = {**given, key: part} if isinstance(given, dict) else [*given[:key], part, *given[key + 1 :]]
    return given
