"""`python -m server.cluster`: the authority of a cluster. Never imports torch.

Exit status: 0 after a stop signal; 1 if it could not start; 2 for invalid settings.
"""

import argparse
import ipaddress
import os
import sys
from pathlib import Path

from models.errors import ModelError, SettingsError
from server.cluster.service import AuthorityOptions, serve_authority
from server.dispatch.eta import EtaConfig
from server.main import addresses_in
from worker import log
from worker.config.service import load_config
from worker.key_text import WORKER_SECRET_VARIABLE
from worker.protocol.connection import listen

USAGE = 2
PORT = 22_300


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m server.cluster", description="Gives the slots of all workers to the sessions of all gateways."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file; default: config.json at the root")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDR", help="address to listen on; default: %(default)s"
    )
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", metavar="HOST:PORT,...", help="workers that are registered at the start")
    parser.add_argument("--state", type=Path, metavar="FILE", help="SQLite file that outlives the process")
    parser.add_argument(
        "--placement",
        choices=["spread", "pack"],
        default="spread",
        help="fill all workers alike, or one after another; default: %(default)s",
    )
    parser.add_argument("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        log.set_up(log.level_of(args.log_level, os.environ))
        config, _ = load_config(args.config, flags={}, environ=os.environ)
        service, secret = config.service, os.environ.pop(WORKER_SECRET_VARIABLE, None)
        if secret is None and not _is_loopback(args.host):
            expected = f"the secret of the cluster in {WORKER_SECRET_VARIABLE}, or a loopback address"
            raise SettingsError("--host", expected=expected, got=args.host)
        if args.state is not None:
            args.state.parent.mkdir(parents=True, exist_ok=True)
        options = AuthorityOptions(
            args.state,
            [] if args.workers is None else addresses_in(args.workers),
            args.placement == "pack",
            service.max_queue_size,
            config.api.transcriptions,
            EtaConfig(
                service.eta_chat_s,
                service.eta_half_duplex_s,
                service.eta_audio_duplex_s,
                service.eta_omni_duplex_s,
                service.eta_ema_alpha,
                service.eta_ema_min_samples,
            ),
            secret,
        )
        bound_socket = listen(args.host, args.port)
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    with bound_socket:
        return serve_authority(options, bound_socket)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
