"""Checks the manifests on the standard input against published schemas: `scripts/check_manifests.sh` runs it.

Exit status: 1 if a manifest does not fit. One line for each manifest.
"""

import importlib
import sys
from typing import Any

import kubernetes_validate
import yaml

VERSIONS = ("1.29", "1.34")  # of Kubernetes: the oldest and the newest that are checked
MODELS = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}


def check(manifest: dict[str, Any]) -> str:
    """What it was checked against. Raises: an exception of the schema's library, ValueError."""
    module = MODELS.get(manifest["apiVersion"])
    if module is None:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
        return f"Kubernetes {' and '.join(VERSIONS)}"
    model = getattr(importlib.import_module(module), manifest["kind"])
    read = model.model_validate(manifest).model_dump(by_alias=True, exclude_unset=True, mode="json")
    if dropped := sorted(_dropped(manifest, read)):
        raise ValueError(f"expected fields of {manifest['kind']}, got {', '.join(dropped)}")
    return module.removeprefix("cloudcoil.models.")


def _dropped(given: Any, read: Any, path: str = "") -> set[str]:
    """Paths of the fields that a model does not have, and therefore leaves out."""
    if isinstance(given, dict):
        if not isinstance(read, dict):
            return {path}
        found = {f"{path}.{key}" for key in given.keys() - read.keys()}
        return found.union(*(_dropped(given[key], read[key], f"{path}.{key}") for key in given.keys() & read.keys()))
    if isinstance(given, list) and isinstance(read, list):
        return set().union(*(_dropped(one, other, path) for one, other in zip(given, read, strict=True)))
    return set()


def main() -> int:
    status = 0
    for manifest in yaml.safe_load_all(sys.stdin):
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        try:
            print(f"{name}: {check(manifest)}")
        except Exception as error:  # each library has its own
            status = 1
            print(f"{name}: {' '.join(str(getattr(error, 'message', error)).split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
