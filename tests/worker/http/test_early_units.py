"""Units that run early over a real socket: sound in pieces, silero-vad and the embedded model."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.worker.http.client_scripts import QUIET, base64_of, chunk, compared_fields, picture_of
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.scripted_client import ScriptedClient
from worker.protocol.messages import Result

pytestmark = pytest.mark.usefixtures("all_slots_free")

PIECE = 1_600
SPOKEN_S, SILENT_S = 0.5, 0.4
EARLY = {**QUIET, "early_unit": "auto"}
PATIENCE_S = 120.0


@pytest.fixture
def pieces(root: Path) -> list[np.ndarray]:
    """The middle of a sentence, then silence: less than a unit in all."""
    greeting = soundfile.read(root / "tests/data/greeting.wav", dtype="float32")[0]
    start = int(np.argmax(np.abs(greeting) > 0.1))
    spoken = greeting[start : start + int(SPOKEN_S * 16_000)]
    sound = np.concatenate((spoken, np.zeros(int(SILENT_S * 16_000), np.float32)))
    return list(sound.reshape(-1, PIECE))


def results(client: ScriptedClient, pieces: list[np.ndarray]) -> list[Result]:
    """Send pieces one after the other, each when the one before is answered."""
    found = []
    for piece in pieces:
        client.send(chunk(sound=piece))
        found.append(client.expect(Result))
    return found


def test_model_answers_at_the_pause(worker: WorkerProcess, pieces: list[np.ndarray]) -> None:
    """On a busy machine there may be no time for a trial at first."""
    before, ends = worker.health()["early_units"], time.monotonic() + PATIENCE_S
    early: list[Result] = []
    while not early and time.monotonic() < ends:
        with ScriptedClient(worker) as client:
            client.prepare(EARLY)
            client.unit(0, force_listen=True)  # measures the time of a unit
            answers = results(client, pieces)
            early = [one for one in answers if one.early]
    assert len(early) == 1, f"expected one early unit, got {early}"
    assert not early[0].is_listen and early[0].text, f"expected an answer, got {early[0]}"
    at = answers.index(early[0])
    missing = 1000 - 100 * (at + 1)
    assert early[0].shift_ms == missing, f"expected the {missing} ms that the second lacked, got {early[0].shift_ms}"
    assert at >= 6 and all(one.is_listen and one.incomplete for one in answers[:at]), answers
    assert early[0].incomplete is None and early[0].current_time == answers[0].current_time + 1
    after = worker.health()["early_units"]
    assert after["committed"] == before["committed"] + 1 and after["speculations"] > before["speculations"], after


def test_pieces_wait_for_their_second_without_the_setting(worker: WorkerProcess, pieces: list[np.ndarray]) -> None:
    before = worker.health()["early_units"]
    with ScriptedClient(worker) as client:
        client.prepare(QUIET)
        answers = results(client, [*pieces, pieces[0]])
        assert [one.incomplete for one in answers] == [True] * 9 + [None]
        assert [one.is_listen for one in answers] == [True] * 9 + [False]
    assert worker.health()["early_units"] == before


def test_pictures_sent_ahead_are_encoded_and_fed_before_their_unit(worker: WorkerProcess) -> None:
    """The answers equal those to pictures that come with their unit."""

    def counts() -> tuple[int, int, int]:
        found = worker.health()["early_pictures"]
        return found["encoded"], found["used"], found["fed"]

    answers, before = [], counts()
    with_one = tuple(n + 1 for n in before)
    frame = base64_of(picture_of(0, 64, 48))
    for is_ahead in (True, False):
        with ScriptedClient(worker) as client:
            client.prepare(QUIET)
            client.unit(0)
            if is_ahead:
                client.send({"type": "video_frame", "frame": frame})
                wait_for(lambda: counts() == with_one)
            answers.append(compared_fields(client.unit(1, **({} if is_ahead else {"frame_base64_list": [frame]}))))
            assert counts() == with_one
    assert answers[0] == answers[1] and answers[0]["vision_slices"] == 1, answers


def wait_for(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < ends, f"expected it within {PATIENCE_S:.0f} s"
        time.sleep(0.02)
