"""Small pictures, and what a limit of pixels counts."""

import base64
import io

import pytest
from PIL import Image


def png(width: int, height: int) -> bytes:
    """A picture of this size."""
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def png_text(width: int, height: int) -> str:
    """The same in base64."""
    return base64.b64encode(png(width, height)).decode()


def paced_pixels(monkeypatch: pytest.MonkeyPatch, module: str) -> list[int]:
    """Numbers of pixels that a module counts from now on, one of each picture or message."""
    counted: list[int] = []

    async def pace(n_pixels: int) -> None:
        counted.append(n_pixels)

    monkeypatch.setattr(f"{module}.pace_pixels", pace)
    return counted
