"""One program of a cluster on its node: its process, address and end. Runs inside an actor, and imports no Ray."""

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.kernels import write_missing
from launcher.managed_process import ChildProcess, Program, describe_exit
from worker.config.service import ROOT

LOG = logging.getLogger(__name__)
PORT_MARK, HOST_MARK = "{port}", "{host}"  # in a command
# Ray sets these for what runs inside an actor; the programs choose their own values.
LEFT_OUT = ("OMP_NUM_THREADS", "RAY_JOB_ID", "RAY_RAYLET_PID")


@dataclass(frozen=True)
class ProgramSpec:
    """A program of a cluster.

    kind: gateway, worker or authority. name: of its actor, unique. command: with `{host}` and `{port}` where
    the node's address belongs. environ: variables that it gets. port: None: any free one. n_gpus: that it needs.
    resources: further ones, by their names in Ray. cache_dir: folder that gets archives of kernels before the start;
    None: no folder does. is_restarted: Ray starts its actor again after the actor's process or node has ended;
    otherwise the controller places another one.
    """

    kind: str
    name: str
    command: tuple[str, ...]
    environ: tuple[tuple[str, str], ...] = ()
    port: int | None = None
    n_gpus: float = 0
    resources: tuple[tuple[str, float], ...] = ()
    cache_dir: Path | None = None
    is_restarted: bool = False


@dataclass(frozen=True)
class ProgramStatus:
    """State of a program. address: HOST:PORT. node: where it runs. ended: how it ended; "" while it runs."""

    address: str
    node: str
    ended: str = ""


class ProgramHost:
    """Starts the program at once.

    Args:
        spec: the program.
        host: address of the node.
        node: id of the node.
        folder: for its log and pid file.
        archives: of kernels, by file name.
    """

    def __init__(
        self, spec: ProgramSpec, host: str, node: str, folder: Path, archives: Mapping[str, bytes] | None = None
    ):
        for name in LEFT_OUT:
            os.environ.pop(name, None)
        if (nice := os.nice(0)) > 0:
            LOG.warning("%s runs at nice %d: start Ray's nodes with RAY_worker_niceness=0", spec.name, nice)
        folder.mkdir(parents=True, exist_ok=True)
        if spec.cache_dir is not None and archives:
            try:
                LOG.info("%s: %d archives of kernels are new here", spec.name, write_missing(archives, spec.cache_dir))
            except OSError as error:  # the worker compiles
                LOG.warning("%s: archives of kernels were not written: %s", spec.name, error)
        port = free_port(host) if spec.port is None else spec.port
        marks = {HOST_MARK: host, PORT_MARK: str(port)}
        command = tuple(marks.get(part, part) for part in spec.command)
        url = f"http://{host}:{port}"
        self._child = ChildProcess(Program(spec.name, spec.name, command, url, dict(spec.environ)), folder, ROOT)
        self._status = ProgramStatus(f"{host}:{port}", node)
        self._child.start()

    def status(self) -> ProgramStatus:
        """Its state now."""
        code = self._child.poll()
        if code is None:
            return self._status
        message = self._child.last_message()
        ended = f"{describe_exit(code)}{f': {message}' if message else ''}"
        return ProgramStatus(self._status.address, self._status.node, ended)

    def terminate(self) -> None:
        """Ask it to stop; it ends its sessions first."""
        self._child.terminate()


def free_port(host: str) -> int:
    """A port of this node that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
