"""`python -m launcher`: the gateway and the workers of this machine, from flags to exit status.

Settings, devices, a plan, a look at what would go wrong; then everything runs until Ctrl-C. Exit status: 0 after a
wanted stop; 1 if something cannot be kept running; 2 if nothing was started; 130 if interrupted before anything was.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from launcher.devices import find_devices, oddity, run_program
from launcher.lock import Taken, held, remove_stale
from launcher.options import parser, settings
from launcher.plan import LaunchPlan, make_plan
from launcher.preflight import folder_problems, look
from launcher.progress import Board
from launcher.restart_policy import Policy
from launcher.supervise import Supervisor
from models.errors import ModelError
from worker import log

USAGE, INTERRUPTED = 2, 130


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        log.set_up(log.level_of(args.log_level, os.environ))
        config, notes = settings(args, os.environ)
        devices = find_devices(config.model.device, os.environ, run_program)
        if odd := oddity(config.model.device, os.environ, devices, run_program):
            notes.append(odd)
        plan = make_plan(config, args, devices, os.environ, os.cpu_count() or 1)
        if errors := folder_problems(plan.folder):
            return _refused(errors)
        with held(plan.folder):
            found = look(plan, config, os.environ)
            for note in (*notes, *found.notes):
                print(f"note: {note}", file=sys.stderr)
            if found.errors:
                return _refused(found.errors)
            return launch(plan)
    except ModelError as error:
        return _refused([str(error)])
    except Taken as other:
        remedy = f"stop it (kill {other.pid or 'its process'}), or choose another folder with --log-dir"
        return _refused([f"another start_all.sh (pid {other.pid}) uses {plan.folder}; {remedy}"])
    except OSError as error:  # files of somebody else in the log folder
        return _refused([f"{error}; choose another folder with --log-dir"])
    except KeyboardInterrupt:
        return INTERRUPTED


def launch(plan: LaunchPlan, policy: Policy | None = None) -> int:
    """Run a plan until it is told to stop. Returns: the exit status."""
    remove_stale(plan.folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started this may have it ignored, and its children with it
    screen = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - as long as the program; started without a stdout

    async def run() -> tuple[int, str]:
        supervisor = Supervisor(plan, Board(screen), policy)
        return await supervisor.run(), supervisor.failure

    status, failure = asyncio.run(run())
    if failure:
        print(f"error: {failure}", file=sys.stderr)
    return status


def _refused(errors: Sequence[str]) -> int:
    for error in errors:
        print(f"error: {' '.join(error.split())}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
