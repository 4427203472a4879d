"""Runs `schema_requests.py` in a process of its own.

Importing its generator and making the cases takes seconds, which would delay every test process that collects them.
"""

import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).with_name("schema_requests.py")


def test_responses_match_schema(root: Path) -> None:
    flags = ("-q", "-p", "no:cacheprovider", "--noconftest", "--override-ini=addopts=")  # those switch its plugin off
    command = [sys.executable, "-m", "pytest", *flags, str(FILE)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and " passed" in done.stdout, f"expected passed tests, got:\n{done.stdout}"
