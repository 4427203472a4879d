"""What the tests of media files share: a clip, and a check that no process, pipe or thread remains."""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.media.files import encode, running, slides, tone


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen]]:
    """All processes that a test starts. At its end no process, pipe or thread of them may remain."""
    processes: list[subprocess.Popen] = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    yield processes
    assert not running(processes), f"expected no process left, got {running(processes)}"
    pipes = [pipe for process in processes for pipe in (process.stdout, process.stderr) if pipe]
    assert all(pipe.closed for pipe in pipes), "expected all pipes closed"
    listeners = [thread for thread in threading.enumerate() if thread.name == "ffmpeg-stderr"]
    assert not listeners, f"expected no listener left, got {listeners}"


@pytest.fixture(scope="package")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.6 s of colours and tone."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    return encode(path, *slides(1, 1, 1, 0.6), *tone(3.6), "-c:v", "libx264", "-c:a", "aac")
