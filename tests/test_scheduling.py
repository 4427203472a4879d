"""Which test files `--quick` runs."""

from pathlib import Path

from tests.scheduling import QUICK_FOLDER_S, quick_files


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
