"""Items of messages as pictures, sound and frames: layout of videos, containers, limits."""

import base64
import io
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.errors import AudioError, ContextOverflowError, ImageError, MessageError
from models.inputs.image import EncodedImage, open_image
from models.inputs.messages import Part
from worker.chat import media_parts
from worker.chat.media_parts import LINE, DecodingCancelledError, MediaDecoder, stacked
from worker.media import MediaError, MediaUnits, ffmpeg_program
from worker.protocol.content import AnyContent, AudioContent, ChatTurn, ImageContent, TextContent, VideoContent

SIZE = (64, 48)
MAX_ROWS = 8192


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decoded(*items: AnyContent) -> tuple[Part, ...]:
    (message,) = MediaDecoder().decode([ChatTurn(role="user", content=list(items))], MAX_ROWS)
    return message.parts


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An MP4 of 2.5 s: its picture brightens, with a tone."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    video = f"color=black:s={SIZE[0]}x{SIZE[1]}:r=10:d=2.5,format=gray,geq=lum='20+8*N'"
    sources = ("-f", "lavfi", "-i", video, "-f", "lavfi", "-i", "sine=440:r=44100:d=2.5")
    subprocess.run([ffmpeg_program(), "-loglevel", "error", *sources, "-shortest", str(path)], check=True)
    return path.read_bytes()


def brightness(image: Part) -> float:
    assert isinstance(image, Image.Image)
    return float(np.asarray(image.convert("L")).mean())


def test_video_alternates_first_frame_and_second_of_sound(clip: bytes) -> None:
    parts = decoded(TextContent(text="Look:"), VideoContent(data=b64(clip)))
    assert parts[0] == "Look:"
    frames, sounds = parts[1::2], parts[2::2]
    assert [frame.size for frame in frames if isinstance(frame, Image.Image)] == [SIZE] * 3
    assert all(left < right for left, right in pairwise(map(brightness, frames)))
    assert [len(sound) for sound in sounds if isinstance(sound, np.ndarray)][:2] == [16000, 16000]
    assert len(sounds) == 3


def test_stacked_frames_follow_the_sound_of_their_second(clip: bytes) -> None:
    parts = decoded(VideoContent(data=b64(clip), stack_frames=5))
    kinds = [part.size if isinstance(part, Image.Image) else "sound" for part in parts]
    square = (2 * SIZE[0] + LINE, 2 * SIZE[1] + LINE)
    assert kinds[:6] == [SIZE, "sound", square, SIZE, "sound", square]
    assert brightness(parts[0]) < brightness(parts[2]) < brightness(parts[3])


@pytest.mark.parametrize(
    ("n", "size", "n_cols"), [(1, (64, 48), 1), (2, (64, 48), 1), (3, (20, 90), 3), (4, (64, 48), 2), (5, (9, 9), 5)]
)
def test_stacked_frames_are_laid_out_row_by_row(n: int, size: tuple[int, int], n_cols: int) -> None:
    width, height = size
    picture = stacked([Image.new("RGB", size, (50 + i, 0, 0)) for i in range(n)])
    n_rows = -(-n // n_cols)
    assert picture.size == (n_cols * width + (n_cols - 1) * LINE, n_rows * height + (n_rows - 1) * LINE)
    for i in range(n):
        row, col = divmod(i, n_cols)
        assert picture.getpixel((col * (width + LINE), row * (height + LINE))) == (50 + i, 0, 0)


def test_stacked_frames_share_the_pixels_of_one_frame(clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_parts, "MAX_SIDE", 16)
    for n_frames, side in ((1, 16), (4, 8)):
        frame = decoded(VideoContent(data=b64(clip), stack_frames=n_frames))[0]
        assert isinstance(frame, Image.Image) and max(frame.size) == side


def test_long_videos_keep_few_frames_and_all_sound(clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_parts, "MAX_VIDEO_FRAMES", 2)
    frame, sound, later, rest = decoded(VideoContent(data=b64(clip)))
    assert isinstance(sound, np.ndarray) and isinstance(rest, np.ndarray)
    assert len(sound) == 32000 and 0 < len(rest) <= 16000
    assert brightness(frame) < brightness(later)


def test_sound_files_are_decoded_and_samples_are_taken_as_they_are(clip: bytes, root: Path) -> None:
    (tone,) = decoded(AudioContent(data=b64(clip), sample_rate=44100))
    assert isinstance(tone, np.ndarray)
    assert abs(len(tone) - 40000) < 2000 and np.abs(tone).max() > 0.05
    samples = np.linspace(-1, 1, 8000, dtype=np.float32)
    (same,) = decoded(AudioContent(data=b64(samples.tobytes())))
    assert np.array_equal(same, samples)
    (wav,) = decoded(AudioContent(data=b64((root / "tests" / "data" / "question.wav").read_bytes())))
    assert isinstance(wav, np.ndarray) and len(wav) > 16000


def png(width: int, height: int) -> str:
    file = io.BytesIO()
    Image.new("RGBA", (width, height), (255, 0, 0, 255)).save(file, "PNG")
    return b64(file.getvalue())


def test_pictures_stay_encoded_until_they_are_cut() -> None:
    (picture,) = decoded(ImageContent(data=png(7, 5)))
    assert isinstance(picture, EncodedImage) and picture.size == (7, 5)
    assert (open_image(picture).size, open_image(picture).mode) == ((7, 5), "RGB")


def test_pictures_of_a_conversation_have_a_bound_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_parts, "MAX_CONVERSATION_PIXELS", 70)
    assert len(decoded(*2 * [ImageContent(data=png(7, 5))])) == 2
    with pytest.raises(ImageError, match="at most 70 pixels in all pictures, got 105 pixels"):
        decoded(*3 * [ImageContent(data=png(7, 5))])


def test_media_that_cannot_fit_the_context_are_not_decoded(clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.5 s of video are at least two pictures of 64 rows, twice with stacked frames, and 20 rows of sound."""

    def decode(item: AnyContent, max_rows: int) -> None:
        MediaDecoder().decode([ChatTurn(role="user", content=[TextContent(text="Look:"), item])], max_rows)

    decode(VideoContent(data=b64(clip)), 148)
    decode(AudioContent(data=b64(clip)), 20)
    monkeypatch.setattr(MediaUnits, "__iter__", lambda _: pytest.fail("expected no decoding"))
    for item, n_rows in (
        (VideoContent(data=b64(clip)), 148),
        (VideoContent(data=b64(clip), stack_frames=2), 276),
        (AudioContent(data=b64(clip)), 20),
        (AudioContent(data=b64(bytes(4 * 2 * 16000))), 20),
        (ImageContent(data=png(7, 5)), 64),
    ):
        with pytest.raises(ContextOverflowError, match=f"at most {n_rows - 1} rows, .* got {n_rows} or more of media"):
            decode(item, n_rows - 1)


def test_frames_of_all_videos_have_a_bound_of_pixels(clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_parts, "MAX_FRAME_PIXELS", 6 * SIZE[0] * SIZE[1])
    video = VideoContent(data=b64(clip))
    assert len(decoded(video, video)) == 12
    with pytest.raises(MediaError, match=r"content\[2\]: expected videos with at most 18432 pixels"):
        decoded(video, video, video)


def test_unfit_items_are_refused_by_place(clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_parts, "MAX_AUDIO_S", 1)
    monkeypatch.setattr(media_parts, "MAX_VIDEO_S", 1)
    silence = np.zeros(17000, np.float32).tobytes()
    wav = b"RIFF\x24\0\0\0WAVE"
    for item, kind, text in (
        (AudioContent(data=b64(b"playlist")), AudioError, "float32 samples or a sound file, got 8 bytes"),
        (AudioContent(data=b64(wav)), AudioError, "a wav file with sound"),
        (AudioContent(data=b64(silence)), AudioError, "at most 1 s, got 1.1 s"),
        (AudioContent(data=b64(clip)), AudioError, "at most 1 s, got 2.0 s"),
        (AudioContent(data=b64(silence[:400]), sample_rate=8000), AudioError, "sample_rate: expected 16000, got 8000"),
        (ImageContent(data=b64(b"GIF89a")), ImageError, r"messages\[0\].content\[0\]: expected"),
        (VideoContent(data=b64(b"#EXTM3U\nfile:///etc/passwd\n")), MediaError, "a video file such as MP4 or WebM"),
        (VideoContent(data=b64(clip[:200])), MediaError, "expected"),
        (VideoContent(data=b64(clip)), MediaError, "at most 1 s, got 2 s or more"),
    ):
        with pytest.raises(kind, match=text.replace("(", r"\(")):
            decoded(item)
    with pytest.raises(MessageError, match="at least one message, got none"):
        MediaDecoder().decode([], MAX_ROWS)


def test_cancelled_decoding_ends_before_the_next_item(clip: bytes) -> None:
    decoder = MediaDecoder()
    decoder.cancel()
    with pytest.raises(DecodingCancelledError):
        decoder.decode([ChatTurn(role="user", content=[VideoContent(data=b64(clip))])], MAX_ROWS)
