"""The requirements of an image, one a line, from `pyproject.toml`: `python3 deploy/requirements.py [EXTRA ...]`.

With `--gateway`, those of a gateway alone, which never imports torch: without torch and the packages of models.
"""

import re
import sys
import tomllib
from pathlib import Path

# Packages that only workers and their tools import.
OF_MODELS = {"torch", "safetensors", "tokenizers", "transformers", "tqdm"}
# Its wheel contains the detector's network, which the gateway reads as a file; its own requirements include torch.
WITHOUT_REQUIREMENTS = {"silero-vad"}
NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements(project: dict, extras: list[str], *, gateway: bool = False, bare: bool = False) -> list[str]:
    """The requirements of an image.

    Args:
        project: the table `project` of `pyproject.toml`.
        extras: names of optional dependencies to include.
        gateway: only those of a gateway.
        bare: those of a gateway that are installed without their own requirements, and no others.
    """
    wanted = [*project["dependencies"], *(one for name in extras for one in project["optional-dependencies"][name])]
    names = {one: NAME.match(one)[0].lower() for one in wanted}
    if bare:
        return [one for one in wanted if names[one] in WITHOUT_REQUIREMENTS]
    if gateway:
        return [one for one in wanted if names[one] not in OF_MODELS | WITHOUT_REQUIREMENTS]
    return wanted


if __name__ == "__main__":
    flags = {one for one in sys.argv[1:] if one.startswith("--")}
    if unknown := flags - {"--gateway", "--bare"}:
        sys.exit(f"error: expected --gateway, --bare and names of extras, got {' '.join(sorted(unknown))}")
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = [one for one in sys.argv[1:] if one not in flags]
    print(*requirements(pyproject["project"], extras, gateway="--gateway" in flags, bare="--bare" in flags), sep="\n")
