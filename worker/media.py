"""A media file as units: one second of sound at 16 kHz, with its frames.

Contains the ffmpeg program and its pipes. One process decodes sound and another decodes video, as far as units are
read: memory is that of a few units for any length of the file, nothing is written to disk, and no process outlives the
iteration.
"""

import io
import logging
import os
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import ffmpeg
import imageio_ffmpeg
import numpy as np
from PIL import Image

from models.errors import ModelError
from models.inputs.audio_sizes import SAMPLE_RATE
from models.sampling.settings import check_number

MAX_FRAMES_PER_SECOND = 30
MIN_TAIL_S = 0.1  # codecs pad their last block; a shorter rest after the last whole second is not a unit

# Of files of clients.
MAX_FRAME_PIXELS = 8192 * 4352  # of a frame before it is scaled: 8K
MAX_THREADS = 2  # of a decoder, which would take all cores
MAX_PACKETS = 200_000  # that are read to learn the length

_SAMPLE_BYTES = 4
_NO_STREAM = "does not contain any stream"

logger = logging.getLogger(__name__)


class MediaError(ModelError, ValueError):
    """A media file is missing, has neither sound nor video, or cannot be decoded; or ffmpeg is missing."""


@dataclass(frozen=True, eq=False)
class MediaUnit:
    """One second of a file.

    Attributes:
        sound: [rate] float32 in [-1, 1], mono; zeros where the file has no sound.
        n_samples: leading samples that are from the file; the rest is padding.
        frames: RGB images at the video's size, at even intervals of the second; fewer at the end of the video.
    """

    sound: np.ndarray
    n_samples: int
    frames: list[Image.Image]


@dataclass(frozen=True)
class MediaLimits:
    """What the file of a client may take, and how it is read.

    Attributes:
        container: the only format that is accepted, by ffmpeg's name: ffmpeg's playlists and scripts name other files.
        seconds: of decoding.
        max_side: larger frames are scaled down to this many pixels.
    """

    container: str
    seconds: float
    max_side: int | None = None


@dataclass(frozen=True)
class MediaUnits:
    """The units of a file. Each iteration decodes it again; closing the iterator ends its processes.

    sound_s and video_s: seconds of both streams, known for files of clients only; less, if they have very many packets.
    rate: of the sound, Hz; a unit's sound has as many samples.

    Raises: MediaError, while iterating, if ffmpeg fails or decodes nothing.
    """

    path: Path
    has_sound: bool
    has_video: bool
    frames_per_second: int
    max_units: int | None
    limits: MediaLimits | None = None
    sound_s: float = 0.0
    video_s: float = 0.0
    rate: int = SAMPLE_RATE

    def __iter__(self) -> Generator[MediaUnit, None, None]:
        with ExitStack() as stack:
            sound = stack.enter_context(self._open_sound()) if self.has_sound else None
            video = stack.enter_context(self._open_video()) if self.has_video else None
            n = 0
            while n != self.max_units:
                samples = sound.read_samples(self.rate) if sound else np.zeros(0, np.float32)
                frames = _next_frames(video, self.frames_per_second) if video else []
                if not frames and (not len(samples) or (n and len(samples) < self.rate * MIN_TAIL_S)):
                    break
                padding = self.rate - len(samples)
                yield MediaUnit(np.pad(samples, (0, padding)), len(samples), frames)
                n += 1
        if not n:
            raise MediaError(str(self.path), expected="sound or video", got="nothing decoded")

    def _open_sound(self) -> "_Decoder":
        # Silence fills a late start and gaps, so that samples keep their time. The mix of all channels never clips;
        # float samples would otherwise become louder.
        in_time = f"aresample={self.rate}:async=1:first_pts=0:rematrix_maxval=1"
        form = {"ac": 1, "ar": self.rate, "format": "f32le", "acodec": "pcm_f32le"}
        return _Decoder(self.path, "a:0", limits=self.limits, af=in_time, **form)

    def _open_video(self) -> "_Decoder":
        # PPM images carry their size, so that it is not read in advance.
        filters = f"fps={self.frames_per_second}:start_time=0"
        if self.limits is not None and (side := self.limits.max_side) is not None:
            filters += f",scale='min({side},iw)':'min({side},ih)':force_original_aspect_ratio=decrease"
        form = {"format": "image2pipe", "vcodec": "ppm", "pix_fmt": "rgb24"}
        return _Decoder(self.path, "V:0", limits=self.limits, vf=filters, **form)


@contextmanager
def held_in_memory(data: bytes) -> Iterator[Path]:
    """A path to a file with this content that exists in memory, within the `with` block."""
    descriptor = os.memfd_create("media")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def read_units(
    path: str | Path,
    *,
    frames_per_second: int = 1,
    max_units: int | None = None,
    limits: MediaLimits | None = None,
    rate: int = SAMPLE_RATE,
) -> MediaUnits:
    """A media file's units, decoded while they are iterated over.

    Their number is the length in seconds of the longer of sound and video; the last one is padded with silence.

    Args:
        frames_per_second: frames in each unit, 0 to 30; 0 skips the video.
        max_units: maximum number of units; None: the whole file.
        limits: of the file of a client; None for a file of one's own, whose format ffmpeg detects.
        rate: of the sound, Hz.

    Raises: MediaError for a file that is missing or not media, or without ffmpeg; SettingsError.
    """
    check_number("frames_per_second", frames_per_second, at_least=0, at_most=MAX_FRAMES_PER_SECOND, whole=True)
    if max_units is not None:
        check_number("max_units", max_units, at_least=1, whole=True)
    path = Path(path)
    if not path.is_file():
        raise MediaError(str(path), expected="a media file", got="a folder" if path.is_dir() else "no such file")
    streams = _streams(path, max_units, limits)
    has_video = "video" in streams and frames_per_second > 0
    lengths = {"sound_s": streams.get("audio", 0.0), "video_s": streams.get("video", 0.0)}
    has_sound = "audio" in streams
    units = MediaUnits(path, has_sound, has_video, frames_per_second, max_units, limits, rate=rate, **lengths)
    if not units.has_sound and not units.has_video:
        raise MediaError(str(path), expected="sound or video", got="neither")
    if not units.has_sound and _is_still(path):
        raise MediaError(str(path), expected="sound or video", got="a still picture")
    return units


def _is_still(path: Path) -> bool:
    """Whether a file is a picture without animation."""
    try:
        with Image.open(path) as image:
            return getattr(image, "n_frames", 1) == 1
    except (OSError, ValueError, Image.DecompressionBombError):
        return False


def _streams(path: Path, max_units: int | None, limits: MediaLimits | None) -> dict[str, float]:
    """The streams of a file, of "audio" and "video": seconds of each. A cover picture is not video.

    The seconds are known for files of clients only, up to `max_units`: reading all packets takes a while.
    """
    seconds = (max_units or 0) if limits is not None else 0
    # The output of this format begins with a description of the streams, even without packets. A line of a packet has
    # the number of its stream, and three times: of decoding, of presentation, and its duration.
    form = {"codec": "copy", "t": seconds, "format": "framecrc"}
    kinds: dict[str, str] = {}
    bases: dict[str, float] = {}
    ends: dict[str, float] = {}
    with _Decoder(path, "a:0?", "V:0?", limits=limits, **form) as decoder:
        try:
            for _ in range(MAX_PACKETS):
                if not (line := decoder.read_line().decode(errors="replace")):
                    break
                word, _, rest = line.rstrip().partition(" ")
                number, _, value = rest.partition(": ")
                if word == "#media_type":
                    kinds[number] = value
                elif word == "#tb":
                    numerator, _, denominator = value.partition("/")
                    bases[number] = int(numerator) / int(denominator)
                elif not word.startswith("#"):
                    stream, _, start, duration, *_ = (text.strip() for text in line.split(","))
                    ends[stream] = max(ends.get(stream, 0.0), (int(start) + int(duration)) * bases[stream])
        except MediaError:
            if any(_NO_STREAM in line for line in decoder.errors):
                return {}
            raise
    return {kind: ends.get(number, 0.0) for number, kind in kinds.items()}


def _next_frames(video: "_Decoder", n: int) -> list[Image.Image]:
    frames: list[Image.Image] = []
    while len(frames) < n and video.read_line():  # P6
        width, height = (int(word) for word in video.read_line().split())
        video.read_line()  # 255, the maximum value
        frames.append(Image.frombytes("RGB", (width, height), video.read(width * height * 3)))
    return frames


class _Decoder:
    """An ffmpeg process that decodes a file into a pipe, running within its `with` block."""

    def __init__(self, path: Path, *streams: str, limits: MediaLimits | None = None, **output: object):
        own: dict[str, object] = {}
        if limits is not None:
            own = {"format": limits.container, "threads": MAX_THREADS}
            if "vf" in output:
                own["max_pixels"] = MAX_FRAME_PIXELS
        # The prefix makes ffmpeg treat any name as a file, and refuse playlists that refer to the network.
        source = ffmpeg.input(f"file:{path}", **own)
        into_pipe = ffmpeg.output(*(source[stream] for stream in streams), "pipe:", **output)
        quiet = into_pipe.global_args("-nostdin", "-hide_banner", "-loglevel", "error")
        self._command = quiet.compile(cmd=ffmpeg_program())
        self._path, self._limits = path, limits
        self._is_too_slow = False
        self.errors: deque[str] = deque(maxlen=8)

    def __enter__(self) -> Self:
        devnull, pipe = subprocess.DEVNULL, subprocess.PIPE
        # Unbuffered pipes: a buffer has a lock, and the interpreter aborts at exit if a daemon thread holds one.
        self._process = subprocess.Popen(self._command, stdin=devnull, stdout=pipe, stderr=pipe, bufsize=0)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._output, self._stderr = io.BufferedReader(cast(io.RawIOBase, self._process.stdout)), self._process.stderr
        # ffmpeg blocks on a full pipe, so a thread reads its error messages.
        self._reader = threading.Thread(target=self._read_errors, name="ffmpeg-stderr", daemon=True)
        self._reader.start()
        self._timer = None if self._limits is None else threading.Timer(self._limits.seconds, self._end_slow)
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def _end_slow(self) -> None:
        self._is_too_slow = True
        self._process.kill()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._output.close()
        self._stderr.close()

    def read(self, n: int) -> bytes:
        """The next `n` bytes, fewer at the end. Raises: MediaError if ffmpeg failed."""
        data = self._output.read(n)
        if len(data) < n:
            self._check_end()
        return data

    def read_samples(self, n: int) -> np.ndarray:
        """The next float32 samples, fewer at the end. Raises: MediaError."""
        return np.frombuffer(self.read(n * _SAMPLE_BYTES), "<f4")

    def read_line(self) -> bytes:
        """The next line, empty at the end. Raises: as `read`."""
        line = self._output.readline()
        if not line:
            self._check_end()
        return line

    def _check_end(self) -> None:
        status = self._process.wait()
        self._reader.join()
        last = self.errors[-1] if self.errors else ""
        if self._is_too_slow and self._limits is not None:
            expected = f"at most {self._limits.seconds:g} s of decoding"
            raise MediaError(str(self._path), expected=expected, got="a file that takes longer")
        if status:
            raise MediaError(str(self._path), expected="media that ffmpeg decodes", got=last or f"exit status {status}")
        if last:
            logger.warning("%s: decoded with errors: %s", self._path, last)
            self.errors.clear()

    def _read_errors(self) -> None:
        for line in self._stderr:
            if text := line.decode(errors="replace").strip():
                self.errors.append(text)


def ffmpeg_program() -> str:
    """Path of the system's ffmpeg, else of imageio-ffmpeg's."""
    if found := shutil.which("ffmpeg"):
        return found
    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError:
        raise MediaError("ffmpeg", expected="the program on the PATH", got="none; install ffmpeg") from None
