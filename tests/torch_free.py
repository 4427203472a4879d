"""Finds the modules that load torch, in one new process."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# A forked child imports all modules. If one of them fails or loads torch, each is tried by itself: a forked child
# imports it on top of the torch-free modules before it, and the parent imports a torch-free module too, so that the
# next child starts with it loaded.
PROGRAM = """
import importlib, json, os, sys, traceback
assert "torch" not in sys.modules

def problem_of(names):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            for name in names:
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
    return problem or (f"wait status {status}" if status else "")

wrong, names = {}, sys.argv[1:]
for name in names if problem_of(names) else []:
    problem = problem_of([name])
    if problem:
        wrong[name] = problem
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
