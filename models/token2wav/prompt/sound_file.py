"""Sound files: prompts of any format that libsndfile reads, and speech as 16-bit WAV.

Knows containers. Does not know what the sound is for, beyond the limits of a prompt.
"""

import io
import os
from pathlib import Path

import soundfile
import torch
from torch import Tensor

from models.atomic_file import write_atomically
from models.errors import AudioError, NumericsError
from models.token2wav.prompt.prompt_sound import check_duration, check_form
from models.token2wav.settings import SAMPLE_RATE

PCM_MAX = 32767
# Writers into a pipe cannot go back to fill in the length, and leave one that is near or at the field's limit.
_LENGTH_UNKNOWN = 0x7FFF_F000


def read_sound(path: str | Path) -> tuple[Tensor, int]:
    """A prompt's samples and their rate, from a WAV, FLAC, Ogg, MP3, AIFF or similar file.

    Returns: [channels, n] float32 in [-1, 1], and Hz.
    Raises: AudioError if the file cannot be read, is cut short, is no sound, or is beyond the limits of a prompt
        (told before any samples are read). Ogg cut between two of its pages passes: its header tells no length.
    """
    what = str(path)
    try:
        with open(path, "rb", buffering=0) as file:
            _check_complete(file, what)
            # By descriptor: of a name, the extension would count more than what is in the file.
            with soundfile.SoundFile(file.fileno(), closefd=False) as sound:
                check_form(sound.samplerate, sound.channels, what=what)
                check_duration(sound.frames, sound.samplerate, what=what)
                samples = sound.read(dtype="float32", always_2d=True)
                rate, promised = sound.samplerate, sound.frames
    except OSError as error:
        raise AudioError(what, expected="a readable file", got=error.strerror) from None
    except soundfile.LibsndfileError as error:
        raise AudioError(what, expected="a sound file", got=error.error_string) from None
    if len(samples) < promised:
        raise AudioError(what, expected=f"{promised} samples", got=f"{len(samples)}, then the file ends")
    return torch.from_numpy(samples.T.copy()), rate


def write_sound(path: str | Path, wave: Tensor) -> None:
    """Speech [n] float at 24 kHz as a mono WAV file of 16 bits; what goes beyond [-1, 1] is clipped.

    Raises: OSError, with an older file as it was; NumericsError for samples that are no numbers.
    """
    n_bad = int((~wave.isfinite()).sum())
    if n_bad:
        raise NumericsError("speech", expected="finite samples", got=f"{n_bad} of {len(wave)} NaN or infinite")
    pcm = (wave.float().clamp(-1, 1) * PCM_MAX).round().to(torch.int16)
    data = io.BytesIO()
    soundfile.write(data, pcm.cpu().numpy(), SAMPLE_RATE, format="WAV", subtype="PCM_16")
    write_atomically(Path(path), data.getvalue())


def _check_complete(file: io.FileIO, what: str) -> None:
    """libsndfile takes a WAV or AIFF file that was cut off for a shorter one; its first chunk knows better."""
    n_bytes, head = os.fstat(file.fileno()).st_size, file.read(8)
    file.seek(0)
    order = {b"RIFF": "little", b"FORM": "big"}.get(head[:4])
    if order is None:
        return
    expected = 8 + int.from_bytes(head[4:], order)
    # Some writers count a padding byte that they do not write.
    if n_bytes + 1 < expected < _LENGTH_UNKNOWN:
        raise AudioError(what, expected=f"{expected} bytes", got=f"{n_bytes}: the file was cut short")
