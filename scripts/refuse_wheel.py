"""Hatchling build hook: editable installs only."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RefuseWheel(BuildHookInterface[Any]):
    """Refuses a wheel that would install `server`, `worker` and `models` as top-level packages."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """
        Args:
            version: "editable" or "standard", as hatchling names the kinds of wheels.
        Raises: RuntimeError for a standard wheel.
        """
        if version != "editable":
            raise RuntimeError("duologue: expected an editable install (pip install -e .), got a wheel build")
