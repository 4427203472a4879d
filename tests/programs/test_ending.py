"""A process of the tests ends with its exit functions, and without clearing its modules."""

import subprocess
import sys
from pathlib import Path

from tests.programs.start import ROOT


def test_a_process_ends_after_its_exit_functions_and_clears_nothing() -> None:
    program = """
import atexit, tempfile
from tests.programs.ending import end_without_clearing
class Left:
    def __del__(self): print("cleared")
left = Left()
end_without_clearing()
folder = tempfile.TemporaryDirectory()
atexit.register(print, "exit function")
print(folder.name)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    folder, *others = done.stdout.splitlines()
    assert (done.returncode, others) == (0, ["exit function"]), done
    assert not Path(folder).exists(), "expected a removed folder"
