"""Checks before anything is started: ports, files, memory and certificates; each problem is one line with a remedy.

The doctor's checks cover what a worker reads. This module starts nothing; its only side effect is that it creates the
log folder.
"""

import errno
import socket
import ssl
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.devices import Device
from launcher.plan import LOOPBACK, LaunchPlan
from worker.config.embedded import has_random_weights, is_talker
from worker.config.service import Config
from worker.doctor import checks
from worker.doctor.facts import UnknownFact
from worker.doctor.findings import Finding, Level, size
from worker.doctor.machine import Machine
from worker.doctor.model_memory import model_bytes

CHECKS = (checks.model, checks.tokenizer, checks.vocoder, checks.ffmpeg, checks.warmup, checks.voice)
NEEDS_MODEL = (checks.tokenizer, checks.vocoder)
MAX_COMMAND_CHARS = 80


@dataclass(frozen=True)
class Preflight:
    """Result of all checks. errors: problems that prevent the start. notes: problems that do not."""

    errors: tuple[str, ...]
    notes: tuple[str, ...]


class PlannedMachine(Machine):
    """This machine with settings that are already loaded and include the flags."""

    def __init__(self, config: Config, devices: Sequence[Device], environ: Mapping[str, str]):
        super().__init__(None, environ)
        self._planned, self._devices = config, devices

    @property
    def config(self) -> Config:
        return self._planned

    @property
    def on_gpu(self) -> bool:
        return self._devices[0].visible is not None


def run_preflight(plan: LaunchPlan, config: Config, environ: Mapping[str, str]) -> Preflight:
    """Run all checks and collect every problem, so that one run shows them all."""
    errors: list[str] = []
    notes: list[str] = []
    machine = PlannedMachine(config, plan.devices, environ)
    errors += folder_problems(plan.folder)
    errors += port_problems(plan)
    if plan.scheme == "https":
        errors += certificate_problems(config.service.ssl_certfile, config.service.ssl_keyfile)
    for check in CHECKS:
        if check in NEEDS_MODEL and not _has_checkpoint(machine):
            continue  # the model's check reports it
        found = _run(check, machine)
        if found.level is not Level.OK:
            line = "; ".join([*found.found.splitlines(), *([found.remedy] if found.remedy else [])])
            (errors if found.level is Level.PROBLEM else notes).append(f"{found.name}: {line}")
    errors += memory_problems(machine, plan.devices)
    if has_random_weights(config.model.model_path):
        notes.append(
            "model: the embedded checkpoint has random weights, its output is noise; choose another with --model-path"
        )
    elif is_talker(config.model.model_path):
        notes.append(
            "model: the embedded talker is small and makes mistakes; real weights: --model-path openbmb/MiniCPM-o-4_5"
        )
    return Preflight(tuple(errors), tuple(notes))


# --- folder ---------------------------------------------------------------------------------------


def folder_problems(folder: Path) -> list[str]:
    """Create the folder and check that a file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return []
    except OSError as error:
        return [f"log folder {folder}: {error.strerror}; choose another with --log-dir"]


# --- ports ----------------------------------------------------------------------------------------


def port_problems(plan: LaunchPlan) -> list[str]:
    """One line for each address that the gateway or a worker cannot listen on."""
    addresses = [(plan.host, plan.port, "gateway", "--port or service.gateway_port")]
    for program in plan.workers:
        addresses.append((LOOPBACK, program.port, program.name, "--worker-base-port or service.worker_base_port"))
    found = []
    for host, port, name, setting in addresses:
        try:
            _try_bind(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                who, remedy = port_owner(port, plan.folder)
                found.append(f"port {port} ({name}) is taken by {who}; {remedy}, or choose another port with {setting}")
            else:
                why = error.strerror or str(error)
                remedy = f"choose another address with --host, or port with {setting}"
                found.append(f"{host}:{port} ({name}): {why}; {remedy}")
    return found


def _try_bind(host: str, port: int) -> None:
    """Raises: OSError if a server could not listen there."""
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: ports in TIME_WAIT are free
        probe.bind(address)


def port_owner(port: int, folder: Path) -> tuple[str, str]:
    """The process that listens on a port, and the remedy, as far as this user may see processes.

    Args:
        port: TCP port.
        folder: log folder, whose pid files identify processes of an earlier launcher.
    """
    try:
        listening = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        listening = []
    pids = {
        one.pid
        for one in listening
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid is not None
    }
    if not pids:
        return "a process that this user cannot see", f"find it (sudo ss -ltnp 'sport = :{port}') and stop it"
    pid = min(pids)
    with suppress(psutil.Error):
        parent = psutil.Process(pid).parent()
        if parent is not None and parent.cmdline()[1:3] == ["-m", "launcher"]:
            # Its launcher would restart a child that is stopped alone.
            return f"another running start_all.sh (pid {parent.pid})", f"stop it (kill {parent.pid})"
    for file in sorted(folder.glob("*.pid")):
        with suppress(OSError, ValueError):
            if int(file.read_text()) == pid:
                return f"{file.stem.replace('_', ' ')} of an earlier start_all.sh (pid {pid})", f"kill {pid}"
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        command = command if len(command) <= MAX_COMMAND_CHARS else f"{command[:MAX_COMMAND_CHARS]}..."
        return f"{process.name()} (pid {pid}: {command})", f"stop it (kill {pid})"
    return f"a process (pid {pid})", f"stop it (kill {pid})"


# --- certificates ---------------------------------------------------------------------------------


def certificate_problems(certificate: Path | None, key: Path | None) -> list[str]:
    """Problems with the files for https: missing, unreadable, or not a matching pair."""
    found = []
    for path, setting in ((certificate, "service.ssl_certfile"), (key, "service.ssl_keyfile")):
        try:
            if path is None:
                found.append(f"{setting}: expected a path for https, got none; set it, or start with --http")
            else:
                path.open("rb").close()
        except OSError as error:
            found.append(f"{setting}: {path}: {error.strerror}; correct it, or start with --http")
    if found or certificate is None:
        return found
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        text = f"service.ssl_certfile {certificate} and service.ssl_keyfile {key} cannot be used: {why}"
        return [f"{text}; expected a certificate and its key in PEM, without a password, or start with --http"]
    return []


def _no_password() -> str:
    raise ValueError("the key has a password")  # without this function OpenSSL prompts on the terminal


# --- memory ---------------------------------------------------------------------------------------


def memory_problems(machine: Machine, devices: Sequence[Device]) -> list[str]:
    """Problems if the weights, in their later precision, the slots of the speech model, and the context of one session
    exceed the free memory.
    """
    try:
        weights = model_bytes(machine)
        free = machine.free_memory
    except UnknownFact:
        return []
    if devices[0].visible is None:
        needed = len(devices) * (weights + checks.PROCESS_ROOM)
        if needed <= free:
            return []
        workers = "one worker needs" if len(devices) == 1 else f"{len(devices)} workers need"
        remedy = "stop other programs, start fewer workers, or use a smaller model"
        return [f"memory: {size(free)} free, {workers} at least {size(needed)}; {remedy}"]
    found = []
    for device in devices:
        if (gpu := device.gpu) is not None and gpu.total and gpu.free < weights:
            room = f"{size(gpu.free)} of {size(gpu.total)} free, the models need at least {size(weights)}"
            remedy = "stop other programs on it (nvidia-smi), or exclude it with CUDA_VISIBLE_DEVICES"
            found.append(f"{device.label} ({gpu.name}): {room}; {remedy}")
    return found


def _has_checkpoint(machine: Machine) -> bool:
    try:
        return not machine.model.problems
    except UnknownFact:
        return False


def _run(check: Callable[[Machine], Finding], machine: Machine) -> Finding:
    try:
        return check(machine)
    except UnknownFact as error:
        return Finding(check.__name__, Level.NOTE, f"not checked: {error}")
