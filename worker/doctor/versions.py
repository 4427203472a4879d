"""Versions and bounds in the notation of `pyproject.toml`, compared by their numbers alone."""

import re


def fits(version: str, bounds: str) -> bool:
    """Whether a version lies within bounds such as `>=2.10,<2.14`; suffixes after the numbers are ignored."""
    for bound in filter(None, (one.strip() for one in bounds.split(","))):
        found = re.match(r"(>=|<|==)\s*([0-9.]+)", bound)
        assert found, bound
        given, limit = numbers(version), numbers(found[2])
        width = max(len(given), len(limit))
        left, right = (one + (0,) * (width - len(one)) for one in (given, limit))
        if not {">=": left >= right, "<": left < right, "==": left == right}[found[1]]:
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) for 2.13.0+cu130."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
