"""The launch plan: command lines, ports and addresses, computed from settings, flags and devices.

Has no side effects. Does not check that ports are free.
"""

import argparse
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from launcher.devices import Device
from launcher.managed_process import Program
from launcher.memory_watch import GB
from models.errors import SettingsError
from worker.config.service import ROOT, Config
from worker.key_text import KEYS_FILE, START_KEY_VARIABLE, WORKER_SECRET_VARIABLE, new_key
from worker.log import LEVEL_VARIABLE

LOOPBACK, ALL_ADDRESSES = "127.0.0.1", "0.0.0.0"  # noqa: S104 - only with --remote
THREADS_VARIABLE = "OMP_NUM_THREADS"
MAX_PORT = 65_535
LOW_PRIORITY = "--low-priority-start"  # of a worker that starts beside others that serve


@dataclass(frozen=True)
class RunSecrets:
    """What the programs of one run share.

    worker_secret: workers accept only programs that know it. start_key: a key with an administrator's rights; None:
    keys are configured, or none is needed.
    """

    worker_secret: str | None = field(default=None, repr=False)
    start_key: str | None = field(default=None, repr=False)

    @classmethod
    def make(cls, config: Config, args: argparse.Namespace) -> "RunSecrets":
        """New secrets for one run."""
        needs_key = args.remote and not args.insecure and not has_keys(config)
        return cls(secrets.token_urlsafe(32), new_key() if needs_key else None)

    @property
    def worker_environ(self) -> dict[str, str]:
        return {} if self.worker_secret is None else {WORKER_SECRET_VARIABLE: self.worker_secret}

    @property
    def gateway_environ(self) -> dict[str, str]:
        return self.worker_environ | ({} if self.start_key is None else {START_KEY_VARIABLE: self.start_key})


def has_keys(config: Config) -> bool:
    """Whether API keys are configured."""
    return bool(config.service.api_keys) or (config.service.data_dir / KEYS_FILE).exists()


@dataclass(frozen=True)
class LaunchPlan:
    """The programs to run and their addresses.

    host, port: address that the gateway listens on. folder: for logs and pid files. devices: one for each worker, in
    the same order. drain_s: seconds that sessions have to end after a stop. start_key: opens the pages in this run;
    None: none was made. has_keys: clients need a key. max_worker_bytes: of a worker's own memory; None: by what it
    holds when it becomes ready.
    """

    gateway: Program
    workers: tuple[Program, ...]
    devices: tuple[Device, ...]
    host: str
    port: int
    scheme: str
    folder: Path
    drain_s: float
    start_key: str | None = field(default=None, repr=False)
    has_keys: bool = False
    max_worker_bytes: int | None = None
    root: Path = ROOT

    @property
    def is_remote(self) -> bool:
        """Whether other machines can reach the gateway."""
        return self.host != "localhost" and not ip_address(self.host).is_loopback

    def url(self, host: str | None = None) -> str:
        """URL of the gateway. host: host name in it; None selects one that works on this machine."""
        if host is None:
            host = "localhost" if not self.is_remote or ip_address(self.host).is_unspecified else self.host
        return f"{self.scheme}://{_in_url(host)}:{self.port}"


def make_plan(
    config: Config,
    args: argparse.Namespace,
    devices: Sequence[Device],
    environ: Mapping[str, str],
    n_cores: int,
    run_secrets: RunSecrets | None = None,
) -> LaunchPlan:
    """The plan for one worker on each selected device.

    Args:
        config: settings.
        args: command-line flags.
        devices: usable devices, at least one.
        environ: environment variables.
        n_cores: CPU cores, shared out among workers on the CPU.
        run_secrets: of this run; None: none.

    Raises: SettingsError for ports that are out of range or collide, an invalid address, https without certificate.
    """
    chosen = _select(devices, args.num_workers)
    host, scheme = _host(args.host, remote=args.remote), _scheme(config, args)
    ports = worker_ports(config, len(chosen))
    run_secrets = run_secrets or RunSecrets()
    max_gb = config.service.max_worker_memory_gb
    # Each program reads the settings file and the environment itself. Flags have to be passed on.
    config_flags = () if args.config is None else ("--config", str(args.config.absolute()))
    shared = {LEVEL_VARIABLE: args.log_level} if args.log_level else {}
    threads = {}
    if chosen[0].visible is None and len(chosen) > 1 and THREADS_VARIABLE not in environ:
        threads = {THREADS_VARIABLE: str(max(1, n_cores // len(chosen)))}  # otherwise each uses all cores
    gateway_command = (
        *(sys.executable, "-m", "server.main", *config_flags, f"--{scheme}"),
        *("--host", host, "--port", str(config.service.gateway_port)),
        *("--workers", ",".join(f"{LOOPBACK}:{port}" for port in ports)),
        *("--log-dir", str(args.log_dir.absolute())),
        *(("--remote",) if args.remote else ()),
        *(("--insecure",) if args.insecure else ()),
        *(("--lang", args.lang) if args.lang else ()),
    )
    probe_host = {ALL_ADDRESSES: LOOPBACK, "::": "::1"}.get(host, host)
    workers = tuple(
        Program(
            name=f"worker {i}",
            stem=f"worker_{i}",
            command=(*_worker_command(i, device, port), *config_flags, *_worker_flags(config, args)),
            url=f"http://{LOOPBACK}:{port}",
            environ={**shared, **threads, **device.environ, **run_secrets.worker_environ},
        )
        for i, (device, port) in enumerate(zip(chosen, ports, strict=True))
    )
    return LaunchPlan(
        gateway=Program(
            name="gateway",
            stem="gateway",
            command=gateway_command,
            url=f"{scheme}://{_in_url(probe_host)}:{config.service.gateway_port}",
            environ={**shared, **run_secrets.gateway_environ},
        ),
        workers=workers,
        devices=tuple(chosen),
        host=host,
        port=config.service.gateway_port,
        scheme=scheme,
        folder=args.log_dir.absolute(),
        drain_s=config.service.drain_timeout_s,
        start_key=run_secrets.start_key,
        has_keys=run_secrets.start_key is not None or has_keys(config),
        max_worker_bytes=None if max_gb is None else round(max_gb * GB),
    )


def worker_ports(config: Config, n: int) -> list[int]:
    """One port for each of `n` workers. Raises: SettingsError for ports out of range and for the gateway's port."""
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


def _select(devices: Sequence[Device], n_workers: int | None) -> list[Device]:
    """One device for each worker: the first `n_workers` GPUs, or the CPU `n_workers` times."""
    if devices[0].visible is None:
        return [devices[0]] * (n_workers or 1)
    return list(devices[:n_workers])


def _host(given: str | None, *, remote: bool) -> str:
    if given is None:
        return ALL_ADDRESSES if remote else LOOPBACK
    try:
        is_loopback = given == "localhost" or ip_address(given).is_loopback
    except ValueError:
        raise SettingsError("--host", expected="an IP address of this machine", got=repr(given)) from None
    if not is_loopback and not remote:
        raise SettingsError("--host", expected="a loopback address, or --remote as well", got=given)
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
    flags = []
    if args.model_path is not None:
        flags += ["--model-path", str(config.model.model_path)]
    if args.max_sessions is not None:
        flags += ["--max-sessions", str(args.max_sessions)]
    if args.compile is not None:
        flags += ["--compile" if args.compile else "--no-compile"]
    if config.model.device.startswith("cuda:"):
        flags += ["--device", "cuda"]  # CUDA_VISIBLE_DEVICES leaves only the selected GPU
    return flags


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
