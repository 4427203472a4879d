"""The incoming track of a call as sound for the engine, and the order of its packets."""

import numpy as np
from aiortc.jitterbuffer import JitterFrame
from aiortc.rtp import RtpPacket
from av import AudioFrame

from server.doors.live.sound.resample import ENGINE_RATE, STEP, StreamResampler, pcm16_of

OPUS_RATE = 48_000  # Hz
SEND_SAMPLES = OPUS_RATE * 40 // 1000  # of sound that goes to the gateway at once
MAX_GAP = OPUS_RATE * 300 // 1000  # samples of lost sound; the gateway's clock completes longer gaps
MAX_WAITING = 3  # packets of 20 ms behind a missing one
MAX_JUMP = 100  # packets by which a sender may go back or ahead; more is a new stream


class IncomingSound:
    """Decoded frames in, PCM16 at 16 kHz out, with silence for lost packets."""

    def __init__(self) -> None:
        self._resampler = StreamResampler(OPUS_RATE, ENGINE_RATE)
        self._next: int | None = None  # position of the next frame
        self._waiting: list[np.ndarray] = []  # PCM16 of both channels, interleaved
        self._n_waiting = 0

    def push(self, frame: AudioFrame) -> bytes:
        """The sound that is complete now; often none. frame: stereo PCM16 at 48 kHz, interleaved."""
        at = frame.pts or 0
        if self._next is not None and at > self._next:
            self._add(np.zeros(2 * min(at - self._next, MAX_GAP), np.int16))
        self._next = at + frame.samples
        self._add(frame.to_ndarray().reshape(-1))
        if self._n_waiting < SEND_SAMPLES:
            return b""
        both = np.concatenate(self._waiting)
        self._waiting, self._n_waiting = [], 0
        mono = np.add(both[::2], both[1::2], dtype=np.float32) * (STEP / 2)
        return pcm16_of(self._resampler.push(mono))

    def _add(self, both: np.ndarray) -> None:
        self._waiting.append(both)
        self._n_waiting += len(both) // 2


class PacketOrder:
    """Packets of sound in the order of their numbers, in place of aiortc's `JitterBuffer`.

    That one holds every packet for 80 ms, and 320 ms for ever after the first loss. This one passes packets on at once
    and waits for a missing one until three more have come, 60 ms.
    """

    def __init__(self) -> None:
        self._next: int | None = None
        self._packets: dict[int, RtpPacket] = {}

    def add(self, packet: RtpPacket) -> tuple[bool, JitterFrame | None]:
        """Add a packet. Returns: false (no picture is lost), and the packet whose turn it is."""
        number = packet.sequence_number
        ahead = 0 if self._next is None else (number - self._next + 2**15) % 2**16 - 2**15
        if self._next is None or abs(ahead) > MAX_JUMP:
            self._next, ahead = number, 0
            self._packets.clear()
        if ahead < 0:
            return False, None  # was given up
        self._packets[number] = packet
        if self._next not in self._packets and ahead >= MAX_WAITING:
            while self._next not in self._packets:
                self._next = (self._next + 1) % 2**16
        found = self._packets.pop(self._next, None)
        if found is None:
            return False, None
        self._next = (self._next + 1) % 2**16
        data: bytes = found._data  # type: ignore[attr-defined]  # set by aiortc before it calls this
        return False, JitterFrame(data, found.timestamp)
