"""The omni model and the speech model on one engine thread: neither changes what the other one says."""

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from assets.build_tiny_speech import build
from models.qwen3_tts.prompt import Array
from tests.worker.engine.engine_callers import PATIENCE_S, TIGHT, Talker, Turnstile
from tests.worker.loop.engines import QUIET, content_of, make_config, make_parts
from worker.engine import Engine
from worker.engine_thread import EngineError, EngineThread
from worker.loop.results import UnitResult
from worker.protocol.speech_messages import SpeakRequest
from worker.speech.model import SpeechModel
from worker.speech.speech_loop import SpokenSound
from worker.speech.start import start_speech
from worker.speech.voices import VoiceFolders

pytestmark = pytest.mark.usefixtures("short_units")
TOLERANCE = 1e-5


class Pair:
    """Both models. turnstile: holds the thread within a unit."""

    def __init__(self, engine: Engine, speech: SpeechModel, turnstile: Turnstile):
        self.engine, self.speech, self.turnstile = engine, speech, turnstile

    def begin(self, seed: int, frames: int = 6) -> "queue.SimpleQueue[SpokenSound | Exception]":
        """The events of a text that begins."""
        events: queue.SimpleQueue[SpokenSound | Exception] = queue.SimpleQueue()
        planned = self.speech.plan(SpeakRequest(text="Good morning.", seed=seed, max_frames=frames))
        [ids] = self.speech.parts_of(planned)
        self.speech.begin(self.speech.request(planned, ids, 0, is_open=False), events.put, is_open=False)
        return events


def sound_of(events: "queue.SimpleQueue[SpokenSound | Exception]") -> Array:
    parts: list[Array] = []
    while True:
        event = events.get(timeout=PATIENCE_S)
        assert isinstance(event, SpokenSound), event
        parts.append(event.samples)
        if event.end is not None:
            return np.concatenate(parts)


def units(talker: Talker, n: int) -> list[object]:
    """The results of units that follow each other: several that wait would make the session listen to catch up."""
    results: list[object] = []
    for number in range(n):
        talker.send(number)
        results += [content_of(one) for one in talker.wait() if isinstance(one, UnitResult)]
    return results


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    config = make_config(session=QUIET, speech_sessions=2, speech_rows=256)
    parts, turnstile = make_parts(config), Turnstile()
    thread = EngineThread(parts.model.device)
    thread.start()
    folder = build(tmp_path_factory.mktemp("speech"))
    folders = VoiceFolders(Path("none"), Path("none"), None)
    speech = start_speech(folder, config, parts.model.device, thread, folders, lambda *_: None)
    engine = Engine(parts, config, observer=turnstile, thread=thread)
    engine.start()
    yield Pair(engine, speech, turnstile)
    speech.close()
    engine.close()
    thread.close()


def test_units_and_texts_beside_each_other_are_as_alone(pair: Pair) -> None:
    alone = sound_of(pair.begin(3))
    talker = Talker(pair.engine, "talker", TIGHT, speaker=0)
    expected = units(talker, 3)
    talker.leave()
    beside, texts = Talker(pair.engine, "talker", TIGHT, speaker=0), [pair.begin(3), pair.begin(4)]
    got = units(beside, 3)
    beside.leave()
    assert got == expected
    sounds = [sound_of(events) for events in texts]
    assert sounds[0].shape == alone.shape and np.abs(sounds[0] - alone).max() <= TOLERANCE


def test_a_failed_thread_ends_both(pair: Pair) -> None:
    """The last test of the file: the thread has ended after it."""
    talker = Talker(pair.engine, "failing", TIGHT, speaker=0)
    with pair.turnstile.holding("failing", lambda: talker.send(0)):
        events = pair.begin(5, frames=40)

        def fail() -> None:
            raise KeyboardInterrupt("stop")

        failed = pair.engine.submit(fail)
    assert isinstance(failed.exception(PATIENCE_S), KeyboardInterrupt)
    while isinstance(event := events.get(timeout=PATIENCE_S), SpokenSound):
        assert event.end is None, "expected the thread to fail before the text is spoken"
    assert isinstance(event, EngineError)
    assert isinstance(pair.engine.submit(fail).exception(PATIENCE_S), EngineError)
