"""A worker's process while it serves: event loop, signals, and the way out."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import time

import torch

from worker.assembly.backend_flags import resolve_compile, settle_threads
from worker.assembly.parts import device_type
from worker.config.service import ROOT, Config
from worker.http.app import build_app
from worker.http.metrics import WorkerMetrics
from worker.http.socket import WorkerSockets
from worker.protocol.codes import ErrorCode
from worker.protocol.connection import begin, live_server, stop_signal
from worker.service import Service, WorkerSettings
from worker.start.releasing import settle_heap
from worker.status import State

LOG = logging.getLogger(__name__)
POLL_S = 0.05
# Compiling and tracing hold the interpreter; this is how often they have to let others have a turn.
SWITCH_S = 0.001
MB = 10**6


def worker_settings(config: Config, *, gpu_id: int = 0) -> WorkerSettings:
    """What the settings file says to one worker."""
    service, duplex = config.service, config.duplex
    return WorkerSettings(
        engine=resolve_compile(config.engine(), device_type(config.model.device)),
        video=service.warmup_video,
        ref_audio=config.audio.ref_audio_path,
        ref_folder=ROOT / "assets" / "ref_audio",
        cache_dir=service.cache_dir,
        max_warmup_units=service.max_warmup_chunks,
        pause_timeout=duplex.pause_timeout,
        idle_timeout=duplex.idle_timeout,
        drain_timeout=service.drain_timeout_s,
        max_backlog=int(duplex.max_backlog_mb * MB),
        gpu_id=gpu_id,
    )


def serve(settings: WorkerSettings, listening: socket.socket) -> int:
    """Run until told to stop. Returns: the exit status."""
    sys.setswitchinterval(SWITCH_S)
    settle_threads()
    if settings.engine.device != "cpu" and torch.cuda.is_available():
        torch.cuda.init()  # takes seconds and holds everything up: before anybody is answered
    settle_heap()
    status = asyncio.run(_serve(settings, listening))
    if any(thread.name == "starter" and thread.is_alive() for thread in threading.enumerate()):
        # A compiler at work cannot be told to stop, and does not survive the interpreter's end.
        logging.shutdown()
        os._exit(status)
    return status


async def _serve(settings: WorkerSettings, listening: socket.socket) -> int:
    service, metrics = Service(settings), WorkerMetrics()
    duplex = WorkerSockets(service, metrics)
    server = live_server(build_app(service, metrics, duplex))
    stop = stop_signal()
    serving = await begin(server, listening, "http")
    if serving is None:
        return 1
    service.start()
    status = await _live(service, duplex, stop)
    server.should_exit = True
    await serving
    service.shut_down()
    return status


async def _live(service: Service, duplex: WorkerSockets, stop: asyncio.Event) -> int:
    """Until it is told to stop and drained, or until it fails to start."""
    has_served = False
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await stop.wait()
        service.check()
        has_served = has_served or service.is_ready
        if service.status.state is State.FAILED:
            if not has_served:
                return 1
            if duplex.conversations:
                duplex.end_all(ErrorCode.ENGINE, f"the engine broke down: {service.status.now.error}")
    service.drain()
    await _drain(service, duplex)
    return 0


async def _drain(service: Service, duplex: WorkerSockets) -> None:
    until = time.monotonic() + service.settings.drain_timeout
    LOG.info("draining: %d sessions have up to %.0f s", len(duplex.conversations), service.settings.drain_timeout)
    while not service.is_drained and time.monotonic() < until:
        if (failure := service.failure) is not None and duplex.conversations:
            duplex.end_all(ErrorCode.ENGINE, f"the engine broke down: {failure}")
        await asyncio.sleep(POLL_S)
    if duplex.conversations:
        LOG.warning("%d sessions did not end in time and are ended", len(duplex.conversations))
        duplex.end_all(ErrorCode.DRAINING, "the worker is shutting down")
    while duplex.conversations and time.monotonic() < until + 5:
        await asyncio.sleep(POLL_S)
