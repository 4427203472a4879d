"""The video of a recording: the user's pictures, the replay's sound, and the model's words as subtitles.

The subtitles are burnt into the picture where ffmpeg has libass, and are always a text track as well.
"""

import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import ffmpeg
from PIL import Image

from models.errors import ModelError
from server.recording.files import REPLAY_SOUND, REPLAY_VIDEO
from server.recording.render.built import BuiltRecording, Caption, Slide
from worker.media import MediaError, ffmpeg_program

FPS = 4  # pictures change once a second, subtitles at most as often
MAX_WIDTH, MAX_HEIGHT = 1280, 1280
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")  # as in units; PIL has others that start programs
MAX_PIXELS = 2**26  # of a picture; larger ones are left out
MAX_CAPTION_CHARS = 160
MIN_TIMEOUT_S = 120.0
MAX_ERROR_CHARS = 300
STYLE = "FontName=DejaVu Sans,FontSize=16,Outline=1,Shadow=0,MarginV=12"
# Characters that begin formatting in SubRip and in libass.
PLAIN = str.maketrans({"<": "‹", ">": "›", "{": "(", "}": ")", "\\": "/", "\r": " ", "\n": " "})


class VideoError(ModelError, RuntimeError):
    """The video could not be made."""


def write_video(folder: Path, built: BuiltRecording) -> None:
    """Write the video beside the replay's sound. Raises: VideoError."""
    try:
        program = ffmpeg_program()
    except MediaError as error:
        raise VideoError("ffmpeg", expected=error.expected, got=error.got) from None
    with TemporaryDirectory(prefix=".video-", dir=folder, ignore_cleanup_errors=True) as scratch:
        work = Path(scratch)
        slides = _usable(folder, work, built.slides)
        if not slides:
            raise VideoError("pictures", expected="at least one that can be decoded", got="none")
        (work / "slides.txt").write_text(_slide_list(slides, built.replay_s), encoding="utf-8")
        (work / "subtitles.srt").write_text(_subtitles(built.captions, built.replay_s), encoding="utf-8")
        _run(_command(program, folder, slides[0].path, built), work, built.replay_s)
        (work / REPLAY_VIDEO).replace(folder / REPLAY_VIDEO)


def _usable(folder: Path, work: Path, slides: list[Slide]) -> list[Slide]:
    """The pictures that can be decoded, as absolute paths of JPEG files: ffmpeg takes one format for all."""
    found = []
    for number, slide in enumerate(slides):
        path = (folder / slide.path).resolve()
        try:
            with Image.open(path, formats=FORMATS) as picture:
                if picture.width * picture.height > MAX_PIXELS:
                    continue
                if picture.format != "JPEG":
                    path = work / f"{number}.jpg"
                    picture.convert("RGB").save(path)
        except (OSError, ValueError, Image.DecompressionBombError):
            continue
        found.append(Slide(slide.at_s, str(path)))
    return found


def _slide_list(slides: list[Slide], seconds: float) -> str:
    """The list for ffmpeg's concat demuxer; the first picture is shown from the beginning."""
    starts = [0.0, *(slide.at_s for slide in slides[1:]), max(seconds, slides[-1].at_s + 1)]
    lines = ["ffconcat version 1.0"]
    for slide, (start, end) in zip(slides, pairwise(starts), strict=True):
        lines += [f"file {_quoted(slide.path)}", f"duration {end - start:.3f}"]
    lines.append(f"file {_quoted(slides[-1].path)}")  # the last duration counts only before a further file
    return "\n".join(lines) + "\n"


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def _subtitles(captions: list[Caption], seconds: float) -> str:
    """SubRip text. Each caption ends where the next one begins."""
    blocks = []
    ends = [caption.at_s for caption in captions[1:]] + [max(seconds, captions[-1].at_s + 1)] if captions else []
    for number, (caption, end) in enumerate(zip(captions, ends, strict=True), 1):
        text = " ".join(caption.text.translate(PLAIN).split())
        if len(text) > MAX_CAPTION_CHARS:
            text = "…" + text[-MAX_CAPTION_CHARS:]
        blocks.append(f"{number}\n{_timestamp(caption.at_s)} --> {_timestamp(end)}\n{text}\n")
    return "\n".join(blocks)


def _timestamp(seconds: float) -> str:
    ms = round(1000 * seconds)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02},{ms % 1000:03}"


def _command(program: str, folder: Path, first_slide: str, built: BuiltRecording) -> list[str]:
    """ffmpeg's command line, to run in the scratch folder: names of its files need no quoting in filters."""
    width, height = _size(first_slide)
    pictures = ffmpeg.input("slides.txt", format="concat", safe=0)
    sound = ffmpeg.input(str((folder / REPLAY_SOUND).resolve()))
    fitted = (
        pictures.filter("scale", width, height, force_original_aspect_ratio="decrease", force_divisible_by=2)
        .filter("pad", width, height, "(ow-iw)/2", "(oh-ih)/2")
        .filter("setsar", 1)
        .filter("fps", FPS)
    )
    streams = [fitted, sound["a"]]
    text_codec = {}
    if built.captions:
        if _has_libass(program):
            streams[0] = fitted.filter("subtitles", "subtitles.srt", force_style=STYLE)
        streams.append(ffmpeg.input("subtitles.srt", format="srt")["s"])
        text_codec = {"scodec": "mov_text"}
    output = ffmpeg.output(
        *streams,
        REPLAY_VIDEO,
        vcodec="libx264",
        preset="veryfast",
        tune="stillimage",
        crf=26,
        pix_fmt="yuv420p",
        acodec="aac",
        audio_bitrate="96k",
        movflags="+faststart",
        threads=1,
        t=built.replay_s,
        **text_codec,
    )
    quiet = output.global_args("-nostdin", "-hide_banner", "-loglevel", "error", "-y")
    command: list[str] = quiet.compile(cmd=program)
    return command


def _size(picture: str) -> tuple[int, int]:
    """Width and height of the video: those of the first picture, limited, and even as H.264 needs them."""
    with Image.open(picture) as image:
        width, height = image.size
    share = min(1.0, MAX_WIDTH / width, MAX_HEIGHT / height)
    return max(2, round(width * share) // 2 * 2), max(2, round(height * share) // 2 * 2)


@cache
def _has_libass(program: str) -> bool:
    listed = subprocess.run([program, "-hide_banner", "-filters"], capture_output=True, text=True, check=False)
    return any(line.split()[1:2] == ["subtitles"] for line in listed.stdout.splitlines())


def _run(command: list[str], work: Path, seconds: float) -> None:
    timeout = MIN_TIMEOUT_S + 2 * seconds
    try:
        done = subprocess.run(
            command, cwd=work, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise VideoError("ffmpeg", expected=f"the video within {timeout:.0f} s", got="none") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip()[-MAX_ERROR_CHARS:]
        raise VideoError("ffmpeg", expected="a video", got=last or f"exit status {done.returncode}")
