"""Messages with encoded items to messages with decoded parts: pictures, sound, video as frames and seconds of sound.

Contains decoding, its limits, and the layout of a video. Does not contain prompts. Slow: call on a thread.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
from PIL import Image

from models.errors import AudioError, ContextOverflowError, ImageError, MessageError
from models.inputs.audio_sizes import SAMPLE_RATE
from models.inputs.image import MAX_PIXELS, EncodedImage
from models.inputs.messages import ChatMessage, MessageCall, Part
from worker.media import MediaError, MediaLimits, MediaUnit, MediaUnits, held_in_memory, read_units
from worker.protocol.content import (
    RATE_IN,
    AnyContent,
    AudioContent,
    ChatTurn,
    Container,
    ImageContent,
    TextContent,
    VideoContent,
    container_of,
    raw_samples,
)

MAX_AUDIO_S, MAX_VIDEO_S = 480, 300
MAX_VIDEO_FRAMES = 64  # a longer video keeps fewer frames than one a second, at even intervals
MAX_SIDE = 1280  # pixels of a video's frame; a larger one costs memory and yields no further detail
# Stacked frames share the pixels of one, so that the memory of a video does not depend on their number.
MIN_SOUND = SAMPLE_RATE // 10  # samples of a video's last second
DECODE_S = 120.0  # of one file
MAX_CONVERSATION_PIXELS = 4 * MAX_PIXELS  # of the pictures, which are decoded to cut them
MAX_FRAME_PIXELS = 2 * MAX_VIDEO_FRAMES * MAX_SIDE**2  # of the frames of all videos, which are held decoded
IMAGE_ROWS = 64  # least context rows of a picture
LAST_S = 0.9  # of a file that is too long by its packets; decoding tells for a shorter rest
ROWS_PER_S = 10  # least context rows of a second of sound
LINE = 6  # pixels between stacked frames
BLACK = (0, 0, 0)


class DecodingCancelledError(Exception):
    """The client has gone while its media were decoded."""


class MediaDecoder:
    """Decodes the items of one request. `cancel` ends a decoding on another thread at the next second of media."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._max_rows = self._n_rows = self._n_frame_pixels = 0

    def cancel(self) -> None:
        self._cancelled.set()

    def decode(self, turns: Sequence[ChatTurn], max_rows: int) -> list[ChatMessage]:
        """The conversation for `MessageReader.read`.

        Args:
            turns: the messages.
            max_rows: length of the context; media that cannot fit are not decoded.
        Raises: WireError for bad base64 and sizes; ImageError, AudioError, MediaError, MessageError;
            ContextOverflowError; DecodingCancelledError.
        """
        if not turns:
            raise MessageError("messages", expected="at least one message", got="none")
        self._max_rows, self._n_rows, self._n_frame_pixels = max_rows, 0, 0
        messages = []
        for i, turn in enumerate(turns):
            if isinstance(turn.content, str):
                parts: tuple[Part, ...] = (turn.content,)
            else:
                items = enumerate(turn.content)
                parts = tuple(part for j, item in items for part in self._parts(item, f"messages[{i}].content[{j}]"))
            calls = tuple(MessageCall(call.name, call.arguments) for call in turn.tool_calls)
            messages.append(ChatMessage(turn.role, parts, calls))
        check_pixels(messages)
        return messages

    def _reserve(self, n_rows: int) -> None:
        """Count context rows that media take at least. Raises: ContextOverflowError."""
        self._n_rows += n_rows
        if self._n_rows > self._max_rows:
            expected = f"at most {self._max_rows} rows, prompt and answer"
            raise ContextOverflowError("conversation", expected=expected, got=f"{self._n_rows} or more of media")

    def _parts(self, item: AnyContent, what: str) -> Iterator[Part]:
        self._check_cancelled()
        match item:
            case TextContent():
                yield item.text
            case ImageContent():
                self._reserve(IMAGE_ROWS)
                try:
                    picture = EncodedImage.of(item.payload(what))
                except ImageError as error:
                    raise ImageError(what, expected=error.expected, got=error.got) from None
                yield picture
            case AudioContent():
                yield self._sound(item, what)
            case VideoContent():
                yield from self._video(item, what)

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise DecodingCancelledError

    # --- sound ---------------------------------------------------------------------------------

    def _sound(self, item: AudioContent, what: str) -> np.ndarray:
        data = item.payload(what)
        container, samples = container_of(data), raw_samples(data)
        if samples is None and container is not None:
            samples = self._decoded_sound(data, container, what)
        elif samples is None:
            raise AudioError(what, expected="float32 samples or a sound file", got=f"{len(data)} bytes of another kind")
        elif item.sample_rate != RATE_IN:
            raise AudioError(f"{what}.sample_rate", expected=RATE_IN, got=item.sample_rate)
        else:
            self._reserve(ROWS_PER_S * (len(samples) // SAMPLE_RATE))
        if len(samples) > MAX_AUDIO_S * SAMPLE_RATE:
            raise AudioError(what, expected=f"at most {MAX_AUDIO_S} s", got=f"{len(samples) / SAMPLE_RATE:.1f} s")
        return samples

    def _decoded_sound(self, data: bytes, container: Container, what: str) -> np.ndarray:
        with held_in_memory(data) as path:
            try:
                # One unit above the limit is read, so that a longer file is refused and not cut.
                limits = MediaLimits(container, DECODE_S)
                units = read_units(path, frames_per_second=0, max_units=MAX_AUDIO_S + 1, limits=limits)
                if units.sound_s > MAX_AUDIO_S + LAST_S:
                    raise AudioError(what, expected=f"at most {MAX_AUDIO_S} s", got=f"{units.sound_s:.1f} s")
                self._reserve(ROWS_PER_S * int(units.sound_s))
                seconds = [unit.sound[: unit.n_samples] for unit in self._each(units)]
            except MediaError as error:
                raise AudioError(what, expected=f"a {container} file with sound", got=error.got) from None
        return np.concatenate(seconds)

    # --- video ---------------------------------------------------------------------------------

    def _video(self, item: VideoContent, what: str) -> Iterator[Part]:
        data = item.payload(what)
        if (container := container_of(data)) is None:
            raise MediaError(what, expected="a video file such as MP4 or WebM", got="a file of another kind")
        with held_in_memory(data) as path:
            try:
                units = read_units(
                    path,
                    frames_per_second=item.stack_frames,
                    max_units=MAX_VIDEO_S + 1,
                    limits=MediaLimits(container, DECODE_S, int(MAX_SIDE / item.stack_frames**0.5)),
                )
                if not units.has_video:
                    raise MediaError(what, expected="a file with video", got="one with sound only")
                if (length_s := max(units.sound_s, units.video_s)) > MAX_VIDEO_S + LAST_S:
                    raise MediaError(what, expected=f"at most {MAX_VIDEO_S} s", got=f"{length_s:.0f} s or more")
                self._reserve(_least_rows(units, item.stack_frames))
                spans = _thinned(self._each(units))
            except MediaError as error:
                raise MediaError(what, expected=error.expected, got=error.got) from None
        if (n_seconds := sum(len(span.seconds) for span in spans)) > MAX_VIDEO_S:
            raise MediaError(what, expected=f"at most {MAX_VIDEO_S} s", got=f"{n_seconds} s or more")
        self._n_frame_pixels += sum(span.n_pixels for span in spans)
        if self._n_frame_pixels > MAX_FRAME_PIXELS:
            expected = f"videos with at most {MAX_FRAME_PIXELS} pixels in their frames together"
            raise MediaError(what, expected=expected, got=f"{self._n_frame_pixels} pixels or more")
        for span in spans:
            yield from span.parts()

    def _each(self, units: MediaUnits) -> Iterator[MediaUnit]:
        with closing(iter(units)) as each:
            for unit in each:
                self._check_cancelled()
                yield unit


class VideoSpan:
    """One or more seconds of a video that share the frames of the first.

    Attributes:
        frames: frames of the first second.
        seconds: sound of each second, [n] float32 at 16 kHz, n from 0 to 16000.
    """

    def __init__(self, unit: MediaUnit):
        self.frames = unit.frames
        self.seconds = [unit.sound[: unit.n_samples]]

    def extend(self, later: "VideoSpan") -> None:
        """Append a span without its frames."""
        self.seconds += later.seconds

    @property
    def n_pixels(self) -> int:
        return sum(frame.width * frame.height for frame in self.frames)

    def parts(self) -> Iterator[Part]:
        """The first frame, the sound, and the other frames as one picture."""
        if self.frames:
            yield self.frames[0]
        sound = np.concatenate(self.seconds)
        if len(sound):
            yield np.pad(sound, (0, max(MIN_SOUND - len(sound), 0)))
        if len(self.frames) > 1:
            yield stacked(self.frames[1:])


def check_pixels(messages: Sequence[ChatMessage]) -> None:
    """Refuse pictures that take too long to decode together. Raises: ImageError."""
    n_pixels = sum(part.n_pixels for message in messages for part in message.parts if isinstance(part, EncodedImage))
    if n_pixels > MAX_CONVERSATION_PIXELS:
        expected = f"at most {MAX_CONVERSATION_PIXELS} pixels in all pictures"
        raise ImageError("messages", expected=expected, got=f"{n_pixels} pixels")


def _least_rows(units: MediaUnits, stack_frames: int) -> int:
    """Context rows that a video takes at least."""
    longest = int(max(units.sound_s, units.video_s)) + 2
    length = 1  # seconds of a span
    while longest > length * MAX_VIDEO_FRAMES:
        length *= 2
    n_pictures = int(units.video_s) // length * min(stack_frames, 2)
    return n_pictures * IMAGE_ROWS + int(units.sound_s) * ROWS_PER_S


def _thinned(units: Iterator[MediaUnit]) -> list[VideoSpan]:
    """At most MAX_VIDEO_FRAMES spans of equal length; the last one may be shorter."""
    spans: list[VideoSpan] = []
    length = 1  # seconds of a span
    for unit in units:
        span = VideoSpan(unit)
        if spans and len(spans[-1].seconds) < length:
            spans[-1].extend(span)
            continue
        spans.append(span)
        if len(spans) > MAX_VIDEO_FRAMES:
            for first, second in zip(spans[::2], spans[1::2], strict=False):
                first.extend(second)
            spans, length = spans[::2], 2 * length
    return spans


def stacked(frames: Sequence[Image.Image]) -> Image.Image:
    """Frames of one size as one picture, row by row, with black lines between them.

    Four frames are a square. Two or three are a row or a column, whichever is closer to a square. Other numbers are a
    row. The released model is trained with this layout.
    """
    n, (width, height) = len(frames), frames[0].size
    if n == 1:
        return frames[0]

    def size(n_rows: int, n_cols: int) -> tuple[int, int]:
        return n_cols * width + (n_cols - 1) * LINE, n_rows * height + (n_rows - 1) * LINE

    def distance(grid: tuple[int, int]) -> float:
        whole_width, whole_height = size(*grid)
        return abs(whole_width / whole_height - 1)

    grids = {4: [(2, 2)], 2: [(1, n), (n, 1)], 3: [(1, n), (n, 1)]}.get(n, [(1, n)])
    n_rows, n_cols = min(grids, key=distance)  # the row, if both are equally close
    picture = Image.new("RGB", size(n_rows, n_cols), BLACK)
    for i, frame in enumerate(frames):
        row, col = divmod(i, n_cols)
        picture.paste(frame, (col * (width + LINE), row * (height + LINE)))
    return picture
