"""`python -m launcher.cluster`: starts, shows, drains and stops a cluster of gateways and workers with Ray.

Exit status: 0; 1 if workers were not ready in time, or something did not stop; 2 for invalid settings.
"""

import json
import os
import sys
from collections import Counter
from typing import Any

from launcher.cluster.options import make_plan, parser
from launcher.cluster.ray_placement import connect, find_controller, start_controller, wait_for
from launcher.plan import RunSecrets
from models.errors import ModelError, SettingsError
from worker import log
from worker.config.service import load_config

USAGE = 2


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command == "up":
            return _up(args)
        ray = connect(args.address)
        controller = find_controller(ray)
        if controller is None:
            raise SettingsError(args.command, expected="a cluster (launcher.cluster up starts it)", got="none")
        if args.command == "status":
            print(json.dumps(ray.get(controller.describe.remote()), indent=2))
            return 0
        if args.command == "drain":
            return 0 if ray.get(controller.drain.remote(args.name)) else _error(f"no worker or node {args.name}")
        return _down(ray, controller, args.wait_s)
    except ModelError as error:
        _error(str(error))
        return USAGE


def _up(args: Any) -> int:
    level = log.level_of(args.log_level, os.environ)
    log.set_up(level)
    config, notes = load_config(args.config, flags={}, environ=os.environ)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    secrets = RunSecrets.make(config, args)
    plan = make_plan(config, args, secrets)
    ray = connect(args.address)
    controller = start_controller(ray, plan, args.log_dir.absolute(), level)

    def is_ready() -> bool:
        state = ray.get(controller.describe.remote())
        ready = Counter(one["group"] for one in state["workers"] if one.get("is_ready"))
        are_enough = all(ready[group.worker.name] >= group.scaling.min_workers for group in plan.groups)
        return are_enough and all(one["address"] for one in state["gateways"])

    in_time = wait_for(is_ready, args.wait_s)
    for gateway in ray.get(controller.describe.remote())["gateways"]:
        key = "" if secrets.start_key is None else f"#{secrets.start_key}"
        address = gateway["address"] if args.remote else f"localhost:{gateway['address'].rpartition(':')[2]}"
        print(f"{gateway['name']}  http://{address}/{key}")
    if in_time:
        return 0
    expected = ", ".join(f"{group.scaling.min_workers} of {group.worker.name}" for group in plan.groups)
    return _error(f"expected these ready workers within {args.wait_s:g} s: {expected}; see `status`")


def _down(ray: Any, controller: Any, wait_s: float) -> int:
    ray.get(controller.stop.remote())
    in_time = wait_for(lambda: bool(ray.get(controller.is_stopped.remote())), wait_s)
    if in_time:
        ray.kill(controller, no_restart=True)
    return 0 if in_time else _error(f"expected all sessions to end within {wait_s:g} s; see `status`")


def _error(text: str) -> int:
    print(f"error: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
