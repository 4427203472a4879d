"""The gateway's process while it serves: event loop, signals, and the way out."""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import httpx

from server.app import Gateway, build_app
from server.dispatch.dispatcher import Dispatcher
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import WorkerAddress, Workers
from server.health_watch import Watch
from server.live.diagnostics import Diagnostics
from server.live.duplex import GatewaySockets
from server.metrics import GatewayMetrics
from server.origins import Origins
from server.registry.presets import NO_PRESETS, Presets
from server.routes.bodies import FrontendDefaults
from worker.config.service import Config
from worker.protocol.connection import begin, live_server, stop_signal

LOG = logging.getLogger(__name__)
POLL_S = 0.05
LAST_WORDS_S = 5.0
# However many ask at once, a worker that hangs holds up none that asks another. A connection is not used again when the
# other side may be about to close it: uvicorn does after 5 s.
ASKING = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=2.0)


@dataclass(frozen=True)
class Tls:
    """A certificate and its private key."""

    certfile: Path
    keyfile: Path


def serve(
    config: Config,
    addresses: Sequence[WorkerAddress],
    listening: socket.socket,
    tls: Tls | None,
    *,
    presets: Presets,
    lang: str | None,
    reports: Path,
) -> int:
    """Run until told to stop.

    lang: of pages for visitors who have not chosen. reports: folder for what clients report. Returns: the exit status.
    """
    allow_many_files()
    return asyncio.run(_serve(config, addresses, listening, tls, presets, lang, reports))


async def _serve(
    config: Config,
    addresses: Sequence[WorkerAddress],
    listening: socket.socket,
    tls: Tls | None,
    presets: Presets,
    lang: str | None,
    reports: Path,
) -> int:
    async with httpx.AsyncClient(trust_env=False, limits=ASKING) as asking:
        only_here = ip_address(listening.getsockname()[0]).is_loopback
        gateway, watch = build_gateway(
            config, addresses, asking, reports, presets=presets, lang=lang, only_here=only_here
        )
        files = {} if tls is None else {"ssl_certfile": tls.certfile, "ssl_keyfile": tls.keyfile}
        server = live_server(build_app(gateway), **files)
        stop = stop_signal()
        serving = await begin(server, listening, "http" if tls is None else "https")
        if serving is None:
            return 1
        watch.start()
        try:
            await stop.wait()
            await _drain(gateway.duplex, config.service.drain_timeout_s)
        finally:
            server.should_exit = True
            await serving
            await watch.stop()
        return 0


def build_gateway(
    config: Config,
    addresses: Sequence[WorkerAddress],
    asking: httpx.AsyncClient,
    reports: Path,
    *,
    presets: Presets = NO_PRESETS,
    lang: str | None = None,
    only_here: bool = False,
) -> tuple[Gateway, Watch]:
    """All its parts.

    asking: for workers, as `ASKING` limits it. reports: folder for what clients report. only_here: it listens on a
    loopback address.
    """
    service = config.service
    eta = EtaConfig(
        service.eta_chat_s,
        service.eta_half_duplex_s,
        service.eta_audio_duplex_s,
        service.eta_omni_duplex_s,
        service.eta_ema_alpha,
        service.eta_ema_min_samples,
    )
    dispatcher = Dispatcher(Workers(addresses), Queue(service.max_queue_size), Eta(eta))
    metrics = GatewayMetrics()
    duplex = GatewaySockets(dispatcher, metrics, Diagnostics(reports), asking)
    audio = config.audio
    frontend = FrontendDefaults(
        playback_delay_ms=audio.playback_delay_ms, chat_vocoder=audio.chat_vocoder, default_lang=lang
    )
    gateway = Gateway(
        dispatcher,
        duplex,
        metrics,
        Origins(service.allowed_origins, only_here=only_here),
        frontend,
        audio.ref_audio_path,
        presets,
    )
    return gateway, Watch(dispatcher, metrics, asking, service.worker_timeout_s)


async def _drain(duplex: GatewaySockets, timeout: float) -> None:
    """Sessions may end by themselves for a while; then they are ended."""
    duplex.drain()
    LOG.info("draining: %d connections have up to %.0f s", len(duplex.connections), timeout)
    await _until_none(duplex, timeout)
    if duplex.connections:
        LOG.warning("%d sessions did not end in time and are ended", len(duplex.connections))
        duplex.end_all()
        await _until_none(duplex, LAST_WORDS_S)


async def _until_none(duplex: GatewaySockets, seconds: float) -> None:
    until = time.monotonic() + seconds
    while duplex.connections and time.monotonic() < until:
        await asyncio.sleep(POLL_S)


def allow_many_files() -> None:
    """A connection is a file, a session has two, and what a process may open at first is little."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # then it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_tls(tls: Tls) -> None:
    """Raises: OSError (a file cannot be read), ssl.SSLError (they are no pair, or the key is locked)."""
    # Without a password the library would ask at the terminal for that of a locked key.
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.certfile, tls.keyfile, password="")
