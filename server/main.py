"""`python -m server.main`: the gateway's command line and exit status. Never imports torch.

Exit status: 0 after a drain; 1 if it could not start; 2 for invalid settings.
"""

import argparse
import ipaddress
import logging
import os
import platform
import re
import ssl
import sys
from pathlib import Path

from models.errors import ModelError, SettingsError
from server.access.keys import api_keys_of
from server.cluster.peer_tls import peer_tls
from server.dispatch.workers import WorkerAddress
from server.registry.presets import FOLDER, Presets
from server.serving import ServeOptions, Tls, check_tls, serve
from server.tracing import spans_of
from worker import log
from worker.config.service import ROOT, Config, load_config
from worker.key_text import START_KEY_VARIABLE, WORKER_SECRET_VARIABLE, new_key
from worker.protocol.connection import listen

LOG = logging.getLogger("server.main")
USAGE = 2
MAX_WORKERS = 1024
MAX_PORT = 65_535
HOST, PORT = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]"), re.compile(r"[0-9]{1,5}")
FLAGS = {
    "port": "service.gateway_port",
    "max_queue_size": "service.max_queue_size",
    "ssl_certfile": "service.ssl_certfile",
    "ssl_keyfile": "service.ssl_keyfile",
    "drain_timeout": "service.drain_timeout_s",
}
CERTIFICATE_HELP = (
    "a certificate and its key in service.ssl_certfile and service.ssl_keyfile (or --ssl-certfile, --ssl-keyfile), "
    "such as from: openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=localhost "
    "-keyout key.pem -out cert.pem"
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m server.main", description="The gateway between clients and workers."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file; default: config.json at the root")
    parser.add_argument("--host", metavar="ADDR", help="address to listen on; default: a loopback address")
    parser.add_argument(
        "--remote", action="store_true", help="allow other machines; without --host, listen on all addresses"
    )
    parser.add_argument("--insecure", action="store_true", help="with --remote: ask for no key although there is none")
    parser.add_argument("--port", type=int, metavar="N", help="default: service.gateway_port")
    workers = parser.add_mutually_exclusive_group()
    workers.add_argument("--workers", metavar="HOST:PORT,...", help="addresses of the workers")
    workers.add_argument("--num-workers", type=int, metavar="N", help="number of workers on this machine; default: 1")
    workers.add_argument(
        "--authority", metavar="HOST:PORT", help="authority of a cluster, which names the workers (docs/cluster.md)"
    )
    parser.add_argument(
        "--gateway-name", metavar="NAME", help="with --authority: unlike that of other gateways; default: HOST:PORT"
    )
    scheme = parser.add_mutually_exclusive_group()
    scheme.add_argument("--https", action="store_true", help="use TLS; default if a certificate is configured")
    scheme.add_argument("--http", action="store_true", help="use plain HTTP; default without a certificate")
    parser.add_argument("--ssl-certfile", metavar="FILE", help="TLS certificate")
    parser.add_argument("--ssl-keyfile", metavar="FILE", help="private key of the certificate")
    parser.add_argument("--max-queue-size", type=int, metavar="N", help="maximum number of waiting clients")
    parser.add_argument("--timeout", type=_replaced_timeout, help=argparse.SUPPRESS)
    parser.add_argument(
        "--drain-timeout", type=float, metavar="S", help="seconds that sessions have to end after a stop signal"
    )
    parser.add_argument("--lang", choices=["zh", "en"], help="default language of the pages")
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=ROOT / "tmp",
        metavar="DIR",
        help="folder for diagnostics from clients; default: tmp",
    )
    parser.add_argument("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR")
    return parser


def _replaced_timeout(text: str) -> None:
    """Refuse a flag of the public implementation: its limit for a kind of request that this gateway does not send."""
    raise argparse.ArgumentTypeError(f"expected service.worker_timeout_s in the settings, got --timeout {text}")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        log.set_up(log.level_of(args.log_level, os.environ))
        flags = {key: getattr(args, name) for name, key in FLAGS.items()}
        config, notes = load_config(args.config, flags=flags, environ=os.environ)
        addresses = [] if args.authority else worker_addresses(args, config)
        authority = None if args.authority is None else addresses_in(args.authority)[0]
        tls = certificate(config, https=args.https, http=args.http)
        certfile = None if tls is None else tls.certfile
        trusted = None if authority is None else peer_tls(certfile, config.service.ssl_cafile)
        Presets.load()
        start_key = os.environ.pop(START_KEY_VARIABLE, None)
        is_made = args.remote and not args.insecure and not api_keys_of(config, start_key).required
        if is_made:
            start_key = new_key()
        bound_socket = listen(_host(args.host, remote=args.remote), config.service.gateway_port)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    for note in notes:
        LOG.warning("%s", note)
    if is_made and start_key is not None:
        name, scheme = _link_host(args.host), "http" if tls is None else "https"
        print(f"open {scheme}://{name}:{config.service.gateway_port}/#{start_key}", flush=True)
    elif args.remote and not api_keys_of(config, start_key).required:
        LOG.warning("--insecure: everyone who can reach this port can use the model; there are no keys")
    options = ServeOptions(
        addresses,
        args.log_dir,
        tls=tls,
        preset_folder=FOLDER,
        default_lang=args.lang,
        start_key=start_key,
        worker_secret=os.environ.pop(WORKER_SECRET_VARIABLE, None),
        spans=spans_of(os.environ),
        authority=None if authority is None else f"ws://{authority}",
        gateway_name=args.gateway_name or f"{platform.node()}:{config.service.gateway_port}",
        peer_tls=trusted,
    )
    with bound_socket:
        return serve(config, bound_socket, options)


def worker_addresses(args: argparse.Namespace, config: Config) -> list[WorkerAddress]:
    """The addresses from --workers or --num-workers. Raises: SettingsError."""
    if args.workers is None:
        n = 1 if args.num_workers is None else args.num_workers
        max_workers = min(MAX_WORKERS, MAX_PORT + 1 - config.service.worker_base_port)
        if not 1 <= n <= max_workers:
            raise SettingsError("--num-workers", expected=f"1 to {max_workers}", got=n)
        return [WorkerAddress("127.0.0.1", config.service.worker_base_port + index) for index in range(n)]
    return addresses_in(args.workers)


def addresses_in(given: str) -> list[WorkerAddress]:
    """The addresses in a list with commas. Raises: SettingsError."""
    addresses = []
    for text in given.split(","):
        host, _, port = text.strip().rpartition(":")
        if not HOST.fullmatch(host) or not PORT.fullmatch(port) or not 1 <= int(port) <= MAX_PORT:
            raise SettingsError("--workers", expected="HOST:PORT, or several separated by commas", got=repr(text))
        addresses.append(WorkerAddress(host, int(port)))
    if len(set(addresses)) < len(addresses):
        raise SettingsError("--workers", expected="each address once", got=given)
    return addresses


def certificate(config: Config, *, https: bool, http: bool) -> Tls | None:
    """The configured certificate; None for plain HTTP. Raises: SettingsError."""
    service = config.service
    if http or (service.ssl_certfile is None and not https):
        return None
    if service.ssl_certfile is None or service.ssl_keyfile is None:
        raise SettingsError("--https", expected=CERTIFICATE_HELP, got="none")
    tls = Tls(service.ssl_certfile, service.ssl_keyfile)
    try:
        check_tls(tls)
    except ssl.SSLError as error:
        raise SettingsError("certificate", expected="a certificate and its own key", got=error.reason) from None
    except OSError as error:
        files = f"{tls.certfile}, {tls.keyfile}"
        raise SettingsError("certificate", expected=f"readable files {files}", got=error.strerror) from None
    return tls


def _host(given: str | None, *, remote: bool) -> str:
    """The address to listen on. Raises: SettingsError for one that other machines reach, without --remote."""
    if given is None:
        return "0.0.0.0" if remote else "127.0.0.1"  # noqa: S104
    try:
        is_loopback = given == "localhost" or ipaddress.ip_address(given).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not remote:
        raise SettingsError("--host", expected="a loopback address, or --remote as well", got=given)
    return given


def _link_host(given: str | None) -> str:
    """The host name in a link to this server."""
    if given is None or given in ("0.0.0.0", "::"):  # noqa: S104
        return "localhost"
    return f"[{given}]" if ":" in given else given


if __name__ == "__main__":
    sys.exit(main())
