"""What is to be started, from settings, flags and devices: command lines, ports, addresses. Pure.

Knows the flags of the gateway and of workers. Does not know whether ports are free, nor how processes run.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from launcher.devices import Device
from launcher.managed_process import Program
from models.errors import SettingsError
from worker.config.service import ROOT, Config
from worker.log import LEVEL_VARIABLE

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
THREADS_VARIABLE = "OMP_NUM_THREADS"
MAX_PORT = 65_535


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that runs, and where.

    host, port: where the gateway listens. folder: of logs and pid files. devices: of the workers, in their order.
    drain_s: seconds that sessions have to end at a stop.
    """

    gateway: Program
    workers: tuple[Program, ...]
    devices: tuple[Device, ...]
    host: str
    port: int
    scheme: str
    folder: Path
    drain_s: float
    root: Path = ROOT

    @property
    def is_remote(self) -> bool:
        """Whether other machines reach it."""
        return self.host != "localhost" and not ip_address(self.host).is_loopback

    def url(self, host: str | None = None) -> str:
        """The gateway's. host: by which name; None: the one that works on this machine."""
        if host is None:
            host = "localhost" if not self.is_remote or ip_address(self.host).is_unspecified else self.host
        return f"{self.scheme}://{_in_url(host)}:{self.port}"


def make_plan(
    config: Config, args: argparse.Namespace, devices: Sequence[Device], environ: Mapping[str, str], n_cores: int
) -> LaunchPlan:
    """Raises: SettingsError for ports that do not exist or meet, an address that is none, https without certificate."""
    chosen = _chosen(devices, args.num_workers)
    host, scheme = _host(args.host, remote=args.remote), _scheme(config, args)
    ports = worker_ports(config, len(chosen))
    # Everybody reads the file and the environment; what flags say has to be said again.
    told = () if args.config is None else ("--config", str(args.config.absolute()))
    shared = {LEVEL_VARIABLE: args.log_level} if args.log_level else {}
    threads = {}
    if chosen[0].visible is None and len(chosen) > 1 and THREADS_VARIABLE not in environ:
        threads = {THREADS_VARIABLE: str(max(1, n_cores // len(chosen)))}  # or each takes all cores
    gateway_command = (
        *(sys.executable, "-m", "server.main", *told, f"--{scheme}"),
        *("--host", host, "--port", str(config.service.gateway_port)),
        *("--workers", ",".join(f"{LOOPBACK}:{port}" for port in ports)),
        *("--log-dir", str(args.log_dir.absolute())),
        *(("--remote",) if args.remote else ()),
        *(("--lang", args.lang) if args.lang else ()),
    )
    nearest = {EVERYWHERE: LOOPBACK, "::": "::1"}.get(host, host)
    workers = tuple(
        Program(
            name=f"worker {i}",
            stem=f"worker_{i}",
            command=(*_worker_command(i, device, port), *told, *_worker_flags(config, args)),
            url=f"http://{LOOPBACK}:{port}",
            environ={**shared, **threads, **device.environ},
        )
        for i, (device, port) in enumerate(zip(chosen, ports, strict=True))
    )
    return LaunchPlan(
        gateway=Program(
            name="gateway",
            stem="gateway",
            command=gateway_command,
            url=f"{scheme}://{_in_url(nearest)}:{config.service.gateway_port}",
            environ=shared,
        ),
        workers=workers,
        devices=tuple(chosen),
        host=host,
        port=config.service.gateway_port,
        scheme=scheme,
        folder=args.log_dir.absolute(),
        drain_s=config.service.drain_timeout_s,
    )


def worker_ports(config: Config, n: int) -> list[int]:
    """One for each worker. Raises: SettingsError."""
    base, gateway = config.service.worker_base_port, config.service.gateway_port
    ports = [base + i for i in range(n)]
    if ports[-1] > MAX_PORT:
        raise SettingsError(
            "service.worker_base_port", expected=f"at most {MAX_PORT + 1 - n} for {n} workers", got=base
        )
    if gateway in ports:
        expected = f"none of the workers' ports ({base} to {ports[-1]})"
        raise SettingsError("service.gateway_port", expected=expected, got=gateway)
    return ports


def _chosen(devices: Sequence[Device], asked: int | None) -> list[Device]:
    """One device for each worker: as many GPUs as are wanted, or the CPU as often as is wanted."""
    if devices[0].visible is None:
        return [devices[0]] * (asked or 1)
    return list(devices[:asked])


def _host(given: str | None, *, remote: bool) -> str:
    if given is None:
        return EVERYWHERE if remote else LOOPBACK
    try:
        is_here = given == "localhost" or ip_address(given).is_loopback
    except ValueError:
        raise SettingsError("--host", expected="an IP address of this machine", got=repr(given)) from None
    if not is_here and not remote:
        raise SettingsError("--host", expected="an address of this machine alone, or --remote beside it", got=given)
    return given


def _scheme(config: Config, args: argparse.Namespace) -> str:
    has_certificate = config.service.ssl_certfile is not None
    if args.https and not has_certificate:
        expected = "service.ssl_certfile and service.ssl_keyfile in the settings"
        raise SettingsError("--https", expected=expected, got="neither")
    return "https" if has_certificate and not args.http else "http"


def _worker_command(index: int, device: Device, port: int) -> tuple[str, ...]:
    number = index if device.number is None else device.number
    command = (sys.executable, "-m", "worker.main", "--worker-index", str(index), "--port", str(port))
    return (*command, "--gpu-id", str(number))


def _worker_flags(config: Config, args: argparse.Namespace) -> list[str]:
    told = []
    if args.model_path is not None:
        told += ["--model-path", str(config.model.model_path)]
    if args.max_sessions is not None:
        told += ["--max-sessions", str(args.max_sessions)]
    if args.compile is not None:
        told += ["--compile" if args.compile else "--no-compile"]
    if config.model.device.startswith("cuda:"):
        told += ["--device", "cuda"]  # the one that is meant is the only one it sees
    return told


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
