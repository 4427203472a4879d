"""Versions: this program's, of installed packages and of the GPU driver. Torch-free."""

import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSION = "0.1.0"  # as in pyproject.toml
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
QUERY_S = 20


def package_version(name: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Version of the NVIDIA driver, such as 570.124.06; None without one.

    torch reports the CUDA version that a driver supports, but not the driver's own version.
    """
    try:
        text = DRIVER_FILE.read_text().partition("\n")[0]
    except OSError:
        text = _query_driver()
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else None


def _query_driver() -> str:
    try:
        done = subprocess.run(DRIVER_QUERY, capture_output=True, text=True, timeout=QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0]
