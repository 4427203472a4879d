"""The launcher, with faults that can be caused in its programs: `python -m benchmarks.chaos.launched FOLDER FLAGS`.

FOLDER is that of `injected`; the flags are the launcher's own.
"""

import os
import sys
from dataclasses import replace

from launcher.__main__ import launch
from launcher.devices import find_devices, run_program
from launcher.lock import lock_folder
from launcher.managed_process import Program
from launcher.options import parser, settings
from launcher.plan import RunSecrets, make_plan
from worker import log


def main() -> int:
    folder, *flags = sys.argv[1:]
    args = parser().parse_args(flags)
    log.set_up("INFO")
    config, _ = settings(args, os.environ)
    devices = find_devices(config.model.device, os.environ, run_program)
    run_secrets = RunSecrets.make(config, args)
    plan = make_plan(config, args, devices, os.environ, os.cpu_count() or 1, run_secrets)

    def with_faults(program: Program) -> Program:
        python, option, *module = program.command
        return replace(program, command=(python, option, "benchmarks.chaos.injected", folder, *module))

    plan = replace(plan, gateway=with_faults(plan.gateway), workers=tuple(map(with_faults, plan.workers)))
    plan.folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(plan.folder):
        return launch(plan)


if __name__ == "__main__":
    sys.exit(main())
