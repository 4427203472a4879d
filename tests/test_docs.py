"""The documentation's links and paths exist."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "training/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
SUFFIXES = (".py", ".sh", ".md", ".js", ".toml")
TOP_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}


@cache
def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def is_path(code: str) -> bool:
    """Whether text in backticks names a file or folder of the repository."""
    if not PATH.fullmatch(code) or "/" not in code:
        return False
    return code.split("/")[0] in TOP_FOLDERS and code.endswith((*SUFFIXES, "/"))


def test_pages_are_found() -> None:
    assert all(page.is_file() for page in PAGES)
    assert len(PAGES) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{page.name}: expected links that resolve, got {broken}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    missing = sorted({code for code in CODE.findall(prose(page)) if is_path(code) and not (ROOT / code).exists()})
    assert not missing, f"{page.name}: expected paths that exist, got {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_existing_modules(page: Path) -> None:
    modules = set(re.findall(r"python -m ([\w.]+)", page.read_text(encoding="utf-8")))
    ours = {module for module in modules if module.split(".")[0] in TOP_FOLDERS}
    missing = sorted(module for module in ours if not _runs(ROOT / module.replace(".", "/")))
    assert not missing, f"{page.name}: expected modules that run with python -m, got {missing}"


def _runs(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_symbols_are_in_their_files(page: Path) -> None:
    """In text such as `server/live/relay.py` (`Relay`)."""
    missing = []
    for path, symbol in re.findall(r"`([\w/]+\.py)`\s+\(`([\w.]+)`", prose(page)):
        names = symbol.split(".")
        source = (ROOT / path).read_text(encoding="utf-8")
        if not all(re.search(rf"\b{name}\b", source) for name in names):
            missing.append(f"{path} ({symbol})")
    assert not missing, f"{page.name}: expected names that their files contain, got {missing}"
