"""The peer connection of one call: negotiation, tracks and the data channel. Contains no session."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCDataChannel,
    RTCPeerConnection,
    RTCRtpSender,
    RTCRtpTransceiver,
    RTCSessionDescription,
)
from aiortc.rtcconfiguration import RTCBundlePolicy
from aiortc.sdp import SessionDescription

from server.peers.frames import NUMBER, POSITION, FrameKind, LinkFrame
from server.peers.network import ice_servers, with_public_address, with_repair
from server.peers.pictures import take_pictures
from server.peers.sound_in import IncomingSound
from server.peers.sound_out import OutgoingSound
from server.peers.sound_queue import SoundQueue
from worker.config.webrtc import WebRtcConfig

LOG = logging.getLogger(__name__)
CHANNEL = "oai-events"
CONNECT_S = 30.0  # from the answer to the connection
FLUSH_S = 0.5  # for the last events
MAX_LINES = 2000  # of an offer; browsers send 100 to 300, and the parser takes quadratic time
MAX_FRAGMENTS = 2048  # of unfinished messages; the largest that the answer allows has 230 of the usual size
MAX_UNSENT = 16 * 2**20  # bytes of events that the client does not receive
Send = Callable[[FrameKind, bytes], None]


class OfferError(Exception):
    """An offer that cannot be answered."""


class Peer:
    """One call.

    Args:
        config: settings of calls.
        send: sends a frame of this call to the gateway.
    """

    def __init__(self, config: WebRtcConfig, send: Send):
        self._config, self._send = config, send
        configuration = RTCConfiguration(ice_servers(config), bundlePolicy=RTCBundlePolicy.MAX_BUNDLE)
        self._connection = RTCPeerConnection(configuration)
        self._queue = SoundQueue(self._report, config.playback_delay_ms)
        self._channel: RTCDataChannel | None = None
        self._has_channel = True  # until an offer without one
        self._unsent: list[str] = []  # events from before the channel
        self._n_unsent = 0  # characters of these
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_gone = False
        self._settled = asyncio.Event()  # no answer is being made
        self._settled.set()

    async def answer(self, offer: str) -> str:
        """The answer to an offer, with all candidates. Raises: OfferError."""
        self._settled.clear()
        try:
            return await self._negotiated(offer)
        finally:
            self._settled.set()

    async def _negotiated(self, offer: str) -> str:
        connection = self._connection
        self._has_channel = _checked(offer)
        sound: RTCRtpTransceiver = connection.addTransceiver(OutgoingSound(self._queue))
        capabilities = RTCRtpSender.getCapabilities("audio")
        sound.setCodecPreferences([one for one in capabilities.codecs if one.mimeType.lower() == "audio/opus"])
        incoming = IncomingSound(lambda pcm16: self._send(FrameKind.HEARD, pcm16))
        # aiortc offers no way to choose the buffer; it must be set before the first packet.
        sound.receiver._RTCRtpReceiver__jitter_buffer = incoming  # type: ignore[attr-defined]
        connection.on("track", self._on_track)
        connection.on("datachannel", self._on_channel)
        connection.on("connectionstatechange", self._on_state)
        try:
            await connection.setRemoteDescription(RTCSessionDescription(offer, "offer"))
            await connection.setLocalDescription(await connection.createAnswer())
            if connection.sctp is not None:
                self._bound_fragments(connection.sctp)
        except Exception as error:
            LOG.debug("an offer is refused", exc_info=True)
            raise OfferError(f"expected an offer of WebRTC with Opus, got one that fails: {error!r:.200}") from None
        self._start(self._watch_connect())
        return with_public_address(with_repair(connection.localDescription.sdp), self._config.public_address)

    def handle(self, frame: LinkFrame) -> None:
        """React to a frame of the gateway."""
        if frame.kind is FrameKind.EVENT:
            self._send_event(frame.data.decode())
        elif frame.kind is FrameKind.PLAY:
            [number] = NUMBER.unpack_from(frame.data)
            self._queue.play(number, frame.data[NUMBER.size :])
        elif frame.kind is FrameKind.END:
            self._queue.end(*NUMBER.unpack(frame.data))
        elif frame.kind is FrameKind.CLEAR:
            self._queue.clear()

    async def close(self) -> None:
        """Send the last events, and close the connection."""
        self._is_gone = True
        channel, end = self._channel, asyncio.get_running_loop().time() + FLUSH_S
        while channel is not None and channel.readyState == "open" and channel.bufferedAmount:
            await asyncio.sleep(0.01)
            if asyncio.get_running_loop().time() > end:
                break
        for task in self._tasks:
            task.cancel()
        await self._settled.wait()  # candidates that are found after the end of a connection would stay open
        await self._connection.close()

    def _gone(self, reason: str) -> None:
        """Send GONE to the gateway, once."""
        if not self._is_gone:
            self._is_gone = True
            self._send(FrameKind.GONE, reason.encode())

    def _start(self, running: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(running, name="peer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _report(self, kind: FrameKind, number: int, ms: float) -> None:
        self._send(kind, POSITION.pack(number, ms) if kind is FrameKind.CLEARED else NUMBER.pack(number))

    # --- the connection ------------------------------------------------------------------------

    def _on_state(self) -> None:
        state = self._connection.connectionState
        if state in ("failed", "closed"):
            self._gone(state)

    async def _watch_connect(self) -> None:
        await asyncio.sleep(CONNECT_S)
        if self._connection.connectionState != "connected":
            self._gone(f"no connection within {CONNECT_S:.0f} s")

    def _on_track(self, track: MediaStreamTrack) -> None:
        if track.kind == "video":
            take = take_pictures(track, self._config.pictures_per_s, lambda jpeg: self._send(FrameKind.PICTURE, jpeg))
            self._start(take)

    # --- the data channel ----------------------------------------------------------------------

    def _on_channel(self, channel: RTCDataChannel) -> None:
        if channel.label != CHANNEL or self._channel is not None:
            return
        self._channel = channel
        channel.on("message", self._on_message)
        unsent, self._unsent = self._unsent, []
        for text in unsent:
            self._send_event(text)

    def _bound_fragments(self, transport: Any) -> None:
        """End the call at too many fragments of messages: aiortc searches all of a stream for each that comes."""
        receive = transport._receive_data_chunk

        async def receive_bounded(chunk: Any) -> None:
            if self._is_gone:
                return
            await receive(chunk)
            if len(transport._get_inbound_stream(chunk.stream_id).reassembly) > MAX_FRAGMENTS:
                self._gone(f"a message has more than {MAX_FRAGMENTS} fragments")

        transport._receive_data_chunk = receive_bounded

    def _on_message(self, message: str | bytes) -> None:
        self._send(FrameKind.EVENT, message if isinstance(message, bytes) else message.encode())

    def _keep(self, text: str) -> None:
        """Keep an event until the channel is open."""
        self._unsent.append(text)
        self._n_unsent += len(text)
        if self._n_unsent > MAX_UNSENT:
            self._unsent, self._n_unsent = [], 0
            self._gone("the client opens no channel")

    def _send_event(self, text: str) -> None:
        channel = self._channel
        if channel is None:
            if self._has_channel:
                self._keep(text)
            return
        if channel.readyState != "open":
            return
        if channel.bufferedAmount > MAX_UNSENT:
            self._gone("the client receives no events")
            return
        try:
            channel.send(text)
        except ValueError as error:
            LOG.warning("an event is dropped: %s", error)


def _checked(offer: str) -> bool:
    """Whether an offer has a data channel. Raises: OfferError for one without the media of a call."""
    if (n_lines := offer.count("\n")) > MAX_LINES:
        raise OfferError(f"expected at most {MAX_LINES} lines, got {n_lines}")
    try:
        found = SessionDescription.parse(offer)
        kinds = [media.kind for media in found.media]
    except Exception as error:  # the parser raises many
        raise OfferError(f"expected an offer in SDP, got text that cannot be read: {error!r:.100}") from None
    counts = {kind: kinds.count(kind) for kind in kinds}
    is_call = counts.get("audio") == 1 and counts.get("video", 0) <= 1 and counts.get("application", 0) <= 1
    if not is_call or counts.keys() - {"audio", "video", "application"}:
        expected = "one audio section, and at most one of video and one of a data channel"
        raise OfferError(f"expected {expected}, got {', '.join(kinds)[:100] or 'none'}")
    bundled = {mid for group in found.group if group.semantic == "BUNDLE" for mid in group.items[1:]}
    for media in found.media:
        if media.rtp.muxId not in bundled and not (media.dtls and media.dtls.fingerprints):
            raise OfferError(f"expected a fingerprint, got none in the section {media.kind}")
    return "application" in counts
