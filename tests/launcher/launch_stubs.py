"""Launches a plan of stub programs as the launcher does: `python -m tests.launcher.launch_stubs PLAN.json`."""

import json
import sys
from pathlib import Path

from launcher.__main__ import launch
from launcher.devices import CPU
from launcher.lock import lock_folder
from launcher.managed_process import Program
from launcher.plan import LaunchPlan
from launcher.restart_policy import RestartPolicy

STUB = Path(__file__).with_name("stub_program.py")


def stub_program(name: str, port: int, folder: Path) -> Program:
    stem = name.replace(" ", "_")
    return Program(name, stem, (sys.executable, str(STUB), stem, str(port), str(folder)), f"http://127.0.0.1:{port}")


def main() -> int:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder, (port, *ports) = Path(settings["folder"]), settings["ports"]
    plan = LaunchPlan(
        gateway=stub_program("gateway", port, folder),
        workers=tuple(stub_program(f"worker {i}", one, folder) for i, one in enumerate(ports)),
        devices=(CPU,) * len(ports),
        host="127.0.0.1",
        port=port,
        scheme="http",
        folder=folder,
        drain_s=settings["drain_s"],
        max_worker_bytes=settings.get("max_worker_bytes"),
    )
    with lock_folder(folder):
        return launch(plan, RestartPolicy(**settings["policy"]))


if __name__ == "__main__":
    sys.exit(main())
