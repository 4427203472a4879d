"""What the gateway, the clients and the launcher may import, and that torch stays out of all of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_architecture import imported

ROOMS = ("server", "clients", "launcher")
# The contract: messages, settings and words. Nothing else of the worker, and of the model no more than its words.
WORKER = {
    *("protocol", "message", "wire", "error_codes"),
    *("service_config", "config_layers", "settings", "config", "compile_config"),
    *("log", "version", "status", "connection"),
}
MORE = {"server": set(), "clients": {"media"}, "launcher": {"doctor"}}
MODELS = {"errors", "audio_sizes"}
FOREIGN = {"torch", "triton", "transformers", "tests", "benchmarks", "assets"}


def room_files(root: Path, room: str) -> list[Path]:
    return sorted((root / room).rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_package_is_empty(root: Path, room: str) -> None:
    found = [file for file in room_files(root, room) if file.name == "__init__.py"]
    assert found and not any(file.read_text().strip() for file in found), f"{room}: expected empty __init__.py files"


@pytest.mark.parametrize("room", ROOMS)
def test_only_the_contract_is_known(root: Path, room: str) -> None:
    others = {*ROOMS, *FOREIGN} - {room}
    for file in room_files(root, room):
        names = imported(file)
        got = {name.partition(".")[0] for name in names} & others
        assert not got, f"{file}: expected none of {sorted(others)}, got {sorted(got)}"
        for package, allowed in (("worker", WORKER | MORE[room]), ("models", MODELS)):
            got = {name.split(".")[1] for name in names if name.startswith(f"{package}.")} - allowed
            assert not got, f"{file}: expected of {package} only {sorted(allowed)}, got {sorted(got)}"


@pytest.mark.parametrize("room", ROOMS)
def test_torch_stays_unloaded(root: Path, room: str) -> None:
    modules = [".".join(file.relative_to(root).with_suffix("").parts) for file in room_files(root, room)]
    modules = [name for name in modules if not name.endswith("__init__") and "static" not in name]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{room}: expected torch unloaded, got {done.stderr or 'it loaded'}"


@pytest.mark.parametrize("room", ROOMS)
def test_no_cycles(root: Path, room: str) -> None:
    known = {".".join(file.relative_to(root).with_suffix("").parts): file for file in room_files(root, room)}
    arrows = {name: imported(file) & known.keys() for name, file in known.items()}

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"expected no cycle, got {' -> '.join((*path, name))}"
        for target in sorted(arrows[name]):
            walk(target, (*path, name))

    for name in sorted(known):
        walk(name, ())


@pytest.mark.parametrize("room", ROOMS)
def test_files_stay_small(root: Path, room: str) -> None:
    long = {file.name: n for file in room_files(root, room) if (n := len(file.read_text().splitlines())) > 400}
    assert not long, f"expected at most 400 lines, got {long}"
