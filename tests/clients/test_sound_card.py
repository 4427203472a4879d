"""`SoundCard` with a fake `sounddevice` package."""

import asyncio
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from clients.sound_card import SoundCard
from models.errors import SettingsError

SPEECH = np.linspace(-1, 1, 40_000, dtype=np.float32)
BLOCK = 1_600


class Stream:
    """An open stream; `turn` calls its callback."""

    def __init__(self, *, callback: Any, samplerate: int, channels: int, dtype: str, blocksize: int = 0):
        assert (channels, dtype) == (1, "float32")
        self.callback, self.rate, self.is_open = callback, samplerate, False

    def __enter__(self) -> Self:
        self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False

    def turn(self, data: np.ndarray) -> np.ndarray:
        self.callback(data, len(data), None, None)
        return data[:, 0]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Stream]]:
    opened: dict[str, Stream] = {}

    def opening(kind: str) -> Any:
        return lambda **options: opened.setdefault(kind, Stream(**options))

    module = SimpleNamespace(
        InputStream=opening("input"),
        OutputStream=opening("output"),
        PortAudioError=type("PortAudioError", (OSError,), {}),
    )
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    yield opened


def test_microphone_gives_one_second_units(streams: dict[str, Stream]) -> None:
    async def story() -> None:
        async with SoundCard(delay_ms=0) as card:
            assert streams["input"].rate == 16_000 and streams["input"].is_open
            blocks = np.array_split(SPEECH, np.arange(700, len(SPEECH), BLOCK))  # blocks that do not align with seconds
            await asyncio.gather(*(asyncio.to_thread(streams["input"].turn, one[:, None]) for one in blocks[:1]))
            for one in blocks[1:]:
                streams["input"].turn(one[:, None])
            units = [await card.next() for _ in range(2)]
            got = np.concatenate([unit.sound for unit in units])
            assert np.array_equal(got, SPEECH[:32_000]) and units[0].jpegs == ()
        assert not streams["input"].is_open and not streams["output"].is_open

    asyncio.run(story())


def test_plays_sound_in_order(streams: dict[str, Stream]) -> None:
    async def story() -> None:
        async with SoundCard(delay_ms=1) as card:
            loud = np.full(30, 0.5, np.float32)
            card.play(loud)
            card.play(loud)
            assert streams["output"].rate == 24_000
            played = np.concatenate([streams["output"].turn(np.full((50, 1), 9, np.float32)) for _ in range(3)])
            expected = np.concatenate((np.zeros(24), np.full(60, 0.5), np.zeros(66)))
            assert np.array_equal(played, expected), f"expected 24 of silence, 60 of sound, silence; got {played}"
            card.play(loud)
            assert not streams["output"].turn(np.ones((24, 1), np.float32)).any(), "expected the delay after a break"

    asyncio.run(story())


def test_refuses_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(SettingsError, match=r"--mic: expected the sounddevice package \(pip install sounddevice"):
        SoundCard(0)


def test_refuses_missing_microphone(streams: dict[str, Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["sounddevice"]

    def fail(**_: Any) -> None:
        raise module.PortAudioError("no default input")

    monkeypatch.setattr(module, "InputStream", fail)

    async def story() -> None:
        with pytest.raises(SettingsError, match="expected a microphone and speakers, got no default input"):
            async with SoundCard(0):
                pass

    asyncio.run(story())
    assert not streams["output"].is_open
