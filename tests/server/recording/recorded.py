"""Recordings for tests: a started set of recordings, and conversations whose messages are recorded."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from server.recording.files import read_json
from server.recording.recordings import NoMetrics, Recording, Recordings, recordings_of
from server.recording.timeline import FILE_NAME
from worker.protocol.messages import AudioChunk, Message, Partial, Prepare, Prepared, Result, Spec, write
from worker.protocol.wire import Sound

DONE_S = 60.0


@contextmanager
def recordings_in(data_dir: Path, *, is_enabled: bool = True) -> Iterator[Recordings]:
    """Recordings below a folder, closed on exit."""
    recordings = recordings_of(data_dir, NoMetrics(), is_enabled=is_enabled)
    recordings.open()
    try:
        yield recordings
    finally:
        recordings.close()


def wait_done(recordings: Recordings, recording_id: str) -> dict[str, Any]:
    """Wait until a recording is complete. Returns: the content of `recording.json`."""
    folder, until = recordings.store.folder_of(recording_id), time.monotonic() + DONE_S
    while not (folder / "recording.json").exists() or (folder / FILE_NAME).exists():
        assert time.monotonic() < until, f"expected a complete recording within {DONE_S:g} s, got {list_of(folder)}"
        time.sleep(0.02)
    content = read_json(folder / "recording.json")
    assert content is not None
    return content


def list_of(folder: Path) -> list[str]:
    """All files below a folder, as relative paths."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def tone(hertz: float, seconds: float, rate: int, loudness: float = 0.5) -> np.ndarray:
    """[n] float32."""
    return (loudness * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def result(number: int, *, text: str = "", sound: np.ndarray | None = None, ends: bool = False, **more: Any) -> Result:
    """A result; it speaks if it has text."""
    return Result(
        is_listen=not text,
        text=text,
        audio_data=None if sound is None else Sound(sound),
        end_of_turn=ends,
        current_time=number,
        cost_all_ms=20.0,
        server_send_ts=0.0,
        wall_clock_ms=30.0,
        kv_cache_length=100 * number,
        stages={"prefill": 5.0},
        **more,
    )


class Conversation:
    """Records messages of both sides, encoded as `spec` says."""

    def __init__(self, recording: Recording, spec: Spec | None = None, **prepare: Any):
        self.recording, self.spec = recording, spec or Spec()
        self.client(Prepare(spec=self.spec, **prepare))
        self.worker(Prepared(prompt_length=10, spec=self.spec))

    def client(self, message: Message) -> None:
        self.recording.from_client(write(message, self.spec))

    def worker(self, message: Message) -> None:
        self.recording.from_worker(write(message, self.spec))

    def chunk(self, sound: np.ndarray, *pictures: bytes, **more: Any) -> None:
        self.client(AudioChunk(audio_base64=Sound(sound), frame_base64_list=list(pictures), **more))

    def part(self, number: int, part: int, sound: np.ndarray, text: str = "") -> None:
        self.worker(Partial(current_time=number, part=part, text=text, audio_data=Sound(sound)))
