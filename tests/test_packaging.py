"""How the project installs: editable, with console scripts, and never as a wheel with top-level packages."""

import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

BUILD = "import sys; from hatchling.build import {hook}; print({hook}(sys.argv[1]))"


def build(root: Path, hook: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = BUILD.format(hook=hook)
    return subprocess.run([sys.executable, "-c", code, str(folder)], cwd=root, capture_output=True, text=True)


def test_editable_install_puts_the_checkout_on_the_path(root: Path, tmp_path: Path) -> None:
    built = build(root, "build_editable", tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert archive.read(path).decode().split() == [str(root)]


def test_refuses_a_wheel(root: Path, tmp_path: Path) -> None:
    built = build(root, "build_wheel", tmp_path)
    assert built.returncode != 0 and "expected an editable install" in built.stderr, built.stderr[-500:]
    assert not list(tmp_path.glob("*.whl"))


def test_console_scripts_name_functions(root: Path) -> None:
    found = scripts(root)
    assert {"duologue", "duologue-gateway", "duologue-worker", "duologue-talk"} <= found.keys()
    for name, target in found.items():
        module, _, function = target.partition(":")
        assert callable(getattr(import_module(module), function, None)), f"{name}: expected a function, got {target}"


def scripts(root: Path) -> dict[str, str]:
    with (root / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["scripts"]
