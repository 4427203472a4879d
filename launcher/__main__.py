"""`python -m launcher`: runs the gateway and the workers of this machine until Ctrl-C.

The order is: settings, devices, launch plan, preflight checks, supervisor. Exit status: 0 after a requested stop; 1 if
something cannot be kept running; 2 if nothing was started; 130 if interrupted before anything was started.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from launcher.devices import cpu_fallback_note, find_devices, run_program
from launcher.leftovers import end_leftovers
from launcher.lock import FolderLockedError, lock_folder, remove_stale_pid_files
from launcher.options import parser, settings
from launcher.plan import LaunchPlan, RunSecrets, make_plan
from launcher.preflight import folder_problems, run_preflight
from launcher.progress import StatusDisplay
from launcher.restart_policy import RestartPolicy
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
        if note := cpu_fallback_note(config.model.device, os.environ, devices, run_program):
            notes.append(note)
        run_secrets = RunSecrets.make(config, args)
        plan = make_plan(config, args, devices, os.environ, os.cpu_count() or 1, run_secrets)
        if errors := folder_problems(plan.folder):
            return _print_errors(errors)
        with lock_folder(plan.folder):
            end_leftovers(plan.folder, plan.drain_s + RestartPolicy().grace_s, _print_note)
            found = run_preflight(plan, config, os.environ)
            for note in (*notes, *found.notes):
                print(f"note: {note}", file=sys.stderr)
            if found.errors:
                return _print_errors(found.errors)
            return launch(plan)
    except ModelError as error:
        return _print_errors([str(error)])
    except FolderLockedError as other:
        remedy = f"stop it (kill {other.pid or 'its process'}), or choose another folder with --log-dir"
        return _print_errors([f"another start_all.sh (pid {other.pid}) uses {plan.folder}; {remedy}"])
    except OSError as error:  # files of another user in the log folder
        return _print_errors([f"{error}; choose another folder with --log-dir"])
    except KeyboardInterrupt:
        return INTERRUPTED


def launch(plan: LaunchPlan, policy: RestartPolicy | None = None) -> int:
    """Run a plan until a stop signal or a failure. Returns: the exit status."""
    remove_stale_pid_files(plan.folder)
    # The parent process may ignore SIGCHLD; an ignored signal is inherited, also by the processes started here.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # sys.stdout is None if the launcher was started without a standard output.
    stream = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - stays open as long as the program runs

    async def run() -> tuple[int, str]:
        with StatusDisplay(stream) as display:
            supervisor = Supervisor(plan, display, policy)
            return await supervisor.run(), supervisor.failure

    status, failure = asyncio.run(run())
    if failure:
        print(f"error: {failure}", file=sys.stderr)
    return status


def _print_note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_errors(errors: Sequence[str]) -> int:
    for error in errors:
        print(f"error: {' '.join(error.split())}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
