"""Which test files `--quick` runs, what it hides, and which files run in one process because they share servers."""

import gc
import os
import re
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduling import (
    COMPILER_VARIABLES,
    HIDDEN,
    LEFT_OUT,
    PROGRAMS,
    QUICK_FOLDER_S,
    ROOT,
    FilesAndGroups,
    Schedule,
    freeze_objects_left,
    groups_of,
    hide_programs,
    quick_files,
)

USES_BROWSER = re.compile(r"^from (playwright|tests\.e2e\.browser)\b", re.MULTILINE)


def write_files(root: Path, *names: str) -> None:
    for name in names:
        path = root / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_quick_runs_the_cheapest_files_of_a_folder(tmp_path: Path) -> None:
    write_files(tmp_path, "a/test_cheap.py", "a/test_medium.py", "a/test_long.py", "a/helpers.py")
    seconds = {"tests/a/test_medium.py": QUICK_FOLDER_S - 1, "tests/a/test_long.py": 60.0}
    assert quick_files(seconds, tmp_path) == {"tests/a/test_cheap.py", "tests/a/test_medium.py"}


def test_quick_runs_one_file_of_an_expensive_folder(tmp_path: Path) -> None:
    write_files(tmp_path, "a/test_long.py", "a/test_longer.py", "b/test_cheap.py")
    seconds = {"tests/a/test_long.py": 2 * QUICK_FOLDER_S, "tests/a/test_longer.py": 3 * QUICK_FOLDER_S}
    assert quick_files(seconds, tmp_path) == {"tests/a/test_long.py", "tests/b/test_cheap.py"}


def test_quick_runs_no_file_that_needs_programs(tmp_path: Path) -> None:
    write_files(tmp_path, "a/test_browser.py", "a/test_long.py")
    (tmp_path / "tests/a/test_browser.py").write_text("import pytest\n\npytestmark = pytest.mark.programs\n")
    assert quick_files({"tests/a/test_long.py": 60.0}, tmp_path) == {"tests/a/test_long.py"}


def test_files_with_a_browser_are_marked() -> None:
    using = [file for file in (ROOT / "tests").rglob("test_*.py") if USES_BROWSER.search(file.read_text("utf-8"))]
    assert len(using) > 10, f"expected the tests of the pages, got {using}"
    for file in using:
        assert LEFT_OUT.search(file.read_text("utf-8")), f"{file}: expected a mark that `--quick` leaves out"


def test_quick_hides_programs_that_it_does_not_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that needs one fails in `--quick` also where they are installed."""
    monkeypatch.setattr(shutil, "which", lambda name, *_: f"/usr/bin/{name}")
    hide_programs(monkeypatch)
    found = {name: shutil.which(name) for name in (*PROGRAMS, "ffmpeg")}
    assert found == {**dict.fromkeys(PROGRAMS), "ffmpeg": "/usr/bin/ffmpeg"}
    assert {os.environ[variable] for variable in COMPILER_VARIABLES} == {HIDDEN}


def item(nodeid: str, *fixtures: str) -> Any:
    return SimpleNamespace(nodeid=nodeid, fixturenames=list(fixtures))


def test_files_are_grouped_by_the_servers_that_they_share() -> None:
    items = [item("a.py::one"), item("a.py::two[x]", "servers"), item("b.py::one", "shared_browser"), item("c.py::one")]
    assert groups_of(items) == {"a.py": {"servers"}, "b.py": {"shared_browser"}}


def test_a_file_in_another_group_than_its_servers_fails(pytestconfig: pytest.Config) -> None:
    schedule = Schedule(pytestconfig)
    schedule.groups = {"b.py": "servers", "c.py": "servers"}
    items = [item("a.py::one", "servers"), item("b.py::one", "servers", "shared_browser"), item("c.py::one", "servers")]
    schedule.pytest_collection_modifyitems(items)
    for one in items[:2]:
        with pytest.raises(pytest.fail.Exception, match=rf"expected {one.nodeid[0]}\.py in servers"):
            schedule.pytest_runtest_setup(one)
    schedule.pytest_runtest_setup(items[2])


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [("a.py::Class::one", "a.py"), ("b.py::one[x::y]", "servers"), ("c.py::one", "servers")],
)
def test_a_process_gets_all_tests_of_a_file_or_group(monkeypatch: pytest.MonkeyPatch, nodeid: str, scope: str) -> None:
    monkeypatch.setattr(FilesAndGroups, "groups", {"b.py": "servers", "c.py": "servers"})
    assert FilesAndGroups._split_scope(FilesAndGroups.__new__(FilesAndGroups), nodeid) == scope


def test_shared_servers_end_after_the_last_test_of_their_group(pytestconfig: pytest.Config) -> None:
    schedule, ended = Schedule(pytestconfig), list[str]()
    items = [item("a.py::one", "servers"), item("b.py::one"), item("c.py::one", "servers"), item("d.py::one")]
    schedule.groups = {"a.py": "servers", "c.py": "servers"}
    schedule.pytest_collection_modifyitems(items)
    files = [one.nodeid.partition("::")[0] for one in items]
    assert files.index("c.py") == files.index("a.py") + 1, f"expected the files of the group together, got {files}"
    for order in (items, [items[0], *reversed(items[1:])]):  # the second as if a plugin had changed it
        ended.clear()
        passed: list[str] = []
        schedule.pytest_collection_finish(SimpleNamespace(items=order))
        schedule.ends["servers"].append(lambda passed=passed: ended.append(passed[-1]))
        for one, following in zip(order, [*order[1:], None], strict=True):
            passed.append(one.nodeid)
            schedule.pytest_runtest_teardown(one, following)
        assert ended == [[one.nodeid for one in order if one.nodeid[0] in "ac"][-1]]


class Owner:
    """An object that refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_objects_left_by_a_file_are_searched_once() -> None:
    kept, garbage = Owner(), weakref.ref(Owner())
    freeze_objects_left()
    assert garbage() is None, "expected garbage to be collected before"
    assert kept.itself is kept and not any(one is kept for one in gc.get_objects()), "expected the object frozen"
    del kept.itself
