"""How much sound a message has, without decoding it. Torch-free."""

from worker.protocol.codec import SOUND_BEGINS
from worker.protocol.wire import WireError, read_header

RATE_OUT = 24_000
PCM16 = "pcm16"
CHARS_PER_SAMPLE = 16 / 3  # base64 of float32


def output_sound_s(data: str | bytes, sound_out: str) -> float:
    """Seconds of sound of a message of the server. sound_out: encoding of the sound in binary frames."""
    if isinstance(data, bytes):
        return frame_samples(data, sound_out) / RATE_OUT
    begin = data.find(SOUND_BEGINS)
    return 0.0 if begin < 0 else (len(data) - begin - len(SOUND_BEGINS)) / CHARS_PER_SAMPLE / RATE_OUT


def frame_samples(data: bytes, encoding: str) -> float:
    """Samples of a binary frame."""
    try:
        n_bytes = read_header(data).get("audio_bytes")
    except WireError:
        return 0.0
    return min(n_bytes, len(data)) / (2 if encoding == PCM16 else 4) if isinstance(n_bytes, int) else 0.0
