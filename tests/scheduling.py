"""pytest plugin: which test files run, in which order and process, and when garbage is collected.

`durations.json` holds the seconds of each file that takes at least a second, as `--record-durations` wrote them. Files
run longest first, because a file is the unit that xdist gives to a process. Files that share server processes are one
unit, listed in `groups.json`: the servers start once and end after the last of these files. `--quick` runs the cheapest
files of every folder, without the tests marked `programs`, and hides the programs that they need.
"""

import atexit
import gc
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_name("durations.json")
GROUPS_FILE = Path(__file__).with_name("groups.json")
MIN_RECORDED_S = 1.0
QUICK_FOLDER_S = 3.0  # test time that --quick spends on a folder at most
# Programs that `run_tests.sh --quick` does not install. The others find a compiler by these variables.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "flite")
COMPILER_VARIABLES = ("CC", "CXX")
HIDDEN = "hidden-by---quick"
# Files whose tests `--quick` would all leave out.
LEFT_OUT = re.compile(r"^pytestmark\b.*\bmark\.(programs|slow|alone|gpu|cluster)\b", re.MULTILINE)
# Fixtures of processes, by which files are grouped. Each has session scope and is ended by `at_group_end`.
SHARED = ("servers", "shared_browser")
# New objects between two searches for garbage: the default of 700 spends about half as much time again on them, and
# 10,000 about 3 % more than none at all.
GC_THRESHOLD = (100_000, 20, 10)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("scheduling")
    group.addoption("--quick", action="store_true", help="only the cheapest test files of every folder")
    group.addoption("--record-durations", action="store_true", help=f"write {FILE.name} from this run")


def pytest_configure(config: pytest.Config) -> None:
    # Modules imported by a collection are no garbage. Searching them takes nearly half of the collection's time.
    gc.disable()
    config.pluginmanager.register(Schedule(config), "schedule")
    if config.getoption("--quick"):
        hide_programs(pytest.MonkeyPatch())


def pytest_collection_finish() -> None:
    """Exclude everything that collection imported from later garbage collections, those at pytest's end included."""
    gc.freeze()
    # Frozen objects of extension modules would be reported as leaks.
    atexit.register(gc.unfreeze)
    gc.set_threshold(*GC_THRESHOLD)
    gc.enable()


def freeze_objects_left() -> None:
    """Collect the garbage of a file, and exclude what it leaves in use from later collections.

    Loaded models and the compiler's caches are a million objects. Tests of engines and servers run full collections,
    each of which would search them for a third of a second.
    """
    gc.collect()
    gc.freeze()


def groups_of(items: Iterable[pytest.Item]) -> dict[str, set[str]]:
    """The names of the shared processes that the tests of each file use; files without any are left out."""
    groups: dict[str, set[str]] = defaultdict(set)
    for item in items:
        if used := set(SHARED).intersection(getattr(item, "fixturenames", ())):
            groups[file_of(item)] |= used
    return groups


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def at_group_end(config: pytest.Config, end: Callable[[], None]) -> None:
    """Call `end` after the last test of the group of files that runs now."""
    schedule = config.pluginmanager.get_plugin("schedule")
    assert isinstance(schedule, Schedule)
    schedule.ends[schedule.running].append(end)


def listed_groups() -> dict[str, str]:
    """The name of the group of each file in `groups.json`: the process that distributes tests knows no fixtures."""
    groups = json.loads(GROUPS_FILE.read_text(encoding="utf-8"))
    return {file: name for name, files in groups.items() for file in files}


class FilesAndGroups(LoadFileScheduling):
    """Gives a process all tests of a file, or of a group of files."""

    groups = listed_groups()

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return self.groups.get(file, file)


def quick_files(seconds: dict[str, float], root: Path = ROOT) -> set[str]:
    """Test files that `--quick` runs: of every folder the cheapest, up to QUICK_FOLDER_S in all, at least one.

    Args:
        seconds: by file, relative to `root`; a file without an entry takes less than MIN_RECORDED_S.
    """
    folders: dict[Path, list[str]] = defaultdict(list)
    for file in (root / "tests").rglob("test_*.py"):
        if LEFT_OUT.search(file.read_text(encoding="utf-8")):
            continue
        folders[file.parent].append(str(file.relative_to(root)))
    chosen: set[str] = set()
    for files in folders.values():
        spent = 0.0
        for name in sorted(files, key=lambda name: (seconds.get(name, 0.0), name)):
            spent += seconds.get(name, MIN_RECORDED_S / 4)
            if spent > QUICK_FOLDER_S and chosen.intersection(files):
                break
            chosen.add(name)
    return chosen


def hide_programs(patch: pytest.MonkeyPatch) -> None:
    """Let this process find neither PROGRAMS nor a compiler, as on a machine without them."""
    find = shutil.which

    def which(name: str, *options: Any, **named: Any) -> str | None:
        return None if Path(name).name in PROGRAMS else find(name, *options, **named)

    patch.setattr(shutil, "which", which)
    for variable in COMPILER_VARIABLES:
        patch.setenv(variable, HIDDEN)


class Schedule:
    """The order of test files, and the seconds that they took."""

    def __init__(self, config: pytest.Config):
        self._seconds: dict[str, float] = json.loads(FILE.read_text()) if FILE.is_file() else {}
        self._quick = quick_files(self._seconds) if config.getoption("--quick") else None
        self._records = config.getoption("--record-durations") and not hasattr(config, "workerinput")
        self._recorded: dict[str, float] = defaultdict(float)
        self.groups = listed_groups()
        self.running = ""  # group of the test that runs now
        self.ends: dict[str, list[Callable[[], None]]] = defaultdict(list)  # by group
        self._misplaced: dict[str, str] = {}  # why the tests of a file fail
        self._last: dict[str, str] = {}  # test of each group
        # Another distribution than by files may return to a group.
        self._ends_groups = getattr(config, "workerinput", {}).get("by_files", True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["by_files"] = node.config.getoption("dist") == "loadfile"

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> FilesAndGroups | None:
        return FilesAndGroups(config, log) if config.getoption("dist") == "loadfile" else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Import this process's share of the test files before collection imports all.

        pytest rewrites the assertions of a module that is imported for the first time, and caches the result. All
        processes collect in the same order: without shares, each of them rewrites every file of a fresh checkout.
        """
        process = getattr(session.config, "workerinput", None)
        if process is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
            return
        files = [
            file
            for file in sorted((ROOT / "tests").rglob("test_*.py"))
            if not self.pytest_ignore_collect(file, session.config)
        ]
        for file in files[int(process["workerid"].removeprefix("gw")) :: process["workercount"]]:
            with suppress(Exception, pytest.skip.Exception):  # collection reports errors
                import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Skip the import of files without selected tests."""
        if not collection_path.name.startswith("test_"):
            return None
        if self._quick is not None and str(collection_path.relative_to(ROOT)) not in self._quick:
            return True
        if config.option.markexpr == "alone":
            return "mark.alone" not in collection_path.read_text(encoding="utf-8") or None
        return None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for file, used in groups_of(items).items():
            if used != {self.groups.get(file)}:
                listed = f"{file} in {' or '.join(sorted(used))}, not in several"
                self._misplaced[file] = f"{GROUPS_FILE.name}: expected {listed}, got {self.groups.get(file)}"
        files = dict.fromkeys(map(file_of, items))
        totals: dict[str, float] = defaultdict(float)
        for file in files:
            totals[self.groups.get(file, file)] += self._seconds.get(file, 0.0)

        def place(item: pytest.Item) -> tuple[float, str, float]:
            file = file_of(item)
            group = self.groups.get(file, file)
            return -totals[group], group, -self._seconds.get(file, 0.0)

        items.sort(key=place)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """After the plugins that change the order."""
        self._last = {self.groups.get(file_of(item), ""): item.nodeid for item in session.items}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.running = self.groups.get(file_of(item), "")
        # An error during the collection of a process that runs tests would not be shown.
        if file_of(item) in self._misplaced:
            pytest.fail(self._misplaced[file_of(item)], pytrace=False)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        group = self.groups.get(file_of(item), "")
        is_last = nextitem is None or self._last.get(group) == item.nodeid
        if is_last and self._ends_groups:
            while self.ends[group]:
                self.ends[group].pop()()
        if nextitem is None or file_of(nextitem) != file_of(item):
            freeze_objects_left()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._recorded[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session: Any) -> None:
        if self._records:
            kept = {
                name: s for name, s in self._seconds.items() if name not in self._recorded and (ROOT / name).is_file()
            }
            kept |= {name: round(s, 1) for name, s in self._recorded.items() if s >= MIN_RECORDED_S}
            FILE.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
