"""The gateway's event loop: start, stop signal and drain."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path

import httpx
from fastapi import FastAPI
from starlette.types import Message

from server.access.access import Access
from server.access.usage import UsageTask
from server.app import Gateway, build_app
from server.cluster.forward import ResumeForward
from server.cluster.link import AuthorityLink
from server.cluster.shared_dispatcher import SharedDispatcher
from server.dispatch.dispatcher import Dispatcher
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import WorkerAddress, Workers
from server.doors.calls.processes import PeerProcesses
from server.doors.core.chat_turn import ChatTurns
from server.doors.core.picture_urls import PictureUrls
from server.doors.core.transcriber import Transcriber
from server.doors.live.door_context import SessionLimits
from server.doors.live.truncation import SlotWindow
from server.doors.model_names import ModelNames
from server.doors.voices import VoiceNames
from server.health_watch import HealthWatch
from server.live.diagnostics import Diagnostics
from server.live.http_chat import HttpChats
from server.live.live_sessions import LiveSessions
from server.live.moves.move_watch import MoveWatch
from server.live.quota_watch import QuotaWatch
from server.live.slot_wait import SlotWait
from server.live.sockets import GatewaySockets
from server.loop_watch import LoopWatch
from server.metrics import GatewayMetrics
from server.origins import Origins
from server.recording.recordings import recordings_of
from server.recording.retention import RetentionLimits, RetentionTask
from server.recording.trace_log import TraceLog
from server.registry.apps import Apps
from server.registry.gateway_state import FILE_NAME, GatewayState
from server.registry.presets import PresetFolders
from server.registry.sound_upload import MAX_FILE_BYTES, MAX_S, MIN_S
from server.registry.voices import MAX_VOICES, VoiceRegistry
from server.routes.preset_bodies import FrontendDefaults, VoiceLimits
from server.tracing import TraceSpans
from worker.config.service import TRACE_FOLDER, Config
from worker.key_text import WORKER_SECRET_HEADER
from worker.protocol.connection import begin, live_server, stop_signal
from worker.protocol.live_http import TransportLimits
from worker.voice_registry import voice_folder

LOG = logging.getLogger(__name__)
POLL_S = 0.05
CLOSE_TIMEOUT_S = 5.0
HAND_OVER_S = 2.5  # after the stop signal; workers that stop too, and keep no sessions, have reported it by then
# For requests to workers. The number of connections is unlimited, so that requests to a hanging worker do not delay
# those to others. Connections are reused for 2 s only, because uvicorn closes idle ones after 5 s and a request on a
# closing connection fails.
HTTP_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=2.0)


@dataclass(frozen=True)
class Tls:
    """A certificate and its private key."""

    certfile: Path
    keyfile: Path


@dataclass(frozen=True)
class ServeOptions:
    """What a gateway needs besides its configuration.

    workers: addresses of the workers. diagnostics_folder: for reports from clients. tls: None serves plain HTTP.
    preset_folder: presets that come with the server; None: only the user's own.
    default_lang: language of the pages for visitors who have not chosen one. loopback_only: the gateway listens on a
    loopback address. start_key: a key for this run, with an administrator's rights. worker_secret: what the
    workers demand; None: nothing. spans: records sessions as traces; None: nothing does. authority: URL of that of a
    cluster, which names the workers; None: this gateway gives the slots itself. gateway_name: in the cluster.
    peer_tls: how connections to the cluster's other gateways are checked; None: those with TLS get none.
    """

    workers: Sequence[WorkerAddress]
    diagnostics_folder: Path
    tls: Tls | None = None
    preset_folder: Path | None = None
    default_lang: str | None = None
    loopback_only: bool = False
    start_key: str | None = field(default=None, repr=False)
    worker_secret: str | None = field(default=None, repr=False)
    spans: TraceSpans | None = None
    authority: str | None = None
    gateway_name: str = ""
    peer_tls: ssl.SSLContext | None = None

    @property
    def worker_headers(self) -> dict[str, str]:
        """Headers of every request to a worker."""
        return {} if self.worker_secret is None else {WORKER_SECRET_HEADER: self.worker_secret}


def serve(config: Config, bound_socket: socket.socket, options: ServeOptions) -> int:
    """Run the gateway until a stop signal. Returns: the exit status."""
    raise_file_limit()
    return asyncio.run(_serve(config, bound_socket, options))


async def _serve(config: Config, bound_socket: socket.socket, options: ServeOptions) -> int:
    async with httpx.AsyncClient(trust_env=False, limits=HTTP_LIMITS, headers=options.worker_headers) as http:
        loopback_only = ip_address(bound_socket.getsockname()[0]).is_loopback
        gateway, watch = build_gateway(config, http, replace(options, loopback_only=loopback_only))
        tls = options.tls
        files = {} if tls is None else {"ssl_certfile": tls.certfile, "ssl_keyfile": tls.keyfile}
        app = build_app(gateway)
        await build_routes(app)
        # A full collection over everything that was imported would block the loop for 0.1 s.
        gc.collect()
        gc.freeze()
        limits = config.service.limits
        transport = TransportLimits(
            limits.connections,
            limits.header_timeout_s,
            limits.body_timeout_s,
            limits.unread_timeout_s,
            gateway.metrics.record_limit,
        )
        server = live_server(app, transport, **files)
        stop = stop_signal()
        serving = await begin(server, bound_socket, "http" if tls is None else "https")
        if serving is None:
            return 1
        watch.start()
        gateway.recordings.open()
        kept = RetentionLimits(config.recording.session_retention_days, config.recording.max_storage_gb)
        retention = RetentionTask(gateway.recordings.store, kept, config.service.data_dir / TRACE_FOLDER)
        retention.start()
        loop_watch = LoopWatch(gateway.metrics)
        loop_watch.start()
        quotas = QuotaWatch(gateway.live, gateway.dispatcher)
        quotas.start()
        gateway.moves.start()
        usage = UsageTask(gateway.access.usage)
        usage.start()
        link = authority_link(gateway, watch, options, bound_socket)
        if link is not None:
            link.start()
        await gateway.peers.start()
        try:
            await stop.wait()
            await _drain(gateway, config.service.drain_timeout_s, hands_over=stop.number == signal.SIGTERM)
        finally:
            server.should_exit = True
            await serving
            if link is not None:
                await link.stop()
            await watch.stop()
            await retention.stop()
            await loop_watch.stop()
            await quotas.stop()
            await gateway.moves.stop()
            await usage.stop()
            await gateway.peers.stop()
            await asyncio.to_thread(gateway.recordings.close)
            if options.spans is not None:
                await asyncio.to_thread(options.spans.close)
        return 0


def build_gateway(config: Config, http: httpx.AsyncClient, options: ServeOptions) -> tuple[Gateway, HealthWatch]:
    """The objects that the routes use, and the health watch, which is not started yet.

    Args:
        config: settings.
        http: client for the workers, with `HTTP_LIMITS`.
        options: everything else.
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
    workers, queue = Workers(options.workers, headers=options.worker_headers), Queue(service.max_queue_size)
    if options.authority is None:
        dispatcher = Dispatcher(workers, queue, Eta(eta), max_spare=config.api.transcriptions)
    else:
        dispatcher = SharedDispatcher(workers, queue, Eta(eta))
    metrics = GatewayMetrics()
    audio = config.audio
    recordings = recordings_of(service.data_dir, metrics, is_enabled=config.recording.enabled)
    state, apps = GatewayState(service.data_dir / FILE_NAME), Apps()
    state.apply(apps, dispatcher.eta)
    preset_folders = (options.preset_folder, service.data_dir / "presets")
    live = LiveSessions()
    is_shared = isinstance(dispatcher, SharedDispatcher)
    secret = options.worker_secret if is_shared else None
    name = "" if options.authority is None else options.gateway_name
    access = Access.of(config, metrics.record_limit, options.start_key, secret, name)
    forward = None
    if isinstance(dispatcher, SharedDispatcher) and secret:
        forward = ResumeForward(dispatcher, secret, options.peer_tls)
    slots = SlotWait(dispatcher, metrics, live, http, access.clients, options.spans)
    voices = VoiceRegistry(voice_folder(service.data_dir))
    gateway = Gateway(
        dispatcher,
        access,
        live,
        GatewaySockets(slots, Diagnostics(options.diagnostics_folder), recordings, service.resume_grace_s, forward),
        HttpChats(slots, recordings),
        http,
        metrics,
        Origins(service.allowed_origins, service.allowed_hosts, loopback_only=options.loopback_only),
        FrontendDefaults(
            playback_delay_ms=audio.playback_delay_ms,
            chat_vocoder=audio.chat_vocoder,
            default_lang=options.default_lang,
            recording=config.recording.enabled,
            voices=VoiceLimits(min_s=MIN_S, max_s=MAX_S, max_bytes=MAX_FILE_BYTES, max_count=MAX_VOICES),
        ),
        recordings,
        TraceLog(options.diagnostics_folder),
        voices,
        state,
        PresetFolders(*(folder for folder in preset_folders if folder is not None)),
        ModelNames.of(config),
        VoiceNames(voices, config.api.voices),
        slots,
        ChatTurns(slots, recordings),
        Transcriber(slots, is_enabled=config.api.transcriptions > 0),
        PeerProcesses(service.webrtc, metrics),
        service.limits,
        MoveWatch(live),
        audio.ref_audio_path,
        apps,
        SessionLimits(
            audio_mode_s=config.api.audio_mode_s,
            video_mode_s=config.api.video_mode_s,
            resume_grace_s=service.resume_grace_s,
        ),
        config.api.live_barge_in_ms,
        slot_window=SlotWindow(config.duplex.context_rows, config.duplex.session),
        picture_urls=PictureUrls(config.api.image_hosts),
        log_folder=options.diagnostics_folder,
        others=forward,
    )
    return gateway, HealthWatch(dispatcher, metrics.record_worker_lost, http, service.worker_timeout_s)


def authority_link(
    gateway: Gateway, watch: HealthWatch, options: ServeOptions, bound_socket: socket.socket
) -> AuthorityLink | None:
    """The connection to the authority, which is not started yet; None without one."""
    dispatcher = gateway.dispatcher
    if options.authority is None or not isinstance(dispatcher, SharedDispatcher):
        return None
    dispatcher.on_workers = watch.start
    headers = options.worker_headers
    host, port = bound_socket.getsockname()[:2]
    host = "" if ip_address(host).is_unspecified else host
    usage, name = gateway.access.usage, options.gateway_name
    has_tls = options.tls is not None
    return AuthorityLink(dispatcher, usage, options.authority, name, port, host, headers, has_tls=has_tls)


async def build_routes(app: FastAPI) -> None:
    """Make FastAPI prepare its routes now: it does so at the first requests, which block the loop for 0.3 s.

    Requests to no route go to the router itself: the guard refuses them where keys are set.
    """
    for target, path in ((app, "/livez"), (app.router, "/no/such/route")):
        transport = httpx.ASGITransport(target)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False) as client:
            await client.get(path)
    messages = iter([{"type": "websocket.connect"}])

    async def receive() -> Message:
        return next(messages)

    async def send(_: Message) -> None:
        pass

    scope = {"type": "websocket", "path": "/no/such/socket", "root_path": "", "query_string": b"", "headers": []}
    await app.router({**scope, "extensions": {"websocket.http.response": {}}}, receive, send)


async def _drain(gateway: Gateway, timeout: float, *, hands_over: bool) -> None:
    """Wait up to `timeout` seconds for sessions to end, then close them.

    hands_over: do not wait for sessions that their workers keep for another gateway; they continue there.
    """
    live, sockets = gateway.live, gateway.sockets
    live.drain()
    LOG.info("draining: %d connections have up to %.0f s", len(live), timeout)
    begin = time.monotonic()
    while len(live) and (seconds := time.monotonic() - begin) < timeout:
        if hands_over and seconds >= HAND_OVER_S and len(sockets.transferable) == len(live):
            break
        await asyncio.sleep(POLL_S)
    if len(live):
        kept = sockets.transferable if hands_over else frozenset()
        LOG.warning("%d sessions are handed over, %d did not end in time", len(kept), len(live) - len(kept))
        live.close_all(kept)
        await _until_none(live, CLOSE_TIMEOUT_S)


async def _until_none(live: LiveSessions, seconds: float) -> None:
    until = time.monotonic() + seconds
    while len(live) and time.monotonic() < until:
        await asyncio.sleep(POLL_S)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each session takes two sockets."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # the limit stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_tls(tls: Tls) -> None:
    """Check a certificate. Raises: OSError for unreadable files, ssl.SSLError for a wrong or encrypted key."""
    # Without the password argument OpenSSL prompts on the terminal for that of an encrypted key.
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.certfile, tls.keyfile, password="")
