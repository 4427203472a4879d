import math

import numpy as np
import pytest
from aiortc.rtp import RtpPacket
from av import AudioFrame

from server.doors.live.sound.resample import floats_of
from server.peers.opus import OpusDecoder, OpusError
from server.peers.sound_in import MAX_AHEAD_S, IncomingSound
from server.peers.sound_out import _encoder

STEP = 960  # of the RTP clock for a packet of 20 ms
HZ, N = 300, 50


def encoded(n: int = N) -> list[bytes]:
    """Packets of a tone."""
    encoder, found = _encoder(), []
    wave = (9000 * np.sin(2 * np.pi * HZ * np.arange(n * 480) / 24_000)).astype(np.int16)
    for index in range(n):
        frame = AudioFrame.from_ndarray(wave[None, index * 480 : (index + 1) * 480], format="s16", layout="mono")
        frame.sample_rate, frame.pts = 24_000, index * 480
        found += [bytes(packet) for packet in encoder.encode(frame)]
    return found


PACKETS = encoded()


def received(*numbers: int, first: int = 65_520, jump: int = 0) -> np.ndarray:
    """The sound of these packets, [n] float32.

    Args:
        first: number of the first in RTP.
        jump: of the clock before the last.
    """
    parts: list[bytes] = []
    sound = IncomingSound(parts.append)
    for at, number in enumerate(numbers):
        time = 2**32 - 5 * STEP + number * STEP + (jump if at == len(numbers) - 1 else 0)
        packet = RtpPacket(sequence_number=(first + number) % 2**16, timestamp=time % 2**32)
        packet._data = PACKETS[number]
        assert sound.add(packet) == (False, None)
    return floats_of(b"".join(parts))


WHOLE = received(*range(N))


def test_packets_become_sound_at_16_khz() -> None:
    assert len(WHOLE) == N * 320
    middle = WHOLE[1600:-1600]
    peak = np.abs(np.fft.rfft(middle * np.hanning(len(middle)))).argmax() * 16_000 / len(middle)
    assert abs(peak - HZ) < 5 and 0.2 < np.abs(middle).max() < 0.35


def test_packets_are_put_in_order_without_a_delay() -> None:
    order = list(range(N))
    order[10:13] = [12, 10, 11]
    assert np.array_equal(received(*order), WHOLE)
    assert np.array_equal(received(*range(20), 19, 5, *range(20, N)), WHOLE), (
        "expected late and doubled ones to be left"
    )
    assert len(received(*range(20))) == 20 * 320, "expected no packet to be held back"


@pytest.mark.parametrize("n_lost", [1, 3])
def test_lost_packets_are_repaired(n_lost: int) -> None:
    """The sound keeps its length, and the gap sounds like what is around it."""
    kept = [number for number in range(N) if not 20 <= number < 20 + n_lost]
    got = received(*kept)
    assert len(WHOLE) - len(got) in (0, 320), "expected at most the last packet to wait for the next"
    loudness = [math.sqrt(float(np.mean(part[20 * 320 : (20 + n_lost) * 320] ** 2))) for part in (got, WHOLE)]
    assert loudness[0] > 0.4 * loudness[1], f"expected sound in the gap, got {loudness}"


def test_a_missing_packet_delays_the_others_by_three() -> None:
    assert len(received(*range(10), 11, 12)) == 10 * 320
    assert len(received(*range(10), 11, 12, 13)) == 14 * 320


def test_a_long_gap_is_left_to_the_clock() -> None:
    assert len(received(*range(20), jump=60 * 48_000)) == 20 * 320


def test_a_new_stream_begins_at_once() -> None:
    parts: list[bytes] = []
    sound = IncomingSound(parts.append)
    for number in (5, 6, 30_000, 30_001):
        packet = RtpPacket(sequence_number=number, timestamp=7)
        packet._data = PACKETS[0]
        sound.add(packet)
    assert len(b"".join(parts)) == 2 * 4 * 320


def test_sound_faster_than_the_clock_is_dropped() -> None:
    parts, now = list[bytes](), 0.0
    sound = IncomingSound(parts.append, lambda: now)
    for number in range(2 * N * 10):  # 20 s at once, then 2 s later once more
        now = 0.0 if number < N * 10 else 2.0
        packet = RtpPacket(sequence_number=number, timestamp=number * STEP)
        packet._data = PACKETS[number % N]
        sound.add(packet)
    seconds = len(b"".join(parts)) / 2 / 16_000
    assert 6.9 < seconds < 7.5, f"expected {MAX_AHEAD_S} s and the 2 s that passed, got {seconds:.2f} s"


def test_a_packet_that_is_none_is_left_out() -> None:
    with pytest.raises(OpusError, match="got 3 bytes"):
        OpusDecoder().decode(b"\xff\xff\xff")
