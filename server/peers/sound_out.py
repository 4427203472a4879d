"""The outgoing track of a call: Opus packets at the pace of the clock, silence where no response sounds."""

import asyncio
import time
from fractions import Fraction
from typing import Any

import numpy as np
from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame, CodecContext
from av.audio.codeccontext import AudioCodecContext
from av.packet import Packet

from server.doors.live.sound.resample import SPEECH_RATE
from server.peers.sound_queue import PACKET_BYTES, PACKET_MS, SoundQueue

RTP_RATE = 48_000  # Hz, of the clock of Opus in RTP
STEP = RTP_RATE * PACKET_MS // 1000
BIT_RATE = 32_000
COMPLEXITY = 5  # of 10, which takes about twice the time for speech
MAX_LATE_S = 0.5  # by which packets may be sent late in a row; then the clock begins again
SILENCE = bytes(PACKET_BYTES)


class OutgoingSound(MediaStreamTrack):
    """A track that encodes what a queue has. It sends packets, which aiortc passes on without a codec of its own."""

    kind = "audio"

    def __init__(self, queue: SoundQueue):
        super().__init__()
        self._queue = queue
        self._encoder = _encoder()
        self._at = 0  # of the next packet, in `PACKET_MS`
        self._begun_at: float | None = None

    async def recv(self) -> "Packet[Any]":
        """The next packet, when it is due."""
        if self.readyState != "live":
            raise MediaStreamError
        now = time.monotonic()
        if self._begun_at is None:
            self._begun_at = now
        wait_s = self._begun_at + self._at * PACKET_MS / 1000 - now
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        elif wait_s < -MAX_LATE_S:
            self._begun_at -= wait_s
        return self._packet(self._queue.take() or SILENCE)

    def _packet(self, pcm16: bytes) -> "Packet[Any]":
        frame = AudioFrame.from_ndarray(np.frombuffer(pcm16, "<i2")[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = SPEECH_RATE, self._at * len(pcm16) // 2
        [packet] = self._encoder.encode(frame)
        packet.pts, packet.time_base = self._at * STEP, Fraction(1, RTP_RATE)
        self._at += 1
        return packet


def _encoder() -> AudioCodecContext:
    """An encoder of speech whose packets carry a copy of the one before (FEC), for receivers that lose some."""
    encoder = CodecContext.create("libopus", "w")
    assert isinstance(encoder, AudioCodecContext)
    encoder.sample_rate, encoder.bit_rate = SPEECH_RATE, BIT_RATE
    encoder.format, encoder.layout = "s16", "mono"
    encoder.time_base = Fraction(1, SPEECH_RATE)
    encoder.options = {"application": "voip", "frame_duration": str(PACKET_MS), "compression_level": str(COMPLEXITY)}
    encoder.options |= {"fec": "1", "packet_loss": "5"}
    return encoder
