"""A half-duplex client that a test controls step by step, and recorded sentences for it."""

import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import soundfile
from websockets.frames import Opcode

from tests.worker.http.client_scripts import base64_of
from tests.worker.http.processes import ROOT, WorkerProcess
from tests.worker.http.scripted_client import ScriptedClient
from worker.protocol.half_duplex_messages import (
    HALF_DUPLEX_SERVER,
    AnswerInterrupted,
    HalfDuplexAnswer,
    TurnDone,
    TurnPrepared,
)

DEAF_S = 0.5  # sound is ignored for this long after `prepared`
PIECE = 8_000  # samples of a message
SHORT = {"generation": {"max_new_tokens": 8, "seed": 1}}
QUIET = {**SHORT, "tts": {"enabled": False}}


@cache
def sentence(name: str = "greeting") -> np.ndarray:
    """A recorded sentence at 16 kHz between a quarter of a second and 0.8 s of silence."""
    wave = soundfile.read(ROOT / f"tests/data/{name}.wav", dtype="float32")[0]
    return np.concatenate((np.zeros(4_000, np.float32), wave, np.zeros(12_800, np.float32)))


class HalfDuplexScript(ScriptedClient):
    """One client of /ws/half_duplex."""

    def __init__(self, worker: WorkerProcess | int, session_id: str | None = None, **options: Any):
        super().__init__(worker, session_id, path="/ws/half_duplex", **options)

    def read(self, opcode: Opcode, data: bytes) -> HalfDuplexAnswer:
        assert opcode is Opcode.TEXT, f"expected text frames only, got {opcode}"
        return HALF_DUPLEX_SERVER.read_text(data.decode())

    def begin(self, config: Mapping[str, Any] = SHORT, **fields: Any) -> TurnPrepared:
        """Prepare, and wait until sound counts."""
        self.send({"type": "prepare", "config": config, **fields})
        prepared = self.expect(TurnPrepared)
        time.sleep(DEAF_S + 0.05)
        return prepared

    def push(self, wave: np.ndarray, **fields: Any) -> None:
        """Send sound in pieces of half a second, without pacing. fields: others of each message."""
        for start in range(0, len(wave), PIECE):
            self.send({"type": "audio_chunk", "audio_base64": base64_of(wave[start : start + PIECE]), **fields})

    def until(self, kind: type, timeout: float | None = None) -> list[HalfDuplexAnswer]:
        """All messages up to the first of this kind."""
        messages = [self.receive(timeout)]
        while not isinstance(messages[-1], kind):
            messages.append(self.receive(timeout))
        return messages

    def say(self, wave: np.ndarray) -> list[HalfDuplexAnswer]:
        """Push a sentence. Returns: the messages up to the end of its answer."""
        self.push(wave)
        return self.until(TurnDone)

    def settled(self) -> list[HalfDuplexAnswer]:
        """The messages that were sent before the server had processed all messages so far."""
        self.send({"type": "interrupt"})
        return self.until(AnswerInterrupted)[:-1]
