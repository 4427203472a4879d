"""The installed dependencies of the server, checked without a network, and as a bill of materials in CycloneDX.

`python scripts/bill_of_materials.py [FILE]` checks that every dependency of pyproject.toml, and everything that these
need, is installed in an allowed version and states its license; FILE gets the bill. The exit status is 1 otherwise.
Extras are checked and listed with them, except what is not installed of an extra's own packages.
"""

import json
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SPECIFICATION = "1.5"


def license_of(found: Distribution) -> str:
    """The license that a distribution states; "" if it states none."""
    given = found.metadata.get("License-Expression") or (found.metadata.get("License") or "").strip().partition("\n")[0]
    named = [one for one in found.metadata.get_all("Classifier") or [] if one.startswith("License ::")]
    files = [str(one) for one in found.files or [] if "licen" in str(one).lower()]
    return given or ", ".join(one.rpartition(" :: ")[2] for one in named) or (files[0] if files else "")


def is_installed(requirement: str) -> bool:
    """Whether the distribution that a requirement names is installed, in any version."""
    try:
        distribution(Requirement(requirement).name)
    except PackageNotFoundError:
        return False
    return True


def check(requirements: list[str]) -> tuple[dict[str, Distribution], list[str]]:
    """The installed distributions that these need, by name, and what is wrong with them."""
    found: dict[str, Distribution] = {}
    wrong: list[str] = []
    seen: set[tuple[str, str]] = set()
    left = [(Requirement(one), "") for one in requirements]
    while left:
        requirement, extra = left.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            one = found.setdefault(name, distribution(name))
        except PackageNotFoundError:
            wrong.append(f"{name}: expected {requirement}, got none")
            continue
        if not requirement.specifier.contains(one.version, prereleases=True):
            wrong.append(f"{name}: expected {requirement}, got {one.version}")
        new = {("", name), *((asked, name) for asked in requirement.extras)} - seen
        seen |= new
        left += [(Requirement(text), asked) for asked, _ in new for text in one.requires or []]
    wrong += [f"{name}: expected a license, got none" for name, one in found.items() if not license_of(one)]
    return found, wrong


def bill(found: dict[str, Distribution]) -> dict[str, Any]:
    """The bill of materials."""
    components = [
        {
            "type": "library",
            "name": name,
            "version": one.version,
            "purl": f"pkg:pypi/{name}@{one.version}",
            "licenses": [{"license": {"name": license_of(one)}}],
        }
        for name, one in sorted(found.items())
    ]
    return {"bomFormat": "CycloneDX", "specVersion": SPECIFICATION, "version": 1, "components": components}


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for group in project["optional-dependencies"].values() for one in group]
    found, wrong = check([*project["dependencies"], *filter(is_installed, extras)])
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(bill(found), indent=1) + "\n")
    print(f"{len(found)} dependencies, {len(wrong)} errors")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
