"""Command line of `python -m launcher.cluster`, and the plan that follows from it. Starts nothing."""

import argparse
import sys
from pathlib import Path

from launcher.cluster.controller import AUTHORITY_MARK
from launcher.cluster.group_options import KEYS, GroupOptions, groups_of
from launcher.cluster.kernels import read_archives
from launcher.cluster.members import ClusterPlan, GroupPlan
from launcher.cluster.program_host import HOST_MARK, PORT_MARK, ProgramSpec
from launcher.cluster.scaling import ScalingPolicy
from launcher.plan import LOW_PRIORITY, RunSecrets
from worker.config.service import ROOT, Config
from worker.key_text import WORKER_SECRET_HEADER

AUTHORITY_PORT = 22_300
STATE_FILE = "authority.sqlite"  # below `service.data_dir`


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launcher.cluster", description="Runs a cluster with Ray.")
    parser.add_argument("--address", default="auto", help="address of the Ray cluster; default: this machine's")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the authority, the gateways and the workers")
    up.add_argument("--config", type=Path, metavar="FILE", help="settings file, at the same path on each node")
    up.add_argument("--gateways", type=_count, default=1, metavar="N", help="gateways; default: 1")
    up.add_argument("--min-workers", type=_count, default=1, metavar="N", help="fewest workers; default: 1")
    up.add_argument("--max-workers", type=_count, metavar="N", help="most workers; default: --min-workers")
    up.add_argument("--gpus-per-worker", type=float, default=1, metavar="N", help="default: 1; 0: on the CPU")
    up.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="NAME",
        help="Ray resource of which a worker takes one; repeatable",
    )
    up.add_argument(
        "--group",
        action="append",
        nargs="+",
        default=[],
        metavar=("NAME", "KEY=VALUE"),
        help=f"workers of one kind, with their own {KEYS}; repeatable; default: one group, worker",
    )
    up.add_argument(
        "--idle-s",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds of less need before a worker is removed; default: 60",
    )
    up.add_argument(
        "--placement", choices=["spread", "pack"], default="spread", help="of sessions on workers; default: spread"
    )
    up.add_argument("--authority-port", type=int, default=AUTHORITY_PORT, metavar="N", help="default: %(default)s")
    up.add_argument("--remote", action="store_true", help="gateways listen on all addresses; default: loopback")
    up.add_argument("--insecure", action="store_true", help="with --remote: no key is needed, if none is configured")
    up.add_argument("--model-path", metavar="DIR", help="checkpoint, at the same path on each node, or a hub id")
    up.add_argument("--max-sessions", type=_count, metavar="N", help="slots of a worker; default: as many as fit")
    up.add_argument("--no-compile", action="store_true", help="workers do not compile the model")
    up.add_argument(
        "--push-kernels", action="store_true", help="copy this machine's archives of compiled kernels to all nodes"
    )
    up.add_argument("--log-dir", type=Path, default=ROOT / "tmp" / "cluster", metavar="DIR", help="logs of each node")
    up.add_argument(
        "--wait-s", type=float, default=600.0, metavar="S", help="seconds for the first workers; default: 600"
    )
    up.add_argument("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR")
    commands.add_parser("status", help="print the state of all programs as JSON")
    drain = commands.add_parser("drain", help="drain a worker, or all workers of a node, and remove them")
    drain.add_argument("name", help="name of a worker or id of a node, as in `status`")
    down = commands.add_parser("down", help="end all sessions and stop all programs")
    down.add_argument(
        "--wait-s", type=float, default=600.0, metavar="S", help="seconds for sessions to end; default: 600"
    )
    return parser


def make_plan(config: Config, args: argparse.Namespace, secrets: RunSecrets) -> ClusterPlan:
    """What `up` starts. secrets: of this cluster. Raises: SettingsError."""
    groups = groups_of(args)
    python, service = sys.executable, config.service
    shared = () if args.config is None else ("--config", str(args.config.absolute()))
    level = () if args.log_level is None else ("--log-level", args.log_level)
    authority = (
        *(python, "-m", "server.cluster", "--host", HOST_MARK, "--port", PORT_MARK, *shared, *level),
        *("--state", str(service.data_dir / STATE_FILE), "--placement", args.placement),
    )
    host = "0.0.0.0" if args.remote else "127.0.0.1"  # noqa: S104 - only with --remote
    gateway = (
        *(python, "-m", "server.main", *shared, *level, "--host", host, "--port", PORT_MARK),
        *("--log-dir", str(args.log_dir.absolute()), "--authority", AUTHORITY_MARK),
        *(("--remote",) if args.remote else ()),
        *(("--insecure",) if args.insecure else ()),
    )
    environ = tuple(secrets.worker_environ.items())

    def worker(group: GroupOptions) -> ProgramSpec:
        command = (
            *(python, "-m", "worker.main", *shared, *level, "--host", HOST_MARK, "--port", PORT_MARK),
            *(() if group.model_path is None else ("--model-path", group.model_path)),
            *(() if group.max_sessions is None else ("--max-sessions", str(group.max_sessions))),
            *(("--no-compile",) if args.no_compile else ()),
            LOW_PRIORITY,
        )
        return ProgramSpec(
            "worker",
            group.name,
            command,
            (*environ, *group.environ),
            n_gpus=group.n_gpus,
            resources=tuple((name, 1.0) for name in group.resources),
            cache_dir=service.cache_dir,
        )

    return ClusterPlan(
        ProgramSpec("authority", "authority", authority, environ, args.authority_port),
        tuple(
            ProgramSpec(
                "gateway",
                f"gateway-{index}",
                (*gateway, "--gateway-name", f"gateway-{index}"),
                tuple(secrets.gateway_environ.items()),
                service.gateway_port + index,
            )
            for index in range(args.gateways)
        ),
        tuple(GroupPlan(worker(one), ScalingPolicy(one.n_min, one.n_max, idle_s=args.idle_s)) for one in groups),
        {WORKER_SECRET_HEADER: secrets.worker_secret or ""},
        read_archives(service.cache_dir) if args.push_kernels else {},
    )


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number
