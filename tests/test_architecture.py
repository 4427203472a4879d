"""Who may import whom, and what stays free of torch."""

import ast
from pathlib import Path

import pytest

from tests.torch_free import assert_torch_free

PARTS = {"vpm", "resampler", "apm", "llm", "tts"}
# Concurrency, sockets, processes and HTTP belong to the worker and the server.
FOREIGN = {
    *("asyncio", "threading", "multiprocessing", "concurrent", "socket", "ssl", "http", "urllib", "subprocess"),
    *("fastapi", "starlette", "uvicorn", "websockets", "aiohttp", "httpx", "requests", "transformers"),
    *("worker", "server", "tests", "benchmarks", "assets"),
}
TORCH_FREE = ("errors", "config", "tokens", "messages", "prompts", "sampling_settings", "image", "positions")


def imported(file: Path) -> set[str]:
    """Dotted names of everything a file imports, `from a.b import c` as both a.b and a.b.c."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: expected an absolute import, got a relative one"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def model_files(root: Path) -> list[Path]:
    files = sorted((root / "models").rglob("*.py"))
    assert len(files) > 10
    return files


def test_models_know_no_outside_world(root: Path) -> None:
    for file in model_files(root):
        got = {name.partition(".")[0] for name in imported(file)} & FOREIGN
        assert not got, f"{file.name}: expected none of these imports, got {sorted(got)}"


def test_models_read_no_environment(root: Path) -> None:
    for file in model_files(root):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}:
                pytest.fail(f"{file.name}:{node.lineno}: expected no use of the environment, got .{node.attr}")
        assert not imported(file) & {"os.environ", "os.getenv"}, file.name


def test_parts_do_not_import_each_other(root: Path) -> None:
    parts = {f"models.{part}" for part in PARTS}
    for part in sorted(PARTS):
        got = imported(root / "models" / f"{part}.py") & (parts | {"models.omni", "models.load", "models.stages.state"})
        assert not got, f"{part}: expected no other part, got {sorted(got)}"


def test_the_vocoder_knows_no_other_part(root: Path) -> None:
    """Of the rest of the room it may use what is common: errors, sound, file formats, regions, tensors into modules."""
    common = {"audio", "checkpoint", "compiler", "errors", "graphs", "input_block", "kernels", "kernels_choice"}
    common |= {"layers", "rotary", "streams", "weights"}
    for file in sorted((root / "models" / "token2wav").glob("*.py")):
        outside = {name.split(".")[1] for name in imported(file) if name.startswith("models.")} - {"token2wav"}
        assert outside <= common, f"{file.name}: expected only {sorted(common)}, got {sorted(outside - common)}"


def test_no_cycles(root: Path) -> None:
    known = {".".join(file.relative_to(root).with_suffix("").parts): file for file in model_files(root)}
    arrows = {name: imported(file) & known.keys() for name, file in known.items()}

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"expected no cycle, got {' -> '.join((*path, name))}"
        for target in sorted(arrows[name]):
            walk(target, (*path, name))

    for name in sorted(known):
        walk(name, ())


def test_packages_are_empty(root: Path) -> None:
    for package in ("models", "tests"):
        for file in sorted((root / package).rglob("__init__.py")):
            assert not file.read_text().strip(), f"{file}: expected an empty file"


def test_torch_stays_unloaded(root: Path) -> None:
    assert_torch_free(root, [f"models.{module}" for module in TORCH_FREE])
