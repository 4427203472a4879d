"""Small pictures and sound files of every format that is accepted, and files that promise more than they hold."""

import io
import struct
import wave
import zlib
from functools import cache

import numpy as np
from PIL import Image

RATE = 16_000


@cache
def pictures() -> tuple[bytes, ...]:
    """JPEG, PNG, WebP, BMP and GIF in several modes, and pictures whose headers promise too much."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (24, 40, 4), np.uint8)
    rgb = Image.fromarray(pixels[..., :3])
    rgba = Image.fromarray(pixels)
    wide = Image.fromarray((rng.random((9, 9)) * 65_535).astype(np.uint16))
    files = [
        _saved(rgb, "JPEG"),
        _saved(rgb, "JPEG", progressive=True),
        _saved(rgb.convert("CMYK"), "JPEG"),
        _saved(rgb.convert("L"), "JPEG"),
        _saved(rgb, "PNG"),
        _saved(rgba, "PNG"),
        _saved(wide, "PNG"),
        _saved(rgb.convert("1"), "PNG"),
        _saved(rgb.quantize(16), "PNG"),
        _saved(rgb, "WEBP"),
        _saved(rgba, "WEBP", lossless=True),
        _saved(rgb, "BMP"),
        _saved(rgb, "GIF"),
        _saved(rgb, "GIF", save_all=True, append_images=[rgb] * 3),
        _saved(rgb, "PNG", save_all=True, append_images=[rgb] * 3),
        _saved(rgb, "TIFF"),
        _saved(rgb, "ICO"),
        _saved(rgb, "PPM"),
        _saved(rgb, "PDF"),
    ]
    files += [
        png(width, height) for width, height in ((60_000, 60_000), (2**31 - 1, 1), (0, 5), (8192, 8192), (1, 30_000))
    ]
    files.append(png(100, 100, zlib.compress(bytes(2**22))))  # pixels beyond the size in the header
    files.append(png(16, 16, b"", text=zlib.compress(bytes(2**22))))  # a compressed text that grows
    return tuple(files)


def _saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(width: int, height: int, data: bytes = b"x\x9c\x03\x00\x00\x00\x00\x01", text: bytes = b"") -> bytes:
    """A PNG with this size in its header, and these compressed pixels. text: of a compressed chunk of text."""

    def part(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = part(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    more = part(b"zTXt", b"a\0\0" + text) if text else b""
    return b"\x89PNG\r\n\x1a\n" + header + more + part(b"IDAT", data) + part(b"IEND", b"")


@cache
def sounds() -> tuple[bytes, ...]:
    """WAV files of several kinds, other containers' first bytes, and WAV headers that promise too much."""
    import soundfile

    samples = 0.1 * np.sin(np.arange(RATE) / 20).astype(np.float32)
    files = []
    for form, kind in (("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "ULAW"), ("WAV", "PCM_24"), ("FLAC", "PCM_16")):
        file = io.BytesIO()
        soundfile.write(file, samples, RATE, format=form, subtype=kind)
        files.append(file.getvalue())
    for form, kind in (("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")):
        file = io.BytesIO()
        soundfile.write(file, samples, RATE, format=form, subtype=kind)
        files.append(file.getvalue())
    files += [
        wav(2**31 - 1),
        wav(0),
        wav(100, channels=65_535),
        wav(100, rate=2**31),
        wav(100, rate=1),
        wav(100, bits=0),
    ]
    files += [
        b"RIFF",
        b"OggS" + bytes(40),
        b"fLaC" + bytes(60),
        b"ID3\x04\0\0\x7f\x7f\x7f\x7f",
        bytes(64),
        b"\xff\xfb" * 400,
    ]
    files += [b"\0\0\0\x20ftypisom" + bytes(400), b"\x1aE\xdf\xa3" + b"\xff" * 80, samples.tobytes()[:3200]]
    return tuple(files)


def wav(n_promised: int, *, channels: int = 1, rate: int = RATE, bits: int = 16) -> bytes:
    """A WAV file whose header promises this many bytes of sound, before 3200 that are there."""
    block = max(1, channels * bits // 8) & 0xFFFF
    form = struct.pack("<HHIIHH", 1, channels, rate, (rate * block) & 0xFFFFFFFF, block, bits)
    head = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", n_promised)
    return b"RIFF" + struct.pack("<I", (36 + n_promised) & 0xFFFFFFFF) + head + bytes(3200)


def speech(seconds: float = 1.0) -> bytes:
    """A valid WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as one:
        one.setnchannels(1)
        one.setsampwidth(2)
        one.setframerate(RATE)
        one.writeframes((8000 * np.sin(np.arange(int(RATE * seconds)) / 20)).astype("<i2").tobytes())
    return file.getvalue()
