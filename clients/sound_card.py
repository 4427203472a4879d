"""Microphone and speakers through the optional `sounddevice` package."""

import asyncio
import contextlib
import importlib
import threading
from collections import deque
from types import ModuleType
from typing import Any, Self

import numpy as np

from clients.units import ClientUnit, MessageLength
from models.errors import SettingsError
from models.inputs.audio_sizes import SAMPLE_RATE
from worker.protocol.wire import SOUND_RATE

BLOCK = SAMPLE_RATE // 50
INSTALL = "pip install sounddevice; on Linux also PortAudio (apt install libportaudio2)"


class SoundCard:
    """A sound card, used as `async with`: a `Source` of units, or of pieces of them, and `play` for the reply."""

    def __init__(self, delay_ms: int, length: MessageLength | None = None):
        """
        Args:
            delay_ms: delay before sound that follows silence, which avoids gaps.
            length: of each message; None: whole units.
        Raises:
            SettingsError: without the package or without PortAudio.
        """
        self._module, self._delay = _sounddevice(), delay_ms * SOUND_RATE // 1000
        self._length = length or MessageLength(None)
        self._heard: asyncio.Queue[np.ndarray] = asyncio.Queue()
        self._second = np.zeros(0, np.float32)  # the part of the next unit that was recorded so far
        self._lock = threading.Lock()  # PortAudio calls on its own thread
        self._waiting: deque[np.ndarray] = deque()

    async def __aenter__(self) -> Self:
        self._event_loop = asyncio.get_running_loop()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(
                    self._module.OutputStream(
                        samplerate=SOUND_RATE, channels=1, dtype="float32", callback=self._on_output
                    )
                )
                stack.enter_context(
                    self._module.InputStream(
                        samplerate=SAMPLE_RATE, channels=1, dtype="float32", blocksize=BLOCK, callback=self._on_input
                    )
                )
                self._streams = stack.pop_all()
        except self._module.PortAudioError as error:
            raise SettingsError("--mic", expected="a microphone and speakers", got=str(error)) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._streams.close()

    async def next(self) -> ClientUnit | None:
        """The next second or piece of the microphone; sound is buffered between calls."""
        n = self._length.next()
        while len(self._second) < n:
            self._second = np.concatenate((self._second, await self._heard.get()))
        sound, self._second = np.split(self._second, [n])
        return ClientUnit(sound)

    def play(self, pcm: np.ndarray) -> None:
        """Play sound after the queued sound. pcm: [n] float32 at 24 kHz."""
        with self._lock:
            if not self._waiting and self._delay:
                self._waiting.append(np.zeros(self._delay, np.float32))
            self._waiting.append(pcm)

    def drop(self) -> None:
        """Drop the sound that is not played yet."""
        with self._lock:
            self._waiting.clear()

    def _on_input(self, data: np.ndarray, n_frames: int, times: Any, status: Any) -> None:
        block = data[:, 0].copy()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._event_loop.call_soon_threadsafe(lambda: self._heard.put_nowait(block))

    def _on_output(self, data: np.ndarray, n_frames: int, times: Any, status: Any) -> None:
        done = 0
        with self._lock:
            while self._waiting and done < n_frames:
                pcm = self._waiting.popleft()
                n = min(len(pcm), n_frames - done)
                data[done : done + n, 0] = pcm[:n]
                done += n
                if n < len(pcm):
                    self._waiting.appendleft(pcm[n:])
        data[done:, 0] = 0


def _sounddevice() -> ModuleType:
    try:
        return importlib.import_module("sounddevice")
    except ImportError:
        raise SettingsError("--mic", expected=f"the sounddevice package ({INSTALL})", got="none") from None
    except OSError as error:
        raise SettingsError("--mic", expected=f"PortAudio ({INSTALL})", got=str(error)) from None
