"""An uploaded sound file of any format, or a video with sound, to samples.

An ffmpeg process of its own decodes it, so that a hostile file cannot harm the gateway.
"""

import binascii

import numpy as np

from models.errors import AudioError
from models.inputs.audio_sizes import SAMPLE_RATE
from worker.media import MediaError, MediaLimits, held_in_memory, read_units
from worker.protocol.content import container_of

MIN_S, MAX_S = 0.5, 30.0  # of a voice, as in the worker
MAX_FILE_BYTES = 16 * 2**20
DECODE_S = 30.0
PIECE_CHARS = 2**20  # a multiple of 4


class SoundTooLargeError(AudioError):
    """The sound is too long, or the file too large."""


def decoded_sound(text: str, *, rate: int = SAMPLE_RATE) -> np.ndarray:
    """The samples of a sound file, [n] float32, mono. Slow: call on a thread.

    Args:
        text: the file in base64, with or without a `data:...,` prefix.
        rate: of the samples, Hz.
    Raises: AudioError; SoundTooLargeError.
    """
    return samples_of_file(_file_bytes(text), "audio_base64", rate=rate)


def samples_of_file(data: bytes, what: str, max_s: float = MAX_S, *, rate: int = SAMPLE_RATE) -> np.ndarray:
    """The samples of a sound file of any format, [n] float32, mono. Slow: call on a thread.

    Args:
        what: the field's name, for errors.
        max_s: most seconds of sound.
        rate: of the samples, Hz.
    Raises: AudioError; SoundTooLargeError.
    """
    container = container_of(data)
    if container is None:
        raise AudioError(what, expected="a sound or video file", got=f"bytes that begin with {data[:8]!r}")
    with held_in_memory(data) as path:
        try:
            limits = MediaLimits(container, DECODE_S)
            units = list(read_units(path, frames_per_second=0, max_units=int(max_s) + 1, limits=limits, rate=rate))
        except MediaError as error:
            raise AudioError(what, expected=f"a {container} file with sound", got=error.got) from None
    samples: np.ndarray = np.concatenate([unit.sound[: unit.n_samples] for unit in units])
    samples = np.clip(np.nan_to_num(samples), -1, 1).astype(np.float32, copy=False)  # files of floats have any number
    seconds = len(samples) / rate
    if seconds > max_s:
        raise SoundTooLargeError(what, expected=f"up to {max_s:.0f} s of sound", got="more")
    if seconds < MIN_S:
        raise AudioError(what, expected=f"at least {MIN_S} s of sound", got=f"{seconds:.2f} s")
    return samples


def _file_bytes(text: str) -> bytes:
    """The decoded base64, in pieces: one call for the whole text would block all other threads meanwhile."""
    if text[:5].lower() == "data:":
        text = text[text.find(",", 0, 200) + 1 :]
    text = "".join(text.split())
    if len(text) // 4 * 3 > MAX_FILE_BYTES:
        expected = f"at most {MAX_FILE_BYTES} bytes"
        raise SoundTooLargeError("audio_base64", expected=expected, got=f"{len(text) // 4 * 3} bytes")
    pieces = (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))
    try:
        data = b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
    except ValueError as error:
        raise AudioError("audio_base64", expected="base64", got=str(error)) from None
    if not data:
        raise AudioError("audio_base64", expected="base64 of a sound file", got="no bytes")
    return data
