"""Finds the modules that load torch, in one new process."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# A forked child imports each module on top of the torch-free modules before it. The parent then imports a torch-free
# module too, so that the next child starts with it loaded.
PROGRAM = """
import importlib, json, os, sys, traceback
assert "torch" not in sys.modules
wrong = {}
for name in sys.argv[1:]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
            problem = "torch loaded" if "torch" in sys.modules else ""
        except BaseException:
            problem = traceback.format_exc()
        os.write(writer, problem[-4000:].encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        problem = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if status or problem:
        wrong[name] = problem or f"wait status {status}"
    else:
        importlib.import_module(name)
print(json.dumps(wrong))
"""


def assert_torch_free(root: Path, modules: Iterable[str]) -> None:
    """Assert that importing any of `modules` leaves torch unloaded. The failure names all that load it."""
    command = [sys.executable, "-c", PROGRAM, *modules]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"expected a list of modules, got status {done.returncode}: {done.stderr}"
    wrong = json.loads(done.stdout)
    assert not wrong, "expected torch unloaded, got " + "; ".join(f"{name}: {why}" for name, why in wrong.items())
