"""How the project installs: editable, with console scripts, and never as a wheel with top-level packages."""

import json
import runpy
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from importlib.metadata import version
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


def test_bill_of_materials_has_dependencies_and_installed_extras(root: Path, tmp_path: Path) -> None:
    """Also an extra of a dependency, and what that needs in turn; missing and wrong packages are named."""
    script, file = root / "scripts/bill_of_materials.py", tmp_path / "sbom.json"
    done = subprocess.run([sys.executable, str(script), str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bill = json.loads(file.read_text())
    versions = {one["name"]: one["version"] for one in bill["components"]}
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert all(one["licenses"][0]["license"]["name"] for one in bill["components"])
    installed = {"fastapi", "starlette", "pytest", "pluggy"}  # a dependency, an extra, and what each needs
    assert {name: version(name) for name in installed} == {name: versions.get(name) for name in installed}
    module = runpy.run_path(str(script))
    _, wrong = module["check"](["pytest<1", "no-such-package", "coverage; python_version < '3'"])
    assert [line.partition(", got")[0] for line in sorted(wrong)] == [
        "no-such-package: expected no-such-package",
        "pytest: expected pytest<1",
    ]


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
