"""Sound files: reads prompts of any format that libsndfile supports, writes speech as 16-bit WAV."""

import io
import os
from pathlib import Path

import soundfile
import torch
from torch import Tensor

from models.atomic_file import write_atomically
from models.errors import AudioError, NumericsError
from models.token2wav.prompt.prompt_sound import MAX_SECONDS, check_duration, check_form
from models.token2wav.settings import SAMPLE_RATE

PCM_MAX = 32767
# A program that writes to a pipe cannot fill in the length afterwards and leaves a value near the field's limit.
_LENGTH_UNKNOWN = 0x7FFF_F000


def read_sound(path: str | Path, *, max_seconds: int = MAX_SECONDS) -> tuple[Tensor, int]:
    """The samples [channels, n] float32 in [-1, 1] of a prompt, or of a longer sound, and their rate in Hz.

    Args:
        path: a WAV, FLAC, Ogg, MP3, AIFF or similar file.
        max_seconds: longest duration that is accepted.
    Raises: AudioError if the file cannot be read, is truncated, is not a sound file, or is outside the limits of a
        prompt (checked before any samples are read). An Ogg file truncated between two pages is accepted, because its
        header contains no length.
    """
    what = str(path)
    try:
        with open(path, "rb", buffering=0) as file:
            _check_complete(file, what)
            # By descriptor: given a name, libsndfile would trust the extension more than the content.
            with soundfile.SoundFile(file.fileno(), closefd=False) as sound:
                check_form(sound.samplerate, sound.channels, what=what)
                check_duration(sound.frames, sound.samplerate, what=what, max_seconds=max_seconds)
                samples = sound.read(dtype="float32", always_2d=True)
                rate, n_expected = sound.samplerate, sound.frames
    except OSError as error:
        raise AudioError(what, expected="a readable file", got=error.strerror) from None
    except soundfile.LibsndfileError as error:
        raise AudioError(what, expected="a sound file", got=error.error_string) from None
    if len(samples) < n_expected:
        raise AudioError(what, expected=f"{n_expected} samples", got=f"{len(samples)}, then the file ends")
    return torch.from_numpy(samples.T.copy()), rate


def write_sound(path: str | Path, wave: Tensor) -> None:
    """Write speech as a 16-bit mono WAV file.

    Args:
        path: replaced atomically.
        wave: [n] float at 24 kHz; clipped to [-1, 1].
    Raises: OSError, and an existing file is unchanged; NumericsError for samples that are not finite.
    """
    n_bad = int((~wave.isfinite()).sum())
    if n_bad:
        raise NumericsError("speech", expected="finite samples", got=f"{n_bad} of {len(wave)} NaN or infinite")
    pcm = (wave.float().clamp(-1, 1) * PCM_MAX).round().to(torch.int16)
    data = io.BytesIO()
    soundfile.write(data, pcm.cpu().numpy(), SAMPLE_RATE, format="WAV", subtype="PCM_16")
    write_atomically(Path(path), data.getvalue())


def _check_complete(file: io.FileIO, what: str) -> None:
    """Check the length in the header of a WAV or AIFF file, because libsndfile accepts truncated files."""
    n_bytes, head = os.fstat(file.fileno()).st_size, file.read(8)
    file.seek(0)
    if head[:4] not in (b"RIFF", b"FORM"):
        return
    expected = 8 + int.from_bytes(head[4:], "little" if head[:4] == b"RIFF" else "big")
    # Some programs count a padding byte that they do not write.
    if n_bytes + 1 < expected < _LENGTH_UNKNOWN:
        raise AudioError(what, expected=f"{expected} bytes", got=f"{n_bytes}: the file is truncated")
