import numpy as np
from aiortc.rtp import RtpPacket
from av import AudioFrame

from server.doors.live.sound.resample import floats_of
from server.peers.sound_in import IncomingSound, PacketOrder

FRAME = 960  # samples of 20 ms at 48 kHz


def packet(number: int) -> RtpPacket:
    one = RtpPacket(sequence_number=number % 2**16, timestamp=number * FRAME)
    one._data = str(number % 2**16).encode()
    return one


def passed(*numbers: int) -> list[int]:
    """The packets that are passed on, in order, when these arrive."""
    order = PacketOrder()
    found = [order.add(packet(number))[1] for number in numbers]
    return [int(one.data) for one in found if one is not None]


def test_packets_in_order_are_not_held_back() -> None:
    assert passed(65_534, 65_535, 65_536, 65_537) == [65_534, 65_535, 0, 1]


def test_packets_are_put_in_order() -> None:
    assert passed(1, 3, 2, 4, 5) == [1, 2, 3, 4], "expected one packet for each that arrives"
    assert passed(5, 6, 6, 4, 7) == [5, 6, 7], "expected no packet twice, and none before the first"


def test_a_lost_packet_delays_the_others_by_three() -> None:
    assert passed(1, 3, 4) == [1]
    assert passed(1, 3, 4, 5, 6, 7) == [1, 3, 4, 5]


def test_a_new_stream_begins_at_once() -> None:
    assert passed(1, 2, 5000, 5001) == [1, 2, 5000, 5001]


def frame(samples: np.ndarray, at: int) -> AudioFrame:
    """A stereo frame. samples: [n] int16 of both channels. at: position in samples."""
    one = AudioFrame.from_ndarray(np.repeat(samples, 2)[None], format="s16", layout="stereo")
    one.sample_rate, one.pts = 48_000, at
    return one


def test_frames_become_sound_at_16_khz_with_silence_for_lost_ones() -> None:
    wave = (8000 * np.sin(2 * np.pi * 1000 * np.arange(50 * FRAME) / 48_000)).astype(np.int16)
    sound = IncomingSound()
    kept = [index for index in range(50) if index not in (20, 21)]
    parts = [sound.push(frame(wave[index * FRAME : (index + 1) * FRAME], index * FRAME)) for index in kept]
    samples = floats_of(b"".join(parts))
    assert abs(len(samples) - 16_000) < 700
    lost = samples[20 * 320 + 40 : 22 * 320 - 40]
    assert np.abs(lost).max() < 0.01, "expected silence for the lost packets"
    for part in (samples[1000:6000], samples[23 * 320 : 15_000]):
        peak = np.abs(np.fft.rfft(part * np.hanning(len(part)))).argmax() * 16_000 / len(part)
        assert abs(peak - 1000) < 5 and 0.22 < np.abs(part).max() < 0.27


def test_a_long_gap_is_left_to_the_clock() -> None:
    sound, quiet = IncomingSound(), np.zeros(FRAME, np.int16)
    sound.push(frame(quiet, 0))
    n = len(sound.push(frame(quiet, 100 * 48_000))) // 2
    assert n == 16_000 * (300 + 40) // 1000
