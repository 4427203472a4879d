"""Runs a plan of stubs as the launcher does: `python -m tests.launcher.run_plan PLAN.json`."""

import json
import sys
from pathlib import Path

from launcher.__main__ import launch
from launcher.devices import CPU
from launcher.lock import held
from launcher.managed_process import Program
from launcher.plan import LaunchPlan
from launcher.restart_policy import Policy

STUB = Path(__file__).with_name("stub.py")


def program(name: str, port: int, folder: Path) -> Program:
    stem = name.replace(" ", "_")
    return Program(name, stem, (sys.executable, str(STUB), stem, str(port), str(folder)), f"http://127.0.0.1:{port}")


def main() -> int:
    told = json.loads(Path(sys.argv[1]).read_text())
    folder, (port, *ports) = Path(told["folder"]), told["ports"]
    plan = LaunchPlan(
        gateway=program("gateway", port, folder),
        workers=tuple(program(f"worker {i}", one, folder) for i, one in enumerate(ports)),
        devices=(CPU,) * len(ports),
        host="127.0.0.1",
        port=port,
        scheme="http",
        folder=folder,
        drain_s=told["drain_s"],
    )
    with held(folder):
        return launch(plan, Policy(**told["policy"]))


if __name__ == "__main__":
    sys.exit(main())
