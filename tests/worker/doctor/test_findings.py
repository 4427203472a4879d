"""Findings as a table and as JSON; sizes, and bounds of versions."""

import json

import pytest

from tests.worker.doctor.machines import (
    NOTE,
    OK,
    PROBLEM,
)
from worker.doctor.findings import GIB, MIB, Finding, as_json, size, table
from worker.doctor.versions import fits


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("2.13.0+cu130", ">=2.10,<2.14", True),
        ("2.14.0a0+git1", ">=2.10,<2.14", False),
        ("2.9.1", ">=2.10,<2.14", False),
        ("2.10", ">=2.10.0", True),
        ("3.0", "==3", True),
        ("3.0.1", "==3", False),
        ("anything", "", True),
    ],
)
def test_compares_versions_with_bounds(version: str, bounds: str, expected: bool) -> None:
    assert fits(version, bounds) is expected


def test_formats_sizes() -> None:
    assert (size(1536 * MIB), size(12 * MIB), size(GIB - 1)) == ("1.5 GiB", "12.0 MiB", "1024.0 MiB")


FOUND = [
    Finding("python", OK, "3.12.1"),
    Finding("a-longer-one", NOTE, "first\nsecond", "do this\nand that"),
    Finding("ports", PROBLEM, "8006: taken", "stop it"),
]


def test_aligns_the_table() -> None:
    assert table(FOUND).splitlines() == [
        "ok       python        3.12.1",
        "note     a-longer-one  first",
        "                       second",
        "                       -> do this",
        "                          and that",
        "problem  ports         8006: taken",
        "                       -> stop it",
        "1 problem, 1 note, 1 ok",
    ]


def test_writes_json() -> None:
    written = json.loads(as_json(FOUND))
    assert written["ok"] is False and json.loads(as_json(FOUND[:2]))["ok"] is True
    assert written["findings"][2] == {"name": "ports", "level": "problem", "found": "8006: taken", "remedy": "stop it"}
