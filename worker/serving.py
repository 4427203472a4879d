"""A worker process while it serves: event loop, signals, drain and exit."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import time

import torch

from worker.assembly.backend_flags import limit_threads, resolve_compile
from worker.assembly.parts import device_type
from worker.config.service import ROOT, TRACE_FOLDER, Config
from worker.http.app import build_app
from worker.http.guard import WorkerGuard
from worker.http.metrics import WorkerMetrics
from worker.http.paced_selector import PacedSelector
from worker.http.socket import WorkerSockets
from worker.loaded import WorkerSettings
from worker.loop.observer import Observer
from worker.protocol.codes import ErrorCode
from worker.protocol.connection import begin, live_server, stop_signal
from worker.service import Service
from worker.start.memory import freeze_heap
from worker.start.priority import StartPriority
from worker.status import State
from worker.voice_registry import voice_folder

LOG = logging.getLogger(__name__)
POLL_S = 0.05
# Seconds after which a thread that runs Python code releases the interpreter to others that wait for it. The engine's
# thread waits for it after every operation of torch, while other threads read messages and listen for pauses.
SWITCH_S = 0.0001
MB, GB = 10**6, 10**9


def worker_settings(config: Config, *, gpu_id: int = 0, secret: str | None = None) -> WorkerSettings:
    """One worker's settings from the settings file, with `service.compile` resolved for its device.

    secret: of the launcher.
    """
    service, duplex = config.service, config.duplex
    return WorkerSettings(
        engine=resolve_compile(config.engine(), device_type(config.model.device)),
        video=service.warmup_video,
        ref_audio=config.audio.ref_audio_path,
        ref_folder=ROOT / "assets" / "ref_audio",
        voice_folder=voice_folder(service.data_dir),
        cache_dir=service.cache_dir,
        trace_dir=service.trace_dir,
        asked_trace_dir=service.data_dir / TRACE_FOLDER if service.record_traces else None,
        max_warmup_units=service.max_warmup_chunks,
        pause_timeout=duplex.pause_timeout,
        idle_timeout=duplex.idle_timeout,
        drain_timeout=service.drain_timeout_s,
        max_backlog=int(duplex.max_backlog_mb * MB),
        gpu_id=gpu_id,
        spread_units=duplex.spread_units,
        is_measured=duplex.admission == "measured" or (duplex.admission == "auto" and duplex.max_sessions is None),
        secret=secret,
        max_memory=None if service.max_worker_memory_gb is None else round(service.max_worker_memory_gb * GB),
    )


def serve(
    settings: WorkerSettings,
    listening: socket.socket,
    observer: Observer | None = None,
    priority: StartPriority | None = None,
) -> int:
    """Serve until a signal stops the process.

    observer: of the engine. `benchmarks.turns.worker` passes one that replaces the model's decisions; `worker.main`
        passes none.
    priority: low until the worker is ready; None: it is not changed.
    Returns: the exit status.
    """
    sys.setswitchinterval(SWITCH_S)
    limit_threads(device_type(settings.engine.device))
    if settings.engine.device != "cpu" and torch.cuda.is_available():
        # Takes seconds and blocks all threads, so it comes before the first request.
        torch.cuda.init()
    freeze_heap()
    selector = PacedSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        status = runner.run(_serve(settings, listening, selector, observer, priority))
    if any(thread.name == "starter" and thread.is_alive() for thread in threading.enumerate()):
        # A running compiler cannot be stopped, and crashes when the interpreter exits.
        logging.shutdown()
        os._exit(status)
    return status


async def _serve(
    settings: WorkerSettings,
    listening: socket.socket,
    selector: PacedSelector,
    observer: Observer | None,
    priority: StartPriority | None,
) -> int:
    service, metrics = Service(settings, observer, priority), WorkerMetrics()
    sockets = WorkerSockets(service, metrics)
    server = live_server(WorkerGuard(build_app(service, metrics, sockets), settings.secret))
    stop = stop_signal()
    serving = await begin(server, listening, "http")
    if serving is None:
        return 1
    service.start()
    status = await _live(service, sockets, selector, stop)
    server.should_exit = True
    await serving
    service.shut_down()
    return status


async def _live(service: Service, sockets: WorkerSockets, selector: PacedSelector, stop: asyncio.Event) -> int:
    """Run until a signal or POST /drain, and the drain after it, or until the start fails. Returns: the exit status."""
    has_served = False
    while not stop.is_set() and service.status.state is not State.DRAINING:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await stop.wait()
        service.check()
        selector.set_n_conversations(len(sockets.conversations))
        has_served = has_served or service.is_ready
        if service.status.state is State.FAILED:
            if not has_served:
                return 1
            if sockets.conversations:
                sockets.end_all(ErrorCode.ENGINE, f"the engine failed: {service.status.now.error}")
    service.drain()
    await _drain(service, sockets)
    return 0


async def _drain(service: Service, sockets: WorkerSockets) -> None:
    """Wait for open sessions, then end those that remain."""
    until = time.monotonic() + service.settings.drain_timeout
    LOG.info("draining: %d sessions have up to %.0f s", len(sockets.conversations), service.settings.drain_timeout)
    while not service.is_drained and time.monotonic() < until:
        if (failure := service.failure) is not None and sockets.conversations:
            sockets.end_all(ErrorCode.ENGINE, f"the engine failed: {failure}")
        await asyncio.sleep(POLL_S)
    if sockets.conversations:
        LOG.warning("%d sessions did not end in time and are ended", len(sockets.conversations))
        sockets.end_all(ErrorCode.DRAINING, "the worker is shutting down")
    while sockets.conversations and time.monotonic() < until + 5:
        await asyncio.sleep(POLL_S)
