"""The gateway's process while it serves: event loop, signals, and the way out."""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from server.app import Gateway, build_app
from server.desk import Desk
from server.diagnostics import Diagnostics
from server.duplex import Duplex
from server.eta import Eta, EtaConfig
from server.metrics import Metrics
from server.origins import Origins
from server.queue import Queue
from server.watch import Watch
from server.workers import Address, Workers
from worker.connection import live_server
from worker.service_config import ROOT, Config

LOG = logging.getLogger(__name__)
POLL_S = 0.05
LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class Tls:
    """A certificate and its private key."""

    certfile: Path
    keyfile: Path


def serve(config: Config, addresses: Sequence[Address], listening: socket.socket, tls: Tls | None) -> int:
    """Run until told to stop. Returns: the exit status."""
    return asyncio.run(_serve(config, addresses, listening, tls))


async def _serve(config: Config, addresses: Sequence[Address], listening: socket.socket, tls: Tls | None) -> int:
    async with httpx.AsyncClient(trust_env=False) as asking:
        gateway, watch = _gateway(config, addresses, asking)
        files = {} if tls is None else {"ssl_certfile": tls.certfile, "ssl_keyfile": tls.keyfile}
        server = live_server(build_app(gateway), **files)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(POLL_S)
        if serving.done():  # another process listens there since
            LOG.error("cannot listen on %s: %s", listening.getsockname(), serving.exception() or "the server ended")
            return 1
        host, port = listening.getsockname()[:2]
        LOG.info("listening on %s://%s:%d", "http" if tls is None else "https", host, port)
        watch.start()
        try:
            await stop.wait()
            await _drain(gateway.duplex, config.service.drain_timeout_s)
        finally:
            server.should_exit = True
            await serving
            await watch.stop()
        return 0


def _gateway(config: Config, addresses: Sequence[Address], asking: httpx.AsyncClient) -> tuple[Gateway, Watch]:
    service = config.service
    eta = EtaConfig(
        service.eta_chat_s,
        service.eta_half_duplex_s,
        service.eta_audio_duplex_s,
        service.eta_omni_duplex_s,
        service.eta_ema_alpha,
        service.eta_ema_min_samples,
    )
    desk = Desk(Workers(addresses), Queue(service.max_queue_size), Eta(eta))
    metrics = Metrics()
    duplex = Duplex(desk, metrics, Diagnostics(ROOT / "tmp"), asking)
    gateway = Gateway(desk, duplex, metrics, Origins(service.allowed_origins))
    return gateway, Watch(desk, metrics, asking, service.worker_timeout_s)


async def _drain(duplex: Duplex, timeout: float) -> None:
    """Sessions may end by themselves for a while; then they are ended."""
    duplex.drain()
    LOG.info("draining: %d connections have up to %.0f s", len(duplex.connections), timeout)
    await _until_none(duplex, timeout)
    if duplex.connections:
        LOG.warning("%d sessions did not end in time and are ended", len(duplex.connections))
        duplex.end_all()
        await _until_none(duplex, LAST_WORDS_S)


async def _until_none(duplex: Duplex, seconds: float) -> None:
    until = time.monotonic() + seconds
    with contextlib.suppress(TimeoutError):
        while duplex.connections and time.monotonic() < until:
            await asyncio.sleep(POLL_S)


def check_tls(tls: Tls) -> None:
    """Raises: OSError (a file cannot be read), ssl.SSLError (they are no pair)."""
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.certfile, tls.keyfile)
