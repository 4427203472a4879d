"""Traced sessions with everything that a client may send.

`python -m tests.worker.trace.scenes` writes the corpus anew.
"""

import queue
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from tests.models.token2wav.stream.vocoders import make_voice
from tests.worker.loop.engines import TINY
from worker.config.session import EngineConfig, SessionConfig, WindowConfig
from worker.early.trial import EarlyTrial
from worker.engine import Engine
from worker.loop.early.early_job import EarlyJob, TakenBackError
from worker.loop.early.headroom import Headroom
from worker.loop.prompt.system_prompt import Adjustment, SystemPrompt
from worker.loop.results import Event, Failure, InsertedText, UnitResult
from worker.loop.session_handle import SessionHandle
from worker.trace.header import header_of
from worker.trace.recorder import TraceRecorder
from worker.trace.records import Record, to_line

CORPUS = Path(__file__).parent / "corpus"
PATIENCE_S = 120.0
SESSION = SessionConfig(
    force_listen_count=0,
    max_new_speak_tokens_per_chunk=4,
    early_unit="auto",
    window=WindowConfig(high_tokens=260, low_tokens=160),
)
CONFIG = EngineConfig(model_path=TINY, device="cpu", max_sessions=1, llm_len=512, euler_steps=1, session=SESSION)
PROMPT = SystemPrompt.of("Be kind.", np.zeros(8000, np.float32), make_voice(0, 30))


def tone(number: int, n: int = 16_000) -> np.ndarray:
    """Sound of 16 bits that compresses well."""
    wave = 6000 * np.sin(2 * np.pi * (number + 2) * 100 * np.arange(n) / 16_000)
    return (np.rint(wave).astype(np.int16) / np.float32(32768)).astype(np.float32)


class Scene:
    """One session of an engine, driven by a test."""

    def __init__(self, engine: Engine, recorder: TraceRecorder):
        self._recorder = recorder
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.handle: SessionHandle = engine.open("scene", SESSION, self._events.put).result(PATIENCE_S)
        self.handle.prepare(PROMPT).result(PATIENCE_S)

    def wait(self, kind: Any = UnitResult | Failure) -> Event:
        """The next event of a kind."""
        while not isinstance(event := self._events.get(timeout=PATIENCE_S), kind):
            pass
        return event

    def unit(self, number: int, n: int = 16_000, **given: Any) -> Event:
        self.handle.send(tone(number, n), **given).result(PATIENCE_S)
        return self.wait()

    def cut_unit(self, number: int) -> Event:
        """A unit that is interrupted after its first token."""

        def interrupt(_: str) -> None:
            self._recorder.changed = None
            self.handle.break_speech()

        self._recorder.changed = interrupt
        return self.unit(number)

    def close(self) -> None:
        self.handle.close().result(PATIENCE_S)


def play_all(scene: Scene) -> list[Event]:
    """Units with sound, a picture and a text, an interrupt inside a unit, a pause, other settings, an early unit."""
    picture = Image.new("RGB", (64, 64), (200, 30, 90))
    outcomes = [scene.unit(0), scene.unit(1, frames=[picture]), scene.cut_unit(2)]
    scene.handle.insert_text("user", "What is this?").result(PATIENCE_S)
    scene.wait(InsertedText)
    scene.handle.pause().result(PATIENCE_S)
    scene.handle.resume().result(PATIENCE_S)
    change = Adjustment(scene.handle.config.model_copy(update={"temperature": 0.3}), voice=make_voice(1, 20))
    scene.handle.adjust(change).result(PATIENCE_S)
    outcomes += [scene.unit(3, force_listen=True), scene.unit(4, 6000, early=EarlyTrial())]
    return [*outcomes, scene.unit(5), scene.unit(6)]


def play_moved(scene: Scene) -> list[Event]:
    """An early unit that changed nothing, and after it the context of a session that has moved."""

    def listens(job: EarlyJob, token: int) -> None:
        raise TakenBackError("the unit listens")

    first = scene.unit(0, force_listen=True)
    with mock.patch.object(EarlyJob, "on_token", listens):
        scene.unit(1, 6000, early=EarlyTrial())
    scene.unit(2, 10_000)
    second = scene.unit(3)
    scene.handle.prepare(PROMPT).result(PATIENCE_S)
    for number, event in ((0, first), (3, second)):
        assert isinstance(event, UnitResult)
        rebuilt = scene.unit(number, force_listen=number == 0, decided=event.decided)
        assert isinstance(rebuilt, UnitResult), rebuilt
    return [scene.unit(4)]


def play_long(scene: Scene) -> list[Event]:
    """More units than the window holds, so that the context is evicted."""
    return [scene.unit(number, force_listen=bool(number % 3)) for number in range(18)]


SCENES = {"everything": play_all, "moved": play_moved, "long": play_long}


def traced(config: EngineConfig = CONFIG, play: Any = play_all) -> tuple[list[Record], list[Event]]:
    """The records and outcomes of a scene on a new engine."""
    records: list[Record] = []
    recorder = TraceRecorder(lambda _: lambda make: None if make is None else records.append(make()), is_on=True)
    with Engine.build(config, recorder=recorder) as engine:
        recorder.header = header_of(engine.parts, config)
        scene = Scene(engine, recorder)
        with mock.patch.object(Headroom, "allows", lambda *_: True):  # on a machine of any speed
            outcomes = play(scene)
        scene.close()
    return records, outcomes


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for name, play in SCENES.items():
        records, _ = traced(play=play)
        (CORPUS / f"{name}.trace.jsonl").write_text("".join(map(to_line, records)), encoding="utf-8")
