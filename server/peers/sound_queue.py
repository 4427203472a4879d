"""The sound of responses that waits for its time, packet by packet. Contains no clock and no encoding."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from server.peers.frames import FrameKind

RATE_MS = 48  # bytes of PCM16 at 24 kHz
PACKET_MS = 20
PACKET_BYTES = PACKET_MS * RATE_MS
Report = Callable[[FrameKind, int, float], None]


@dataclass
class _Response:
    """Sound of one response. n_held: packets for which it is held back before its first."""

    n_held: int
    parts: deque[bytes] = field(default_factory=deque)
    is_started: bool = False
    is_ended: bool = False
    sent: int = 0


class SoundQueue:
    """Responses in their order: one sounds after the other.

    Args:
        report: gets STARTED, STOPPED and CLEARED with the number of a response and the milliseconds of it that were
            taken.
        delay_ms: for which the first sound of a response is held back, so that later sound may be late.
    """

    def __init__(self, report: Report, delay_ms: int):
        self._report, self._n_held = report, delay_ms // PACKET_MS
        self._responses: OrderedDict[int, _Response] = OrderedDict()

    def play(self, number: int, pcm16: bytes) -> None:
        """Add sound of a response. number: of the response. pcm16: at 24 kHz."""
        response = self._responses.setdefault(number, _Response(self._n_held))
        if pcm16:
            response.parts.append(pcm16)

    def end(self, number: int) -> None:
        """The response has no more sound. Without effect for one that was cleared."""
        if number in self._responses:
            self._responses[number].is_ended = True

    def clear(self) -> None:
        """Drop all sound."""
        for number, response in self._responses.items():
            self._report(FrameKind.CLEARED, number, response.sent / RATE_MS)
        self._responses.clear()

    def take(self) -> bytes | None:
        """The next packet of PCM16; None for silence."""
        packet = b""
        while self._responses and len(packet) < PACKET_BYTES:
            number, response = next(iter(self._responses.items()))
            if not response.is_started and response.n_held and not response.is_ended:
                response.n_held -= 1
                break
            if response.parts:
                if not response.is_started:
                    response.is_started = True
                    self._report(FrameKind.STARTED, number, 0.0)
                packet += self._piece(response, PACKET_BYTES - len(packet))
            elif response.is_ended:
                del self._responses[number]
                self._report(FrameKind.STOPPED, number, response.sent / RATE_MS)
            else:
                break
        return packet.ljust(PACKET_BYTES, b"\0") if packet else None

    def _piece(self, response: _Response, n_bytes: int) -> bytes:
        part = response.parts.popleft()
        if len(part) > n_bytes:
            response.parts.appendleft(part[n_bytes:])
            part = part[:n_bytes]
        response.sent += len(part)
        return part
