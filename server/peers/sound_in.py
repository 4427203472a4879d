"""The incoming sound of a call: packets in their order, decoded for the engine, with sound for those that were lost."""

import time
from collections.abc import Callable

import numpy as np
from aiortc.jitterbuffer import JitterFrame
from aiortc.rtp import RtpPacket

from server.doors.live.sound.resample import ENGINE_RATE, pcm16_of
from server.peers.opus import OpusDecoder, OpusError

RTP_STEPS = 3  # of the clock of Opus in RTP, 48 kHz, for a sample at 16 kHz
SEND_SAMPLES = ENGINE_RATE * 40 // 1000  # that go to the gateway at once
MAX_REPAIR = ENGINE_RATE * 300 // 1000  # samples of lost sound; the gateway's clock completes longer gaps
MAX_WAITING = 3  # packets of 20 ms behind a missing one
MAX_AHEAD_S = 5.0  # of sound that comes faster than the clock, as after a pause of the network; more is dropped
MAX_JUMP = 100  # packets by which a sender may go back or ahead; more is a new stream


class IncomingSound:
    """Takes packets in place of aiortc's `JitterBuffer`, and decodes them itself.

    That one holds every packet for 80 ms, and 320 ms after the first loss. This one passes packets on at once
    and waits for a missing one until three more have come, 60 ms.

    Args:
        send: gets PCM16 at 16 kHz.
        clock: monotonic s.
    """

    def __init__(self, send: Callable[[bytes], None], clock: Callable[[], float] = time.monotonic):
        self._send, self._clock = send, clock
        self._ahead_s, self._at = 0.0, clock()  # sound that came faster than the clock, at this time
        self._decoder = OpusDecoder()
        self._next: int | None = None  # number of the packet whose turn it is
        self._packets: dict[int, RtpPacket] = {}
        self._expected: int | None = None  # time of that packet in RTP, if none is lost
        self._waiting: list[np.ndarray] = []
        self._n_waiting = 0

    def add(self, packet: RtpPacket) -> tuple[bool, JitterFrame | None]:
        """Take a packet. Returns: what aiortc needs to ask for no picture and to decode nothing."""
        number = packet.sequence_number
        ahead = 0 if self._next is None else (number - self._next + 2**15) % 2**16 - 2**15
        if self._next is None or abs(ahead) > MAX_JUMP:
            self._next, self._expected, ahead = number, None, 0
            self._packets.clear()
        if ahead >= 0:  # those before were given up
            self._packets[number] = packet
            self._pass_on(is_late=ahead >= MAX_WAITING)
        return False, None

    def _pass_on(self, *, is_late: bool) -> None:
        """Decode all packets in order. is_late: without those that are missing before the first."""
        assert self._next is not None
        while is_late and self._next not in self._packets:
            self._next = (self._next + 1) % 2**16
        while (packet := self._packets.pop(self._next, None)) is not None:
            self._next = (self._next + 1) % 2**16
            self._decode(packet.timestamp, packet._data)  # type: ignore[attr-defined]  # set by aiortc before it

    def _decode(self, at: int, data: bytes) -> None:
        """Decode a packet. at: its time in RTP."""
        if self._is_too_fast():
            return
        lost = 0 if self._expected is None else (at - self._expected + 2**31) % 2**32 - 2**31
        try:
            if 0 < lost <= MAX_REPAIR * RTP_STEPS:
                self._push(self._decoder.repair(lost // RTP_STEPS, data))
            sound = self._decoder.decode(data)
        except OpusError:
            return  # the next one finds it missing
        self._expected = (at + len(sound) * RTP_STEPS) % 2**32
        self._push(sound)

    def _is_too_fast(self) -> bool:
        """Whether so much sound came that the next packet is dropped: each may hold 120 ms in a few bytes."""
        now = self._clock()
        self._ahead_s, self._at = max(0.0, self._ahead_s - (now - self._at)), now
        return self._ahead_s > MAX_AHEAD_S

    def _push(self, sound: np.ndarray) -> None:
        self._ahead_s += len(sound) / ENGINE_RATE
        self._waiting.append(sound)
        self._n_waiting += len(sound)
        if self._n_waiting >= SEND_SAMPLES:
            self._send(pcm16_of(np.concatenate(self._waiting)))
            self._waiting, self._n_waiting = [], 0
