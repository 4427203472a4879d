"""Processes of clients that a benchmark starts, and the speech that the clients send.

A process reads its load as a line of JSON from standard input and writes the line `begin`. Its standard input ends once
all processes have. It writes the line `end`, and then its result as a line of JSON.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile

from benchmarks.serve.processes import ROOT
from server.doors.live.sound.resample import SPEECH_RATE, StreamResampler, pcm16_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class ClientProcess:
    """One running process. python: interpreter. module: of the clients. load: dataclass that the process reads."""

    def __init__(self, python: str, module: str, load: "DataclassInstance"):
        command = [python, "-m", module]
        self._process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(asdict(load))}\n")
        self._process.stdin.flush()

    def expect(self, word: str) -> None:
        """Wait for a line. Raises: RuntimeError for another one."""
        if (line := self._line()) != word:
            raise RuntimeError(f"clients: expected {word}, got {line or 'their end'}")

    def go(self) -> None:
        """All processes have written `begin`."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def result(self) -> Any:
        """The result, after `end`."""
        return json.loads(self._line())

    def stop(self) -> None:
        """End the process, if it runs."""
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def client_processes(python: str, module: str, loads: Sequence["DataclassInstance"]) -> Iterator[list[ClientProcess]]:
    """A process for each load, all of which have written `begin`; they are stopped at the end."""
    clients: list[ClientProcess] = []
    try:
        clients += [ClientProcess(python, module, load) for load in loads]
        for client in clients:
            client.expect("begin")
        for client in clients:
            client.go()
        yield clients
    finally:
        for client in clients:
            client.stop()


def speech_pcm16(path: Path, quiet_s: float = 0.0) -> bytes:
    """A sound file as PCM16 at 24 kHz, and silence after it. quiet_s: of silence."""
    sound, rate = soundfile.read(path, dtype="float32", always_2d=True)
    speech = pcm16_of(StreamResampler(rate, SPEECH_RATE).push(np.ascontiguousarray(sound[:, 0])))
    return speech + bytes(2 * round(quiet_s * SPEECH_RATE))
